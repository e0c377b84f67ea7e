"""Compute what the engine's weights must be, in the form of its verify route."""

from __future__ import annotations

from typing import Any

import torch

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.verify import Sample, sha256, ulps
from sgld_lora_merge.trainer.names import LayerPair

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # of --diffusion-forward-dtype
SAMPLES = 4  # elements of a layer that are compared in fp32 mode

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
    rows, columns = choose_positions(torch.tensor([weight.shape]), seed)
    own = weight[rows, columns].to(dtype).cpu()
    [samples] = expected_samples(rows, columns, own, b[rows].cpu(), a.T[columns].cpu(), torch.tensor([scale]), dtype)
    return {"samples": samples}


def choose_positions(shapes: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `SAMPLES` elements of each of many weights, the same ones on every rank.

    Args:
        shapes: int64 ``[layers, 2]``, rows and columns of each.
        seed: chooses them.

    Returns:
        Rows and columns, int64 ``[layers, SAMPLES]``.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(2**62, (len(shapes), SAMPLES), generator=generator) % shapes.prod(1, keepdim=True)
    return chosen // shapes[:, 1:], chosen % shapes[:, 1:]


def expected_samples(
    rows: torch.Tensor,
    columns: torch.Tensor,
    own: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
) -> list[list[Sample]]:
    """Return float64 values of many layers with the bound of the fp32 mode: one rounding, and that of float32 sums.

    Args:
        rows, columns: ``[layers, samples]``.
        own: ``W0`` there, in the engine's dtype, ``[layers, samples]``.
        left, right: rows of B and columns of A there, ``[layers, samples, rank]``.
        scales: ``[layers]``.
        dtype: of the engine's weights.
    """
    scale = scales.float().double()[:, None]  # it is applied as a float32
    own, terms = own.double(), left.double() * right.double()
    values = own + scale * terms.sum(2)
    sums = 4 * left.shape[2] * 2.0**-24 * (own.abs() + scale.abs() * terms.abs().sum(2))
    # a value just above a power of two may be rounded to one below, whose ulp is half as large
    allowed = 1.0 + 2 * sums / ulps(values, dtype)
    numbers = zip(*(each.tolist() for each in (rows, columns, values, allowed)), strict=True)
    return [list(zip(*layer, strict=True)) for layer in numbers]
