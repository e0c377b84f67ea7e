"""LoRA target layers of real models, from diffusers' classes on the meta device: no weights, no GPU.

python3 -m benchmarks.inventories    writes inventories.json
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

PATH = Path(__file__).with_name("inventories.json")
TARGETS = re.compile(
    r"(transformer_blocks|single_transformer_blocks|blocks|layers)\.\d+\."
    r"(attn\d?|attention|ff|ff_context|ffn|feed_forward|img_mlp|txt_mlp|proj_mlp|proj_out)\b"
)


def models() -> dict[str, Callable[[], torch.nn.Module]]:
    """In the sizes of their published checkpoints, which are the defaults but for SD3.5 and FLUX."""
    import diffusers

    return {
        "SD3.5-medium": lambda: diffusers.SD3Transformer2DModel(
            num_layers=24,
            num_attention_heads=24,
            joint_attention_dim=4096,
            caption_projection_dim=1536,
            pos_embed_max_size=384,
            dual_attention_layers=tuple(range(13)),
            qk_norm="rms_norm",
        ),
        "Z-Image": diffusers.ZImageTransformer2DModel,
        "FLUX.1-dev": lambda: diffusers.FluxTransformer2DModel(guidance_embeds=True),
        "Qwen-Image": diffusers.QwenImageTransformer2DModel,
        "Wan2.2-A14B": diffusers.WanTransformer3DModel,  # one of its two experts
    }


def inventory(model: torch.nn.Module) -> list[tuple[int, int, int]]:
    """``(layers, rows, columns)`` of the attention and feed-forward layers."""
    shapes = Counter(
        (layer.out_features, layer.in_features)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and TARGETS.match(name)
    )
    return [(layers, *shape) for shape, layers in sorted(shapes.items())]


def main() -> None:
    with torch.device("meta"):
        found = {name: inventory(build()) for name, build in models().items()}
    PATH.write_text("{\n" + ",\n".join(f"  {json.dumps(n)}: {json.dumps(i)}" for n, i in found.items()) + "\n}\n")


if __name__ == "__main__":
    main()
