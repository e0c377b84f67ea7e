"""Tiny random checkpoints of real architectures in diffusers layout, small enough for a CPU to serve."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    UniPCMultistepScheduler,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()  # one line for each tiny component says nothing

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class ZImageSize:
    """Blocks of Z-Image's transformer, their width, heads, how a head's width is split for the rotary embedding, and
    channels of the latents."""

    layers: int = 2
    dim: int = 64
    heads: int = 4
    axes: tuple[int, int, int] = (4, 6, 6)
    channels: int = 16


def zimage(
    folder: Path, *, dtype: torch.dtype = torch.bfloat16, size: ZImageSize = ZImageSize(), device: str = "cpu"
) -> Path:
    """Z-Image, 2 layers of width 64 unless said otherwise: fused qkv and w13 sections, column and row parallel layers.

    Args:
        device: where the transformer's weights are drawn; billions take minutes on a CPU.
    """
    torch.manual_seed(0)
    tokenizer = _tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    Qwen3Model(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
            tie_word_embeddings=True, pad_token_id=0, bos_token_id=0, eos_token_id=2,
        )
    ).to(torch.bfloat16).save_pretrained(folder / "text_encoder")  # fmt: skip
    with torch.device(device):
        dit = ZImageTransformer2DModel(
            all_patch_size=(2,), all_f_patch_size=(1,), in_channels=size.channels, dim=size.dim, n_layers=size.layers,
            n_refiner_layers=1, n_heads=size.heads, n_kv_heads=size.heads, cap_feat_dim=32,
            axes_dims=list(size.axes), axes_lens=[1024, 512, 512],
        )  # fmt: skip
    _randomise(dit).to(dtype).save_pretrained(folder / "transformer")
    # sglang reads the first two under its own names only, and takes the last to be 16
    config_file = folder / "transformer" / "config.json"
    config = json.loads(config_file.read_text())
    config |= {"num_attention_heads": config["n_heads"], "num_layers": config["n_layers"]}
    config |= {"out_channels": size.channels}
    config_file.write_text(json.dumps(config, indent=1))
    _vae(size.channels).save_pretrained(folder / "vae")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")
    return _index(
        folder,
        "ZImagePipeline",
        scheduler=("diffusers", "FlowMatchEulerDiscreteScheduler"),
        text_encoder=("transformers", "Qwen3Model"),
        tokenizer=("transformers", "Qwen2Tokenizer"),
        transformer=("diffusers", "ZImageTransformer2DModel"),
        vae=("diffusers", "AutoencoderKL"),
    )


def sd3(folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Stable Diffusion 3, 2 joint blocks of width 64: plain replicated ``nn.Linear`` layers."""
    torch.manual_seed(0)
    clip_tokens = _tokenizer(["<|startoftext|>", "<|endoftext|>"], model_max_length=77)
    t5_tokens = _tokenizer(["<pad>", "</s>", "<unk>"], model_max_length=256)
    for name in ("tokenizer", "tokenizer_2"):
        clip_tokens.save_pretrained(folder / name)
    t5_tokens.save_pretrained(folder / "tokenizer_3")
    for name in ("text_encoder", "text_encoder_2"):
        CLIPTextModelWithProjection(
            CLIPTextConfig(
                vocab_size=len(clip_tokens), hidden_size=32, intermediate_size=64, projection_dim=32,
                num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=77,
                bos_token_id=0, eos_token_id=1, pad_token_id=1,
            )
        ).to(torch.float16).save_pretrained(folder / name)  # fmt: skip
    T5EncoderModel(
        T5Config(
            vocab_size=len(t5_tokens), d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4,
            feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        )
    ).save_pretrained(folder / "text_encoder_3")  # fmt: skip
    dit = SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=64, caption_projection_dim=64, pooled_projection_dim=64, out_channels=16,
        pos_embed_max_size=32,
    )  # fmt: skip
    _randomise(dit).to(dtype).save_pretrained(folder / "transformer")
    _vae(16).save_pretrained(folder / "vae")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")
    return _index(
        folder,
        "StableDiffusion3Pipeline",
        scheduler=("diffusers", "FlowMatchEulerDiscreteScheduler"),
        text_encoder=("transformers", "CLIPTextModelWithProjection"),
        text_encoder_2=("transformers", "CLIPTextModelWithProjection"),
        text_encoder_3=("transformers", "T5EncoderModel"),
        tokenizer=("transformers", "CLIPTokenizer"),
        tokenizer_2=("transformers", "CLIPTokenizer"),
        tokenizer_3=("transformers", "T5TokenizerFast"),
        transformer=("diffusers", "SD3Transformer2DModel"),
        vae=("diffusers", "AutoencoderKL"),
    )


def wan2_2(folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Wan2.2-A14B's layout: two transformers of 2 blocks of width 64; of two steps each one takes one."""
    torch.manual_seed(0)
    tokenizer = _tokenizer(["<pad>", "</s>", "<unk>"])
    tokenizer.save_pretrained(folder / "tokenizer")
    UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(tokenizer), d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4,
            feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        )
    ).save_pretrained(folder / "text_encoder")  # fmt: skip
    for name in ("transformer", "transformer_2"):
        dit = WanTransformer3DModel(
            num_attention_heads=4, attention_head_dim=16, in_channels=16, out_channels=16, text_dim=64, freq_dim=32,
            ffn_dim=128, num_layers=2, rope_max_seq_len=64,
        )  # fmt: skip
        _randomise(dit).to(dtype).save_pretrained(folder / name)
    AutoencoderKLWan(base_dim=8, z_dim=16, num_res_blocks=1).save_pretrained(folder / "vae")
    UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True).save_pretrained(
        folder / "scheduler"
    )
    return _index(
        folder,
        "WanPipeline",
        boundary_ratio=0.95,
        scheduler=("diffusers", "UniPCMultistepScheduler"),
        text_encoder=("transformers", "UMT5EncoderModel"),
        tokenizer=("transformers", "T5TokenizerFast"),
        transformer=("diffusers", "WanTransformer3DModel"),
        transformer_2=("diffusers", "WanTransformer3DModel"),
        vae=("diffusers", "AutoencoderKLWan"),
    )


def _randomise(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "pad_token" in name:
                parameter.normal_(0, 0.05)
    return model


def _vae(latent_channels: int) -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=latent_channels, block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=1,
        norm_num_groups=4, sample_size=64, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False,
        use_post_quant_conv=False,
    ).to(torch.bfloat16)  # fmt: skip


def _tokenizer(special: list[str], model_max_length: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE over the 256 bytes; the first special token starts and pads, the last but one ends."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["a photo of a cat"],
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    end = special[1]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, special.index(end))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[-1], bos_token=special[0], pad_token=special[0],
        model_max_length=model_max_length, padding_side="right",
    )  # fmt: skip


def _index(folder: Path, pipeline: str, **entries: tuple[str, str] | float) -> Path:
    index = {"_class_name": pipeline, "_diffusers_version": "0.37.0"} | entries
    (folder / "model_index.json").write_text(json.dumps(index, indent=1))
    return folder
