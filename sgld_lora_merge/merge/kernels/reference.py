"""The definition of a merge in plain torch; also the path that runs on a CPU.

Both modes are those of `adapter.precision.Precision`. FP32 mode evaluates its formula in float64, so that the
only rounding is the one into the weight's dtype: float32 products of random matrices, whose rounding errors grow with
the rank, end up on the other side of a rounding boundary in up to 1.5e-3 of float16 elements.

All large temporaries live in an `EagerScratch` that is allocated before the first write, so that a merge cannot run out
of memory half-way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.spans import Span

READABLE = 8  # elements, 16 bytes of a 16-bit dtype: rows of whole multiples are read by any kernel where they are
CHUNK_ELEMENTS = 2 * 2**20  # elements of one float64 temporary: 16 MiB; bounds scratch, does not change any result


@dataclass(frozen=True, eq=False)
class Term:
    """``scale * (b @ a)[b_rows][:, a_cols]``: what one pair adds to a target.

    Attributes:
        a: ``[rank, columns]``, b: ``[rows, rank]``, any of the pair dtypes; in FP16 mode those of the whole layer.
        scale: applied as a float32.
        b_rows, a_cols: which rows of b and columns of a make the target, in its order.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    b_rows: tuple[Span, ...]
    a_cols: tuple[Span, ...]


@dataclass(frozen=True, eq=False)
class MergeJob:
    """``out = base + the sum of all terms``, for one target.

    In FP16 mode the terms are added one after the other, each sum rounded, as a trainer that merges one adapter after
    the other does.

    Attributes:
        out: ``[rows, columns]``, the live rows; written in place.
        base: ``[rows, columns]``, W0 of these rows, in ``out``'s dtype, on its device or on the host.
        terms: at least one; their ranks and dtypes may differ.
    """

    out: torch.Tensor
    base: torch.Tensor
    terms: tuple[Term, ...]


@dataclass(frozen=True)
class MergeStats:
    """Sums over the elements of merged targets, from which ``rounding_loss`` is made.

    Attributes:
        lost_sq: squared norm of ``W' - (W0 + scale * B @ A)``.
        update_sq: squared norm of ``scale * B @ A``.
        non_finite: elements of W' that are NaN or infinite.
    """

    lost_sq: float = 0.0
    update_sq: float = 0.0
    non_finite: int = 0

    @property
    def rounding_loss(self) -> float:
        """Share of the update, by norm, that rounding to the weight's dtype removed; 0 for an update of zeros."""
        return (self.lost_sq / self.update_sq) ** 0.5 if self.update_sq > 0 else 0.0

    def __add__(self, other: MergeStats) -> MergeStats:
        return MergeStats(
            self.lost_sq + other.lost_sq, self.update_sq + other.update_sq, self.non_finite + other.non_finite
        )


@dataclass(frozen=True, eq=False)
class EagerScratch:
    """Temporaries for jobs, one after the other: two float64 chunks, the product in the weight's dtype, and W0."""

    chunks: tuple[torch.Tensor, ...]
    product: torch.Tensor | None
    base: torch.Tensor


def scratch_for(jobs: Sequence[MergeJob], precision: Precision) -> EagerScratch | None:
    """Allocate what `merge` will need for these jobs; None without jobs."""
    if not jobs:
        return None
    device = jobs[0].out.device
    chunk = max(_chunk_rows(job) * job.out.shape[1] for job in jobs)
    chunks = tuple(torch.empty(chunk, dtype=torch.float64, device=device) for _ in range(2))
    base_bytes = max(job.base.nbytes if job.base.device != device else 0 for job in jobs)
    base = torch.empty(base_bytes, dtype=torch.uint8, device=device)
    if precision is Precision.FP32:
        return EagerScratch(chunks, None, base)
    product_bytes = max(
        term.b.shape[0] * term.a.shape[1] * job.out.element_size() for job in jobs for term in job.terms
    )
    return EagerScratch(chunks, torch.empty(product_bytes, dtype=torch.uint8, device=device), base)


