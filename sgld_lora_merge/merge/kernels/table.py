# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The pointer table of the grouped merge: what differs between the targets of one launch.

One row for each target, all fields int64:

    out_ptr  base_ptr  out_stride  base_stride                      TARGET_FIELDS
    a_ptr  b_ptr  a_stride  b_stride  rank  bits of float32 scale   TERM_FIELDS, once for each term

Pointers are addresses on the device, strides are elements from row to row. A and B start at whole 16 bytes, and so does
each of their rows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

TARGET_FIELDS = tl.constexpr(4)
TERM_FIELDS = tl.constexpr(6)


def pack_row(
    out_ptr: int,
    base_ptr: int,
    out_stride: int,
    base_stride: int,
    terms: Iterable[tuple[int, int, int, int, int, float]],
) -> tuple[int, ...]:
    """Return one row of the table.

    Args:
        terms: ``(a_ptr, b_ptr, a_stride, b_stride, rank, scale)`` of each.
    """
    row = [out_ptr, base_ptr, out_stride, base_stride]
    for a_ptr, b_ptr, a_stride, b_stride, rank, scale in terms:
        (bits,) = struct.unpack("<i", struct.pack("<f", scale))
        row += (a_ptr, b_ptr, a_stride, b_stride, rank, bits)
    return tuple(row)


@triton.jit
def read_target(row_ptr, W: tl.constexpr, ALIGNED: tl.constexpr):  # pragma: no cover  # runs on the device
    """Read a target's part of a row: ``out_ptr, base_ptr, out_stride, base_stride``."""
    out_ptr = tl.load(row_ptr).to(tl.pointer_type(W))
    base_ptr = tl.load(row_ptr + 1).to(tl.pointer_type(W))
    out_stride = tl.load(row_ptr + 2)
    base_stride = tl.load(row_ptr + 3)
    if ALIGNED:
        out_ptr = tl.multiple_of(out_ptr, 16)
        base_ptr = tl.multiple_of(base_ptr, 16)
        out_stride = tl.multiple_of(out_stride, 8)
        base_stride = tl.multiple_of(base_stride, 8)
    return out_ptr, base_ptr, out_stride, base_stride


@triton.jit
def read_term(term_ptr, A: tl.constexpr, B: tl.constexpr):  # pragma: no cover  # runs on the device
    """Read one term of a row: ``a_ptr, b_ptr, a_stride, b_stride, rank, scale``."""
    a_ptr = tl.multiple_of(tl.load(term_ptr).to(tl.pointer_type(A)), 16)
    b_ptr = tl.multiple_of(tl.load(term_ptr + 1).to(tl.pointer_type(B)), 16)
    a_stride = tl.multiple_of(tl.load(term_ptr + 2), 8)
    b_stride = tl.multiple_of(tl.load(term_ptr + 3), 8)
    rank = tl.load(term_ptr + 4).to(tl.int32)
    scale = tl.load(term_ptr + 5).to(tl.int32).to(tl.float32, bitcast=True)
    return a_ptr, b_ptr, a_stride, b_stride, rank, scale
