"""`words.word_sum` on a GPU: one pass over the words, at the speed of memory."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from sgld_lora_merge.merge.kernels import words as reference

BLOCK = 2048  # words of one step of a program
PROGRAMS = 2048  # at most; each walks over every 2048th block


@triton.jit(do_not_specialize=["count", "start"])  # type: ignore[untyped-decorator]  # Triton is untyped
def _partial_sums(  # type: ignore[no-untyped-def]
    words_ptr,
    partials_ptr,
    count,
    start,
    GAMMA: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store in ``partials[p]`` the sum over the blocks p, p + programs, ...; ``words.word_sum`` has the formula."""
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for first in range(program * BLOCK, count, tl.num_programs(0) * BLOCK):
        offsets = first + tl.arange(0, BLOCK).to(tl.int64)
        inside = offsets < count
        x = tl.load(words_ptr + offsets, mask=inside, other=0) + (offsets + start + 1) * GAMMA
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FIRST
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * SECOND
        x = x ^ ((x >> 31) & 0x1FFFFFFFF)
        total += tl.where(inside, x, 0)
    tl.store(partials_ptr + program, tl.sum(total, axis=0))


def word_sum(words: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Compute `words.word_sum` of words on a GPU; nothing waits for the GPU."""
    programs = max(1, min(PROGRAMS, triton.cdiv(words.numel(), BLOCK)))
    partials = torch.empty(programs, dtype=torch.int64, device=words.device)
    constants = {"GAMMA": reference.GAMMA, "FIRST": reference.FIRST, "SECOND": reference.SECOND}
    with torch.cuda.device_of(words):
        _partial_sums[(programs,)](words, partials, words.numel(), start, **constants, BLOCK=BLOCK)
    return partials.sum()
