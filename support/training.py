"""A trainer in miniature: the transformer of a tiny checkpoint, PEFT on it, one optimiser step after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import peft
import torch
from torch import nn

LORA_LAYERS = {
    "SD3Transformer2DModel": r".*attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)",
    "ZImageTransformer2DModel": r"layers\..*\.(to_q|to_k|to_v|to_out\.0|w1|w2|w3)",
}


def transformer(checkpoint: Path) -> nn.Module:
    """The checkpoint's transformer in diffusers' class, bfloat16."""
    diffusers.utils.logging.set_verbosity_error()  # the config of Z-Image has two fields for sglang alone
    folder = checkpoint / "transformer"
    name = json.loads((folder / "config.json").read_text())["_class_name"]
    model: nn.Module = getattr(diffusers, name).from_pretrained(folder, torch_dtype=torch.bfloat16)
    return model


def with_lora(model: nn.Module, *, fp32: bool = True, **config: Any) -> nn.Module:
    """PEFT's LoRA of rank 4 and alpha 6 on the model's attention and feed-forward layers.

    Args:
        fp32: A and B in float32, as PEFT has them by default; else in the model's dtype, as FSDP2 wants them.
        config: other fields of the `LoraConfig`.
    """
    torch.manual_seed(1)
    fields = {"r": 4, "lora_alpha": 6, "init_lora_weights": "gaussian"}
    fields |= {"target_modules": LORA_LAYERS[type(model).__name__], **config}
    wrapped: nn.Module = peft.get_peft_model(model, peft.LoraConfig(**fields), autocast_adapter_dtype=fp32)
    return wrapped


def optimiser_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)


def step(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """One optimiser step towards random targets."""
    latents = torch.randn(1, 16, 8, 8).bfloat16()
    if "patch_size" in model.config:  # SD3
        caption, pooled = torch.randn(1, 8, 64).bfloat16(), torch.randn(1, 64).bfloat16()
        output = model(latents, caption, pooled, torch.tensor([500.0]), return_dict=False)[0]
    else:
        caption = torch.randn(8, 32).bfloat16()
        output = model([latents[0].unsqueeze(1)], torch.tensor([0.5]), [caption], return_dict=False)[0][0]
    optimiser.zero_grad()
    nn.functional.mse_loss(output.float(), torch.randn(output.shape)).backward()
    optimiser.step()
