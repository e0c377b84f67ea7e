"""What is live against what should be: whole sections by checksum, or single elements within some ulps."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgld_lora_merge.targets import Landing, Span, Target

_MANTISSA_BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
_SMALLEST_EXPONENT = {torch.float32: -149, torch.bfloat16: -133, torch.float16: -24}

Sample = tuple[int, int, float, float]


@dataclass(frozen=True, eq=False)
class Piece:
    """One rank's part of a layer: rows of the local weight, and where they stand in the whole one."""

    target: Target
    rows: torch.Tensor


def assemble(landing: Landing, pieces: Sequence[Piece]) -> torch.Tensor:
    """The whole unsharded weight of a layer, in its landing's shape, from the pieces of all ranks."""
    whole = torch.zeros(landing.out_features, landing.in_features, dtype=pieces[0].rows.dtype)
    for piece in pieces:
        whole[_indices(piece.target.b_rows)[:, None], _indices(piece.target.a_cols)] = piece.rows
    return whole.view(landing.shape)


def sha256(tensor: torch.Tensor) -> str:
    """sglang's checksum of a tensor: its dtype, its shape, its bytes."""
    tensor = tensor.detach().cpu().contiguous()
    hasher = hashlib.sha256(str(tensor.dtype).encode() + repr(tuple(tensor.shape)).encode())
    hasher.update(tensor.view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def sampled(pieces: Sequence[Piece], samples: Sequence[Sample]) -> dict[int, float]:
    """Live values of the samples that these pieces hold, by position in ``samples``."""
    found = {}
    for piece in pieces:
        rows = {int(whole): local for local, whole in enumerate(_indices(piece.target.b_rows))}
        cols = {int(whole): local for local, whole in enumerate(_indices(piece.target.a_cols))}
        for position, (row, column, _, _) in enumerate(samples):
            if row in rows and column in cols:
                found[position] = float(piece.rows[rows[row], cols[column]])
    return found


def within(live: float, expected: float, ulps: float, dtype: torch.dtype) -> bool:
    """Whether a live value is at most ``ulps`` units in the last place, at that value in ``dtype``, from the other."""
    if not math.isfinite(live) or not math.isfinite(expected):
        return False
    return abs(live - expected) <= ulps * ulp(live, dtype)


def ulp(value: float, dtype: torch.dtype) -> float:
    """The unit in the last place of a finite value in ``dtype``."""
    smallest = _SMALLEST_EXPONENT[dtype]
    return 2.0 ** (max(math.frexp(value)[1] - _MANTISSA_BITS[dtype], smallest) if value else smallest)


def _indices(spans: Sequence[Span]) -> torch.Tensor:
    return torch.cat([torch.arange(span.start, span.stop) for span in spans])
