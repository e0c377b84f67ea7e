"""Random LoRA adapters for a checkpoint, and what merging them must give."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

Weights = dict[str, torch.Tensor]
Adapter = dict[str, tuple[torch.Tensor, torch.Tensor]]

ZIMAGE_SUFFIXES = ("to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3")
WAN_SUFFIXES = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
SD3_SUFFIXES = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


def base_weights(checkpoint: Path, module: str = "transformer") -> Weights:
    """Return every tensor of a module of the checkpoint under the trainer's names; large ones lie in several files."""
    files = sorted((checkpoint / module).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def layers(weights: Weights, suffixes: tuple[str, ...]) -> Weights:
    """Layer prefix -> weight, for the linear layers that an adapter targets; refiners are left out."""
    return {
        name.removesuffix(".weight"): weight
        for name, weight in weights.items()
        if name.endswith(tuple(f".{suffix}.weight" for suffix in suffixes)) and "refiner" not in name
    }


def random_adapter(
    targets: Weights, *, rank: int = 4, seed: int = 1, size: float = 0.3, dtype: torch.dtype = torch.bfloat16
) -> Adapter:
    """Layer prefix -> (A ``[rank, in]``, B ``[out, rank]``)."""
    generator = torch.Generator().manual_seed(seed)
    return {
        layer: (
            (torch.randn(rank, weight.shape[1], generator=generator) * size).to(dtype),
            (torch.randn(weight.shape[0], rank, generator=generator) * size).to(dtype),
        )
        for layer, weight in targets.items()
    }


def named(adapter: Adapter) -> list[tuple[str, torch.Tensor]]:
    """The tensors of an adapter under the names of the wire."""
    return [
        (f"{layer}.lora_{side}", tensor)
        for layer, pair in adapter.items()
        for side, tensor in zip("AB", pair, strict=True)
    ]


def merge_fp32(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """fp32 mode, written down once more: the float64 value, rounded once; the scale is a float32."""
    scale = float(torch.tensor(scale, dtype=torch.float32))
    return (weight.double() + scale * (b.double() @ a.double())).to(weight.dtype)


def merge_fp16(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """What a trainer's eager merge gives in the weight's own dtype."""
    return weight + ((b.to(weight.dtype) @ a.to(weight.dtype)) * scale).to(weight.dtype)


def merged(
    targets: Weights,
    adapter: Adapter,
    scale: float | Mapping[str, float],
    merge: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor],
) -> Weights:
    """Targets with the adapter merged; those that it does not name as they are."""
    return {
        layer: merge(weight, *adapter[layer], scale if isinstance(scale, (int, float)) else scale[layer])
        if layer in adapter
        else weight
        for layer, weight in targets.items()
    }


def engine_zimage(targets: Weights) -> Weights:
    """Trainer's layers -> the engine's parameters: q, k, v and w1, w3 are fused."""
    fused = {}
    for layer, weight in targets.items():
        stem, _, tail = layer.rpartition(".")
        if tail == "to_q":
            fused[f"{stem}.to_qkv.weight"] = torch.cat([weight, targets[f"{stem}.to_k"], targets[f"{stem}.to_v"]])
        elif tail == "w1":
            fused[f"{stem}.w13.weight"] = torch.cat([weight, targets[f"{stem}.w3"]])
        elif tail not in ("to_k", "to_v", "w3"):
            fused[f"{layer}.weight"] = weight
    return fused


def engine_sd3(targets: Weights) -> Weights:
    """The engine keeps SD3's names."""
    return {f"{layer}.weight": weight for layer, weight in targets.items()}


def engine_wan(targets: Weights) -> Weights:
    """Self-attention stands in the block itself, output and feed-forward layers have other names."""
    renamed = (("attn1.", ""), ("to_out.0", "to_out"), ("net.0.proj", "fc_in"), ("net.2", "fc_out"))
    names = {}
    for layer, weight in targets.items():
        for old, new in renamed:
            layer = layer.replace(old, new)
        names[f"{layer}.weight"] = weight
    return names


def sha256(tensor: torch.Tensor) -> str:
    """sglang's checksum of a tensor: dtype, shape, bytes."""
    tensor = tensor.contiguous()
    hasher = hashlib.sha256(str(tensor.dtype).encode() + repr(tuple(tensor.shape)).encode())
    hasher.update(tensor.view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def checksums(weights: Weights) -> dict[str, str]:
    return {name: sha256(weight) for name, weight in weights.items()}
