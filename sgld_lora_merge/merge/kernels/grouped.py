"""The merge at the speed of memory: one Triton launch for all targets of one shape.

A program walks down the rows of one block of columns. Its tile of A stays where it is, tiles of W0 and B stream past it
through a software pipeline, and W' and the statistics leave in the same pass. Targets of one shape, whichever layers
they belong to, are one launch: a table on the device holds what differs between them.

W0 that lies in host memory is copied into the live weight on a second stream, and merged there in place, a few targets
per launch: while the kernel merges some, the link brings the next.

What the kernel does not take goes through `reference.merge`: see `_variant`. The formula is in `tiles`, the table in
`table`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.kernels import reference
from sgld_lora_merge.merge.kernels.reference import MergeJob, MergeStats, Term
from sgld_lora_merge.merge.kernels.table import pack_row
from sgld_lora_merge.merge.kernels.tiles import STATISTICS, merge_group
from sgld_lora_merge.merge.kernels.variants import (
    ALIGNMENT,
    EXACT_CAPABILITIES,
    EXACT_RANKS,
    LONGEST_STRIDE,
    NARROW_COLUMNS,
    OLDEST_CAPABILITY,
    STREAMED_BYTES,
    KernelVariant,
    _variant_of,
    blocks_of,
)
from sgld_lora_merge.merge.spans import Span

Staged = dict[tuple[int, tuple[Span, ...], torch.dtype], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class PreparedJob:
    """A job as the kernel takes it: its launch, and its row of the table.

    Attributes:
        streamed: ``out`` and W0, where W0 has to be copied there first; the table then has ``out`` as the base.
    """

    variant: KernelVariant
    row: tuple[int, ...]
    streamed: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True, eq=False)
class LaunchGroup:
    """Targets of one shape that one launch merges, each with its place among the jobs."""

    variant: KernelVariant
    members: list[tuple[int, PreparedJob]]


@dataclass(frozen=True, eq=False)
class KernelScratch:
    """All memory of a merge besides the weights.

    Attributes:
        entries: of the jobs; None for those that `reference.merge` does.
        staged: A and B that the kernel cannot read where they are, and copies that it can; by id, so both are kept.
        table: int64, the fields of all jobs of a merge; on the device. table_host: the same, pinned.
        partials: float64 ``[programs, 3]``, the statistics of each program. sums: float64 ``[jobs, 3]``, of each job.
        copies: the stream that brings W0 from the host; None where none is there.
        eager: for the jobs without an entry.
        filled: the jobs that the table holds, and their groups; at most one of it.
    """

    entries: dict[MergeJob, PreparedJob | None]
    staged: Staged
    table: torch.Tensor
    table_host: torch.Tensor
    partials: torch.Tensor
    sums: torch.Tensor
    copies: torch.cuda.Stream | None
    eager: reference.EagerScratch | None
    filled: list[tuple[list[MergeJob], list[LaunchGroup]]] = field(default_factory=list)


def scratch_for(jobs: Sequence[MergeJob], precision: Precision) -> KernelScratch | None:
    """Allocate what `merge` will need for these jobs, or for some of them; None without jobs.

    A and B on another device, of several spans or not aligned are copied here. Their values must not change before the
    merge.
    """
    if not jobs:
        return None
    device = jobs[0].out.device
    staged: Staged = {}
    entries = {job: _prepare(job, precision, staged) for job in jobs}
    taken = [entry for entry in entries.values() if entry is not None]
    fields = sum(len(entry.row) for entry in taken)
    programs = sum(entry.variant.programs for entry in taken)
    table = torch.empty(fields, dtype=torch.int64, device=device)
    partials = torch.empty(programs, STATISTICS.value, dtype=torch.float64, device=device)
    for variant in {entry.variant for entry in taken}:
        _compile(variant, table, partials)
    return KernelScratch(
        entries,
        staged,
        table,
        torch.empty(fields, dtype=torch.int64, pin_memory=device.type == "cuda"),
        partials,
        torch.empty(len(taken), STATISTICS.value, dtype=torch.float64, device=device),
        _copy_stream(device) if any(entry.streamed for entry in taken) else None,
        reference.scratch_for([job for job, entry in entries.items() if entry is None], precision),
    )


def merge(jobs: Iterable[MergeJob], precision: Precision, scratch: KernelScratch | None) -> list[MergeStats]:
    """Run the jobs, each written in place; one statistics object per job, as `reference.merge` does."""
    return [] if scratch is None else begin(jobs, precision, scratch)()


def begin(jobs: Iterable[MergeJob], precision: Precision, scratch: KernelScratch) -> Callable[[], list[MergeStats]]:
    """Launch the jobs; return a function that waits for their statistics.

    The very job objects that the scratch was made for cost the least; others are prepared again.
    """
    jobs = list(jobs)
    stats: dict[int, MergeStats] = {}
    with torch.inference_mode(), torch.cuda.device_of(scratch.table):
        if not (scratch.filled and _are_the_same_objects(scratch.filled[0][0], jobs)):
            by_variant: dict[KernelVariant, list[tuple[int, PreparedJob]]] = {}
            for position, job in enumerate(jobs):
                entry = scratch.entries[job] if job in scratch.entries else _prepare(job, precision, scratch.staged)
                if entry is None:
                    (stats[position],) = reference.merge([job], precision, scratch.eager)
                else:
                    by_variant.setdefault(entry.variant, []).append((position, entry))
            groups = [group for variant, members in by_variant.items() for group in _launch_groups(variant, members)]
            arrivals = _start_h2d(groups, scratch.copies)
            fill_table(groups, scratch)
            scratch.filled[:] = [] if stats else [(jobs, groups)]
        else:
            groups = scratch.filled[0][1]
            arrivals = _start_h2d(groups, scratch.copies)
        launch(groups, scratch, arrivals)

    def finish() -> list[MergeStats]:
        positions = [position for group in groups for position, _ in group.members]
        for position, sums in zip(positions, scratch.sums[: len(positions)].tolist(), strict=True):
            stats[position] = MergeStats(sums[0], sums[1], int(sums[2]))
        return [stats[position] for position in range(len(stats))]

    return finish


def _are_the_same_objects(some: Sequence[MergeJob], others: Sequence[MergeJob]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _launch_groups(variant: KernelVariant, members: Sequence[tuple[int, PreparedJob]]) -> Iterator[LaunchGroup]:
    """Divide the jobs of one variant into launches: one, or as many as W0 is streamed in."""
    group: list[tuple[int, PreparedJob]] = []
    streamed = 0
    for member in members:
        nbytes = 0 if member[1].streamed is None else member[1].streamed[1].nbytes
        if streamed and streamed + nbytes > STREAMED_BYTES:
            yield LaunchGroup(variant, group)
            group, streamed = [], 0
        group.append(member)
        streamed += nbytes
    yield LaunchGroup(variant, group)


def _start_h2d(groups: Sequence[LaunchGroup], copies: torch.cuda.Stream | None) -> list[torch.cuda.Event | None]:
    """Start to copy W0 from the host to where it is merged; return by launch the event of its arrival."""
    if copies is None:
        return [None] * len(groups)
    arrivals: list[torch.cuda.Event | None] = []
    copies.wait_stream(torch.cuda.current_stream())  # what came before may still use the live weights
    with torch.cuda.stream(copies):
        for group in groups:
            streamed = [entry.streamed for _, entry in group.members if entry.streamed is not None]
            for out, base in streamed:
                out.copy_(base, non_blocking=True)
            arrivals.append(copies.record_event() if streamed else None)
    return arrivals


def fill_table(groups: Sequence[LaunchGroup], scratch: KernelScratch) -> None:
    """Write the rows of all jobs, launch after launch, into the table on the device."""
    fields = [field for group in groups for _, entry in group.members for field in entry.row]
    scratch.table_host[: len(fields)].copy_(torch.tensor(fields, dtype=torch.int64))
    scratch.table[: len(fields)].copy_(scratch.table_host[: len(fields)], non_blocking=True)


def launch(groups: Sequence[LaunchGroup], scratch: KernelScratch, arrivals: Iterable[torch.cuda.Event | None]) -> None:
    """Launch each group, after `fill_table`; the statistics of its jobs follow in ``scratch.sums``."""
    first_field = first_program = first_job = 0
    for group, arrival in zip(groups, arrivals, strict=True):
        variant, count, programs = group.variant, len(group.members), group.variant.programs
        if arrival is not None:
            torch.cuda.current_stream().wait_event(arrival)
        merge_group[(programs, count)](
            scratch.table,
            scratch.partials,
            first_field,
            first_program,
            variant.rows,
            variant.columns,
            variant.walk,
            **variant.constants,
        )
        partials = scratch.partials[first_program : first_program + count * programs].view(
            count, programs, STATISTICS.value
        )
        torch.sum(partials, dim=1, out=scratch.sums[first_job : first_job + count])
        first_field += count * len(group.members[0][1].row)
        first_program += count * programs
        first_job += count


_compiled: set[tuple[torch.device, frozenset[tuple[str, Any]]]] = set()


def _compile(variant: KernelVariant, table: torch.Tensor, partials: torch.Tensor) -> None:
    """Compile and load the kernel, so that a launch of it has nothing left that can fail.

    The arguments that are not constants are not specialised on, so that one binary serves them all. A launch of no
    program does all of this and runs nothing.
    """
    known = (table.device, frozenset(variant.constants.items()))
    if known in _compiled or table.device.type != "cuda":
        return
    with torch.cuda.device_of(table):
        merge_group[(0, 1)](table, partials, 0, 0, variant.rows, variant.columns, variant.walk, **variant.constants)
    _compiled.add(known)


def compile_ahead(
    device: torch.device, precision: Precision, weight: torch.dtype, pair: torch.dtype, rank: int
) -> None:
    """Compile what the first update would wait for: weights of whole tiles, pairs of one dtype and one rank."""
    tile = _variant_of(1, 1, weight, pair, pair, (rank,), True, precision is Precision.FP16).launch
    base = torch.zeros(tile.rows, max(tile.columns, NARROW_COLUMNS), dtype=weight, device=device)
    rows, columns = base.shape
    a, b = (torch.zeros(size, dtype=pair, device=device) for size in ((rank, columns), (rows, rank)))
    job = MergeJob(torch.empty_like(base), base, (Term(a, b, 1.0, (Span(0, rows),), (Span(0, columns),)),))
    merge([job], precision, scratch_for([job], precision))


_capability = functools.cache(torch.cuda.get_device_capability)
_copy_stream = functools.cache(torch.cuda.Stream)


def _prepare(job: MergeJob, precision: Precision, staged: Staged) -> PreparedJob | None:
    variant = _variant(job, precision)
    if variant is None:
        return None
    device = job.out.device
    streamed = None if job.base.device == device else (job.out, job.base)
    base = job.base if streamed is None else job.out
    terms = []
    for term in job.terms:
        a_ptr, a_stride = _readable(term.a, term.a_cols, 1, variant.a, device, staged)
        b_ptr, b_stride = _readable(term.b, term.b_rows, 0, variant.b, device, staged)
        terms.append((a_ptr, b_ptr, a_stride, b_stride, term.a.shape[0], term.scale))
    row = pack_row(job.out.data_ptr(), base.data_ptr(), job.out.stride(0), base.stride(0), terms)
    return PreparedJob(variant, row, streamed)


def _variant(job: MergeJob, precision: Precision) -> KernelVariant | None:
    """Return the variant of a job; None where the kernel does not compute it, or in fp16 mode not exactly."""
    out = job.out
    (rows, columns), device, weight = out.shape, out.device, out.dtype
    base = job.base if job.base.device == device else out
    (out_stride, out_step), (base_stride, base_step) = out.stride(), base.stride()
    if out_step != 1 or base_step != 1 or max(out_stride, base_stride) > LONGEST_STRIDE:
        return None
    on_gpu, sequential = device.type == "cuda", precision is Precision.FP16
    if on_gpu and _capability(device) < OLDEST_CAPABILITY:
        return None
    if sequential and (weight is torch.float32 or (on_gpu and _capability(device) not in EXACT_CAPABILITIES)):
        return None
    ranks, dtypes = [], set()
    for term in job.terms:
        rank, in_features = term.a.shape
        if in_features > LONGEST_STRIDE or (sequential and (rank not in EXACT_RANKS or in_features % ALIGNMENT)):
            return None
        ranks.append(rank)
        dtypes.add((term.a.dtype, term.b.dtype))
    a, b = dtypes.pop() if len(dtypes) == 1 else (torch.float32, torch.float32)
    pointers, elements = out.data_ptr() | base.data_ptr(), columns | out_stride | base_stride
    aligned = not (pointers % 16 or elements % ALIGNMENT)
    return _variant_of(rows, columns, weight, a, b, tuple(ranks), aligned, sequential)


def _readable(
    source: torch.Tensor, spans: tuple[Span, ...], dim: int, dtype: torch.dtype, device: torch.device, staged: Staged
) -> tuple[int, int]:
    """Return address and row stride of the spans as a matrix of aligned rows: in place, or of a copy on the device.

    Rows of a copy are filled up with zeros to whole multiples of ALIGNMENT.
    """
    stride, step = source.stride()
    columns = source.shape[1] if dim == 0 else sum([span.size for span in spans])
    if len(spans) == 1 and step == 1 and source.dtype is dtype and source.device == device:
        first = source.data_ptr() + spans[0].start * (1 if dim else stride) * source.element_size()
        if not (first % 16 or stride % ALIGNMENT or columns % ALIGNMENT):
            return first, stride
    key = (id(source), spans, dtype)
    if key not in staged:
        group = torch.cat([source.narrow(dim, span.start, span.size) for span in spans], dim)
        copy = torch.zeros(group.shape[0], blocks_of(columns, ALIGNMENT) * ALIGNMENT, dtype=dtype, device=device)
        copy[:, :columns].copy_(group)
        staged[key] = (source, copy)
    copy = staged[key][1]
    return copy.data_ptr(), copy.stride(0)
