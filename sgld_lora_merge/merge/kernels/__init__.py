"""Run merge jobs and return statistics. Which code runs is decided here and nowhere else.

On a GPU the grouped Triton kernel runs, elsewhere the definition in plain torch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.kernels import reference, words
from sgld_lora_merge.merge.kernels.reference import MergeJob, MergeStats, Term

__all__ = [
    "MergeJob",
    "MergeStats",
    "Scratch",
    "Term",
    "begin",
    "compile_ahead",
    "merge",
    "scratch_for",
    "share_scratch",
    "word_sum",
    "word_sum_of_rows",
]  # fmt: skip

logger = logging.getLogger(__name__)

Scratch = Any  # of the code that made it


def scratch_for(jobs: Sequence[MergeJob], precision: Precision) -> Scratch:
    """Allocate, and compile, all that `merge` will need for these jobs or for some of them; None without jobs.

    The jobs are those of one device. The values of their pairs must not change before the merge.
    """
    return _code_for(jobs[0].out.device).scratch_for(jobs, precision) if jobs else None


def share_scratch(one: MergeJob, other: MergeJob) -> bool:
    """Return whether scratch for one job serves another job of the same target: the kernel reads both pairs in place.

    An update and its undoing mostly are; then only one of them is prepared.
    """
    return len(one.terms) == len(other.terms) and all(
        x.a.shape == y.a.shape
        and x.b.shape == y.b.shape
        and x.a.dtype is y.a.dtype
        and x.b.dtype is y.b.dtype
        and x.a_cols == y.a_cols
        and x.b_rows == y.b_rows
        and x.a.device == y.a.device == one.out.device
        and not (x.a.shape[0] | x.a.shape[1]) % reference.READABLE
        for x, y in zip(one.terms, other.terms, strict=True)
    )


def merge(jobs: Iterable[MergeJob], precision: Precision, scratch: Scratch) -> list[MergeStats]:
    """Run the jobs, each written in place; one statistics object per job.

    Parameters created under inference mode are writable here, and their version counters do not move. The very jobs
    that the scratch was made for cost the least.
    """
    return begin(jobs, precision, scratch)()


def begin(jobs: Iterable[MergeJob], precision: Precision, scratch: Scratch) -> Callable[[], list[MergeStats]]:
    """Start the jobs as `merge` does; return a function that returns the statistics and on a GPU waits for them."""
    if scratch is None:
        return list
    if isinstance(scratch, reference.EagerScratch):
        stats = reference.merge(jobs, precision, scratch)
        return lambda: stats
    begun: Callable[[], list[MergeStats]] = _kernel().begin(jobs, precision, scratch)
    return begun


def compile_ahead(
    device: torch.device, precision: Precision, weight: torch.dtype, pair: torch.dtype, rank: int
) -> None:
    """Compile what a first update of such pairs would wait for; nothing to do on a CPU."""
    code = _code_for(device)
    if code is not reference:
        code.compile_ahead(device, precision, weight, pair, rank)


def word_sum(data: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return the sum that fingerprints are made of; `words.word_sum` defines it and has the arguments."""
    total: torch.Tensor = _words_on(data.device).word_sum(data, start)
    return total


def word_sum_of_rows(data: torch.Tensor, start: int, width: int) -> torch.Tensor:
    """Return the part of that sum which some columns of a matrix are; `words.word_sum_of_rows` defines it."""
    if data.shape[1] == width:
        return word_sum(data.flatten(), start)
    return words.word_sum_of_rows(data, start, width)


@functools.cache
def _words_on(device: torch.device) -> ModuleType:
    """Return the code for sums on this device: the kernel if it compiles there, which takes a second."""
    if device.type != "cuda":
        return words
    try:
        from sgld_lora_merge.merge.kernels import word_tiles

        word_tiles.word_sum(torch.zeros(1, dtype=torch.int64, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        logger.warning("sums are not made by the kernel on %s, but by plain torch: %s", device, error)
        return words
    return word_tiles


def _code_for(device: torch.device) -> ModuleType:
    return _kernel_on(device) if device.type == "cuda" else reference


@functools.cache
def _kernel_on(device: torch.device) -> ModuleType:
    """Return the kernel if it compiles on this device, which needs a C compiler and a GPU that it knows."""
    try:
        kernel = _kernel()
        kernel.compile_ahead(device, Precision.FP32, torch.bfloat16, torch.bfloat16, 16)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        logger.warning("the merge kernel cannot be used on %s, plain torch merges instead: %s", device, error)
        return reference
    return kernel


def _kernel() -> ModuleType:
    from sgld_lora_merge.merge.kernels import grouped

    return grouped
