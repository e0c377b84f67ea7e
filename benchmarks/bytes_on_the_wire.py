"""What a sync sends of real models: A and B alone, against every weight. Meta device: no weights, no GPU.

    python -m benchmarks.bytes_on_the_wire --out benchmarks/results

Models are diffusers' classes in the sizes of their published checkpoints, wrapped by PEFT. Layers, names, bytes and
buckets are those that the trainer's strategies plan, read from the wrapped model.
"""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.inventories import models
from sgld_lora_merge.adapter.families import load_families
from sgld_lora_merge.trainer.buckets import flattened_nbytes, plan_buckets
from sgld_lora_merge.trainer.model import read_adapter, read_layers
from sgld_lora_merge.trainer.names import PeftLoRAKeyMapper

COMMAND = "python -m benchmarks.bytes_on_the_wire --out benchmarks/results"
DTYPE = torch.bfloat16
BUFFER_SIZE = 2 * 2**30
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
_FEED_FORWARD = ("net.0.proj", "net.2")


@dataclass(frozen=True)
class Recipe:
    """What carries LoRA in one model, and how many transformers it has.

    Attributes:
        blocks: where the layers are, as a regular expression; embedders and refiners have none.
        target_modules: ends of their names.
    """

    blocks: str
    target_modules: Sequence[str]
    rank: int
    transformers: int = 1


def recipes() -> dict[str, Recipe]:
    """Rank and targets of the model family's file, where there is one."""
    family = load_families()
    return {
        "SD3.5-medium": Recipe("transformer_blocks", family["sd3"].target_modules, family["sd3"].rank),
        "Z-Image": Recipe("layers", family["zimage"].target_modules, family["zimage"].rank),
        "FLUX.1-dev": Recipe(
            "(single_)?transformer_blocks", (*_ATTENTION, *_FEED_FORWARD, "proj_mlp", "proj_out"), rank=64
        ),
        "Qwen-Image": Recipe("transformer_blocks", (*_ATTENTION, *_FEED_FORWARD), rank=64),
        "Wan2.2-A14B": Recipe("blocks", family["wan2_2"].target_modules, family["wan2_2"].rank, transformers=2),
    }


def with_lora(model: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    import peft

    ends = "|".join(map(re.escape, recipe.target_modules))
    config = peft.LoraConfig(r=recipe.rank, target_modules=rf"{recipe.blocks}\.\d+\.(.*\.)?({ends})")
    wrapped: torch.nn.Module = peft.get_peft_model(model, config)
    return wrapped.to(DTYPE)


def planned(tensors: Mapping[str, Sequence[torch.Tensor]]) -> tuple[int, int]:
    """Bytes in buckets, and how many buckets."""
    nbytes = {layer: flattened_nbytes(each) for layer, each in tensors.items()}
    return sum(nbytes.values()), len(plan_buckets(nbytes, BUFFER_SIZE))


def row(name: str, model: torch.nn.Module, recipe: Recipe) -> str:
    wrapped = with_lora(model, recipe)
    adapter = read_adapter(wrapped, PeftLoRAKeyMapper())
    lora, lora_buckets = planned(adapter.pairs)
    layers = read_layers(wrapped, adapter)
    full, full_buckets = planned({layer: list(each.tensors.values()) for layer, each in layers.items()})
    count = recipe.transformers
    cells = [
        name, str(count), f"{count * len(adapter.pairs)}", str(recipe.rank), f"{count * lora / 2**20:.1f} MiB",
        f"{count * full / 2**30:.2f} GiB", f"{100 * lora / full:.2f} %", f"{full / lora:.0f}",
        str(count * lora_buckets), str(count * full_buckets),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    head = ("model", "transformers", "layers with LoRA", "rank", "A and B", "every weight", "A and B are",
            "times fewer", "buckets of A and B", "buckets of weights")  # fmt: skip
    with torch.device("meta"):
        built = {name: build() for name, build in models().items()}
        rows = [row(name, built[name], recipe) for name, recipe in recipes().items()]
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="folder for bytes.md")
    out = parser.parse_args().out
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "diffusers", "peft"))
    text = (
        f"# Bytes on the wire\n\n{date.today()}, {versions}, Python {platform.python_version()}:\n\n    {COMMAND}\n\n"
        f"All in bfloat16, in buckets of at most {BUFFER_SIZE / 2**30:g} GiB; A and B in float32 are twice as many.\n\n"
        f"{table()}\n"
    )
    print(text)
    if out is not None:
        (out / "bytes.md").write_text(text)


if __name__ == "__main__":
    main()