def merge(jobs: Iterable[MergeJob], precision: Precision, scratch: EagerScratch | None) -> list[MergeStats]:
    """Run the jobs, each written in place; one statistics object per job.

    Parameters created under inference mode are writable here, and their version counters do not move.
    """
    run = _merge_fp32 if precision is Precision.FP32 else _merge_fp16
    with torch.inference_mode():
        return [run(_with_base_at_hand(job, scratch), scratch) for job in jobs if scratch is not None]


def _with_base_at_hand(job: MergeJob, scratch: EagerScratch) -> MergeJob:
    """Return the job with its base on the device that merges."""
    if job.base.device == job.out.device:
        return job
    base = scratch.base[: job.base.nbytes].view(job.base.dtype).view(job.base.shape)
    return replace(job, base=base.copy_(job.base))


def _merge_fp32(job: MergeJob, scratch: EagerScratch) -> MergeStats:
    stats = MergeStats()
    for out, update, exact in _chunks(job, job.terms, scratch):
        out.copy_(exact)
        stats += _stats(out, update, exact)
    return stats


def _merge_fp16(job: MergeJob, scratch: EagerScratch) -> MergeStats:
    assert scratch.product is not None
    device, dtype = job.out.device, job.out.dtype
    terms = [replace(term, a=term.a.to(device, dtype), b=term.b.to(device, dtype)) for term in job.terms]
    base = job.base
    for term in terms:
        # The whole product, as a trainer computes it: a library may choose another summation order for another shape.
        rows, columns = term.b.shape[0], term.a.shape[1]
        whole = scratch.product[: rows * columns * dtype.itemsize].view(dtype).view(rows, columns)
        torch.mm(term.b, term.a, out=whole)
        whole.mul_(term.scale)
        torch.add(base, _take(_take(whole, term.b_rows, dim=0), term.a_cols, dim=1), out=job.out)
        base = job.out
    return sum((_stats(*chunk) for chunk in _chunks(job, terms, scratch)), MergeStats())


def _chunks(
    job: MergeJob, terms: Sequence[Term], scratch: EagerScratch
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield for some rows at a time ``out``, the sum of the terms and ``base`` plus that sum, both in float64."""
    device = job.out.device
    sides = []
    for term in terms:
        a = _take(term.a, term.a_cols, dim=1).to(device, torch.float64)
        b = _take(term.b, term.b_rows, dim=0).to(device, torch.float64)
        sides.append((b, a, float(torch.tensor(term.scale, dtype=torch.float32))))
    rows, columns = job.out.shape
    step = _chunk_rows(job)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        update, exact = (chunk[: (stop - start) * columns].view(-1, columns) for chunk in scratch.chunks)
        for position, (b, a, scale) in enumerate(sides):
            torch.mm(b[start:stop], a, out=exact if position else update)
            if position:
                update.add_(exact, alpha=scale)
            else:
                update.mul_(scale)
        torch.add(update, job.base[start:stop], out=exact)
        yield job.out[start:stop], update, exact


def _stats(out: torch.Tensor, update: torch.Tensor, exact: torch.Tensor) -> MergeStats:
    """Compute the statistics of one chunk; ``exact`` is overwritten."""
    non_finite = int((~torch.isfinite(out)).sum())
    return MergeStats(_squared_norm(exact.sub_(out)), _squared_norm(update), non_finite)


def _squared_norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) ** 2


def _take(tensor: torch.Tensor, spans: tuple[Span, ...], dim: int) -> torch.Tensor:
    """Return the spans of one dimension, one after the other; a view where they are a single one."""
    parts = [tensor.narrow(dim, span.start, span.size) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _chunk_rows(job: MergeJob) -> int:
    rows, columns = job.out.shape
    return max(1, min(rows, CHUNK_ELEMENTS // max(columns, 1)))
