"""Small merges of every kind, for compute-sanitizer to watch; their values are the tests' to judge.

    python3 -m tests.gpu.memcheck  # compiles, which takes long under the sanitizer
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --target-processes application-only --error-exitcode 9 \\
        python3 -m tests.gpu.memcheck

Without its cache torch gives every tensor an allocation of its own, so that one byte too far is seen.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.kernels import MergeJob, Term, triton
from sgld_lora_merge.merge.spans import Span

WEIGHTS = (torch.bfloat16, torch.float16, torch.float32)
PAIRS = (torch.bfloat16, torch.float32)
RANKS = (1, 16, 100, 300)
SHAPES = ((77, 53), (1, 3072), (65, 136), (128, 256))
STREAMED = ((65, 136), (77, 53))


def term(rank: int, rows: int, columns: int, dtype: torch.dtype) -> Term:
    a, b = torch.randn(rank, columns, device="cuda").to(dtype), torch.randn(rows, rank, device="cuda").to(dtype)
    return Term(a, b, 1.5, (Span(0, rows),), (Span(0, columns),))


def jobs(shape: tuple[int, int], rank: int, weight: torch.dtype, pair: torch.dtype) -> list[MergeJob]:
    """Whole, several at once, of two adapters, a slice of rows and columns, and from the host."""
    rows, columns = shape
    base = torch.randn(shape, device="cuda").to(weight)
    whole = MergeJob(torch.empty_like(base), base, (term(rank, rows, columns, pair),))
    made = [whole, replace(whole, out=torch.empty_like(base))]
    made.append(MergeJob(torch.empty_like(base), base, (whole.terms[0], term(16, rows, columns, pair))))
    outer = term(rank, rows + 7, columns + 24, pair)
    spans = {"b_rows": (Span(0, rows // 2), Span(rows // 2 + 7, rows + 7)), "a_cols": (Span(8, columns + 8),)}
    made.append(MergeJob(torch.empty_like(base), base, (replace(outer, **spans),)))
    if shape in STREAMED:
        made.append(replace(whole, out=torch.empty_like(base), base=base.cpu().pin_memory()))
    return made


def main() -> None:
    merged = taken = 0
    for shape, rank, weight, pair in itertools.product(SHAPES, RANKS, WEIGHTS, PAIRS):
        for precision in Precision:
            batch = jobs(shape, rank, weight, pair)
            scratch = triton.scratch_for(batch, precision)
            assert scratch is not None
            stats = triton.merge(batch, precision, scratch)
            assert all(each.non_finite == 0 for each in stats)
            merged += len(batch)
            taken += sum(entry is not None for entry in scratch.entries.values())
    print(f"{merged} merges, {taken} of them by the kernel")


if __name__ == "__main__":
    main()
