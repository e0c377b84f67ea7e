"""Compute what the engine's weights must be, in the form of its verify route."""

from __future__ import annotations

from typing import Any

import torch

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.verify import sha256, ulp
from sgld_lora_merge.trainer.names import LayerPair

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # of --diffusion-forward-dtype
SAMPLES = 16  # elements of a layer that are compared in fp32 mode

Expectation = dict[str, Any]


def expected_base(base: torch.Tensor, dtype: torch.dtype) -> Expectation:
    """Return what the base weight must be, whole, in the engine's dtype."""
    return {"sha256": sha256(base.to(dtype))}


def merged_weight(base: torch.Tensor, pair: LayerPair, scale: float) -> torch.Tensor:
    """Return ``W0 + s * B @ A``, every step in the base weight's own dtype: what the engine's fp16 mode computes."""
    a, b = (side.flatten(1).to(base.dtype) for side in pair)
    return base + ((b @ a) * scale).to(base.dtype).view_as(base)


def expected_merged(
    base: torch.Tensor, pair: LayerPair, scale: float, dtype: torch.dtype, precision: Precision, seed: int
) -> Expectation:
    """Return what the merged weight must be: its hash where it is defined bit for bit, else some elements and bounds.

    Args:
        base, pair: whole tensors on one device.
        dtype: of the engine's weight.
        seed: chooses the elements.
    """
    weight = base.to(dtype)
    if precision is Precision.FP16:
        return {"sha256": sha256(merged_weight(weight, pair, scale))}
    a, b = (side.flatten(1) for side in pair)
    return {"samples": _samples(weight.flatten(1), a, b, scale, seed)}


def _samples(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, seed: int
) -> list[tuple[int, int, float, float]]:
    """Return float64 values with the bound of the fp32 mode: one rounding, and that of the float32 sums."""
    chosen = torch.randint(weight.numel(), (SAMPLES,), generator=torch.Generator().manual_seed(seed))
    rows, columns = (index.to(weight.device) for index in (chosen // weight.shape[1], chosen % weight.shape[1]))
    scale = float(torch.tensor(scale, dtype=torch.float32))
    left, right, own = b[rows].double(), a[:, columns].T.double(), weight[rows, columns].double()
    values = own + scale * (left * right).sum(1)
    sums = 4 * a.shape[0] * 2.0**-24 * (own.abs() + abs(scale) * (left * right).abs().sum(1))
    return [
        # a value just above a power of two may be rounded to one below, whose ulp is half as large
        (row, column, value, 1.0 + 2 * bound / ulp(value, weight.dtype))
        for row, column, value, bound in zip(
            rows.tolist(), columns.tolist(), values.tolist(), sums.tolist(), strict=True
        )
    ]
