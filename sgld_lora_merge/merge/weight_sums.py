"""Whether several parties that hold parts of a weight hold the same one: ranks of a trainer, and those of an engine.

    el64:<dtype>:<rows>x<columns>:<sum>      the sum in 16 hexadecimal digits

The sum is that of `kernels.words` over the elements in the order of the whole weight's rows, the bits of each element
one word, sign-extended. Each term has the place of its element in it, so that the parts' sums add up to the whole's,
however rows and columns are cut. Like a fingerprint, it finds accidents, not attacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from sgld_lora_merge.merge import kernels
from sgld_lora_merge.merge.spans import Span

CHUNK = 2**22  # elements that are words at a time, 32 MiB
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_BITS = {2: torch.int16, 4: torch.int32}
_FORM = re.compile(r"el64:([a-z0-9]+):([0-9]{1,12})x([0-9]{1,12}):([0-9a-f]{16})")


class Block(NamedTuple):
    """Rows and columns of a whole weight."""

    rows: Span
    columns: Span

    @property
    def size(self) -> int:
        return self.rows.size * self.columns.size


class WeightSum(NamedTuple):
    """What is compared of a whole weight.

    Attributes:
        dtype: that the elements are rounded to before their bits are looked at, without ``torch.``.
        rows, columns: of the whole weight, a convolution's flattened to two dimensions.
        total: modulo 2^64.
    """

    dtype: str
    rows: int
    columns: int
    total: int

    def __str__(self) -> str:
        return f"el64:{self.dtype}:{self.rows}x{self.columns}:{self.total % 2**64:016x}"


def read_weight_sum(text: str) -> WeightSum:
    """Read what `WeightSum` is as text.

    Raises:
        ValueError: it is something else.
    """
    match = _FORM.fullmatch(text)
    if match is None or match[1] not in DTYPES:
        raise ValueError(f"no sum of a weight (el64:<dtype>:<rows>x<columns>:<sum>, dtype of {', '.join(DTYPES)})")
    return WeightSum(match[1], int(match[2]), int(match[3]), int(match[4], 16))


def block_sum(values: torch.Tensor, block: Block, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the part of a sum that is of one block.

    Args:
        values: ``[rows, columns]`` of the block, of any floating dtype, on any device.
        columns: of the whole weight.
        dtype: that the elements are rounded to; one of `DTYPES`.

    Returns:
        int64 without dimensions, on the GPU where there is one, which is not waited for.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else values.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    step = max(1, CHUNK // max(1, values.shape[1]))
    for first in range(0, values.shape[0], step):
        part = values.detach()[first : first + step].to(device).to(dtype).contiguous()
        words = part.view(_BITS[dtype.itemsize]).to(torch.int64)
        start = (block.rows.start + first) * columns + block.columns.start
        total += kernels.word_sum_of_rows(words, start, columns)
    return total


def read_sums(sums: Sequence[torch.Tensor]) -> list[int]:
    """Return the sums as numbers; their device is waited for once."""
    return torch.stack(list(sums)).tolist() if sums else []


def total_of(parts: Iterable[Mapping[Block, int]], rows: int, columns: int) -> int | None:
    """Return the sum of a whole weight from what all parties hold of it; a block that several hold counts once.

    Returns:
        None where the parties hold different values of one block, or where the blocks are not the whole weight.
    """
    found: dict[Block, int] = {}
    for each in parts:
        for block, part in each.items():
            if found.setdefault(block, part) != part:
                return None
    if sum(block.size for block in found) != rows * columns:
        return None
    return sum(found.values()) % 2**64
