"""A file that a pipeline of diffusers has written: LoRA of the transformer and of a text encoder, each with its own."""

from __future__ import annotations

import diffusers
import peft
import transformers
from diffusers.loaders import SD3LoraLoaderMixin
from torch import nn


def models(**configs):
    """Return tiny models of a pipeline, component -> a model that PEFT has added LoRA to."""
    made = {
        "transformer": lambda: diffusers.SD3Transformer2DModel(
            num_layers=1, num_attention_heads=2, attention_head_dim=8, caption_projection_dim=16,
            joint_attention_dim=16, pooled_projection_dim=16, sample_size=8, pos_embed_max_size=8, in_channels=4,
            out_channels=4,
        ),
        "text_encoder": lambda: transformers.CLIPTextModel(transformers.CLIPTextConfig(
            vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=4, bos_token_id=0, eos_token_id=1,
        )),
    }  # fmt: skip
    targets = {"transformer": ["to_q", "to_k"], "text_encoder": ["q_proj", "k_proj"]}
    found = {}
    for component, config in configs.items():
        model = found[component] = made[component]()
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=targets[component], **config), model)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter)
    return found


def scales(model, front=""):
    """Return what PEFT computes with, by layer."""
    return {
        f"{front}{name}": layer.scaling["default"] for name, layer in model.named_modules() if hasattr(layer, "scaling")
    }


def saved(folder, trained, described=None):
    """Save as ``save_lora_weights`` of a pipeline does, with the configs of these components, of all if None."""
    SD3LoraLoaderMixin.save_lora_weights(
        folder,
        **{f"{component}_lora_layers": peft.get_peft_model_state_dict(model) for component, model in trained.items()},
        **{
            f"{component}_lora_adapter_metadata": model.peft_config["default"].to_dict()
            for component, model in trained.items()
            if described is None or component in described
        },
    )
    return folder / "pytorch_lora_weights.safetensors"
