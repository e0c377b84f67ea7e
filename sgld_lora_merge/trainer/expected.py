"""Compute what the engine's weights must be, in the form of its verify route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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


def expected_hash(base: torch.Tensor, pair: LayerPair, scale: float, dtype: torch.dtype) -> Expectation:
    """Return what the merged weight must be where it is defined bit for bit: in the fp16 mode.

    Args:
        base, pair: whole tensors on one device.
        dtype: of the engine's weight.
    """
    return {"sha256": sha256(merged_weight(base.to(dtype), pair, scale))}


def expected_merged(
    base: torch.Tensor, pair: LayerPair, scale: float, dtype: torch.dtype, precision: Precision, seed: int
) -> Expectation:
    """Return what the merged weight must be: its hash where it is defined bit for bit, else some elements and bounds.

    Args:
        base, pair: whole tensors on one device.
        dtype: of the engine's weight.
        seed: chooses the elements.
    """
    if precision is Precision.FP16:
        return expected_hash(base, pair, scale, dtype)
    weight, a, b = (each.flatten(1) for each in (base, *pair))
    [at] = choose_positions([(weight.shape[0], weight.shape[1])], seed)
    return expected_samples(at, weight[at.rows, at.columns].to(dtype), b[at.rows], a[:, at.columns].T, scale, dtype)


class Positions(NamedTuple):
    """Elements of a whole weight that are compared in the fp32 mode, the same ones on every rank."""

    rows: torch.Tensor
    columns: torch.Tensor


def choose_positions(shapes: Sequence[tuple[int, int]], seed: int) -> list[Positions]:
    """Choose `SAMPLES` elements of each weight.

    Args:
        shapes: rows and columns of each.
        seed: chooses them.
    """
    sizes = torch.tensor([rows * columns for rows, columns in shapes])[:, None]
    widths = torch.tensor([columns for _, columns in shapes])[:, None]
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(2**62, (len(shapes), SAMPLES), generator=generator) % sizes
    return [Positions(*each) for each in zip(chosen // widths, chosen % widths, strict=True)]


def expected_samples(
    positions: Positions, own: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float, dtype: torch.dtype
) -> Expectation:
    """Return float64 values with the bound of the fp32 mode: one rounding, and that of the float32 sums.

    Args:
        own: ``W0`` at the positions, in the engine's dtype.
        left, right: rows of B and columns of A there, ``[samples, rank]``.
        dtype: of the engine's weight.
    """
    scale = float(torch.tensor(scale, dtype=torch.float32))
    own, left, right = own.double(), left.double(), right.double()
    values = own + scale * (left * right).sum(1)
    sums = 4 * left.shape[1] * 2.0**-24 * (own.abs() + abs(scale) * (left * right).abs().sum(1))
    numbers = zip(*(each.tolist() for each in (*positions, values, sums)), strict=True)
    return {
        "samples": [
            # a value just above a power of two may be rounded to one below, whose ulp is half as large
            (row, column, value, 1.0 + 2 * bound / ulp(value, dtype))
            for row, column, value, bound in numbers
        ]
    }
