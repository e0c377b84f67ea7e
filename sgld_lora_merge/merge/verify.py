"""What is live against what should be: whole sections by checksum, or single elements within some ulps."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from sgld_lora_merge.merge.spans import Span
from sgld_lora_merge.merge.targets import Landing, Target
from sgld_lora_merge.merge.weight_sums import Block, block_sum

_MANTISSA_BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
_SMALLEST_EXPONENT = {torch.float32: -149, torch.bfloat16: -133, torch.float16: -24}

Sample = tuple[int, int, float, float]


@dataclass(frozen=True, eq=False)
class Piece:
    """One rank's part of a layer: rows of the local weight, and where they stand in the whole one."""

    target: Target
    rows: torch.Tensor


def assemble(landing: Landing, pieces: Sequence[Piece]) -> torch.Tensor:
    """Return the whole unsharded weight of a layer, in its landing's shape, from the pieces of all ranks."""
    everything = (Span(0, landing.out_features),), (Span(0, landing.in_features),)
    if len(pieces) == 1 and (pieces[0].target.b_rows, pieces[0].target.a_cols) == everything:
        return pieces[0].rows.view(landing.shape)
    whole = torch.zeros(landing.out_features, landing.in_features, dtype=pieces[0].rows.dtype)
    for piece in pieces:
        for row, local_row in _placed(piece.target.b_rows):
            for column, local_column in _placed(piece.target.a_cols):
                part = piece.rows[local_row : local_row + row.size, local_column : local_column + column.size]
                whole[row.start : row.stop, column.start : column.stop] = part
    return whole.view(landing.shape)


def block_sums(piece: Piece, columns: int, dtype: torch.dtype) -> dict[Block, torch.Tensor]:
    """Return the sum of every block of the whole weight that a piece holds.

    Args:
        columns: of the whole weight.
        dtype: that the elements are rounded to.
    """
    return {
        Block(row, column): block_sum(
            piece.rows[local_row : local_row + row.size, local_column : local_column + column.size],
            Block(row, column),
            columns,
            dtype,
        )
        for row, local_row in _placed(piece.target.b_rows)
        for column, local_column in _placed(piece.target.a_cols)
    }


def sha256(tensor: torch.Tensor) -> str:
    """Return sglang's checksum of a tensor: its dtype, its shape, its bytes."""
    tensor = tensor.detach().cpu().contiguous()
    hasher = hashlib.sha256(str(tensor.dtype).encode() + repr(tuple(tensor.shape)).encode())
    hasher.update(tensor.view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def sampled(layers: Sequence[tuple[Sequence[Piece], Sequence[Sample]]]) -> list[dict[int, float]]:
    """Return, of each layer, the live values of the samples that its pieces hold, by position among its samples.

    Each device is waited for once, however many layers there are.
    """
    found: list[dict[int, float]] = [{} for _ in layers]
    taken: dict[torch.device, list[tuple[int, int, torch.Tensor, int, int]]] = {}
    for place, (pieces, samples) in enumerate(layers):
        for piece in pieces:
            for position, (row, column, _, _) in enumerate(samples):
                local_row, local_column = _local(piece.target.b_rows, row), _local(piece.target.a_cols, column)
                if local_row is not None and local_column is not None:
                    each = place, position, piece.rows, local_row, local_column
                    taken.setdefault(piece.rows.device, []).append(each)
    for device, elements in taken.items():
        index = torch.tensor([each[3:] for each in elements]).T.to(device)
        values, first = [], 0
        for _, same in groupby(elements, key=lambda each: id(each[2])):
            own = list(same)
            last = first + len(own)
            values.append(own[0][2][index[0, first:last], index[1, first:last]].double())
            first = last
        for (place, position, *_), value in zip(elements, torch.cat(values).tolist(), strict=True):
            found[place][position] = value
    return found


def within(live: float, expected: float, ulps: float, dtype: torch.dtype) -> bool:
    """Return whether a live value is at most ``ulps`` units in the last place, in ``dtype``, from the other."""
    if not math.isfinite(live) or not math.isfinite(expected):
        return False
    return abs(live - expected) <= ulps * ulp(live, dtype)


def ulp(value: float, dtype: torch.dtype) -> float:
    """Return the unit in the last place of a finite value in ``dtype``."""
    smallest = _SMALLEST_EXPONENT[dtype]
    return 2.0 ** (max(math.frexp(value)[1] - _MANTISSA_BITS[dtype], smallest) if value else smallest)


def ulps(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `ulp` of each of many finite values, float64 as they are."""
    exponents = (torch.frexp(values).exponent - _MANTISSA_BITS[dtype]).clamp(min=_SMALLEST_EXPONENT[dtype])
    return torch.where(values == 0, 2.0 ** _SMALLEST_EXPONENT[dtype], torch.exp2(exponents.double()))


def _placed(spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Return spans of the whole with their first local index: they stand one after the other."""
    passed = 0
    for span in spans:
        yield span, passed
        passed += span.size


def _local(spans: Sequence[Span], index: int) -> int | None:
    """Return the local index of one of the whole; None where it is elsewhere."""
    return next((local + index - span.start for span, local in _placed(spans) if span.start <= index < span.stop), None)
