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
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.kernels import reference
from sgld_lora_merge.merge.kernels.reference import MergeJob, MergeStats, Term
from sgld_lora_merge.merge.kernels.table import pack_row
from sgld_lora_merge.merge.kernels.tiles import STATISTICS, merge_group
from sgld_lora_merge.merge.spans import Span

OLDEST_CAPABILITY = (8, 0)  # has bfloat16 in its tensor cores

# Where the kernel adds up as eager torch does, so that fp16 mode is bit for bit the same; tests/gpu holds it to that.
# cuBLAS chooses its order by shape, and where the rows of A, B and W are whole 16 bytes it is the kernel's: of 31,000
# random merges with 85 G elements (H200, torch 2.11, CUDA 13.0, 2026-11-29) only some of ranks 2 to 6 differed.
EXACT_CAPABILITIES = frozenset({(9, 0)})
EXACT_RANKS = frozenset((1, *range(8, 513, 8)))

ALIGNMENT = reference.READABLE  # elements: 16 bytes of a 16-bit dtype, 32 of float32
LONGEST_STRIDE = 2**24  # elements; offsets inside a tile are 32-bit
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class TileConfig:
    """Tile of W0 per step of a program, its warps, and the depth of its pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


# By whether anything is float32, and by ranks, padded; the last of each kind is for passes over A: several terms, or
# more ranks than the table has. Times are multiples of the copy floor in fp32 / fp16 mode, with the statistics: 3.4 B
# bfloat16 parameters in Qwen-Image's shapes, H200, 2026-11-29, benchmarks/results/tune.md.
TILE_CONFIGS = {
    (False, 16): TileConfig(64, 128, 4, 4),  # 1.03 / 1.04
    (False, 32): TileConfig(64, 128, 4, 4),  # 1.03 / 1.03
    (False, 64): TileConfig(64, 128, 4, 4),  # 1.04 / 1.06; with 3 stages 1.05 / 1.07, 64 columns 1.09 / 1.09
    (False, 128): TileConfig(128, 128, 8, 3),  # 1.20 / 1.30; 64 x 64 1.28 / 1.36
    (False, 256): TileConfig(64, 128, 4, 3),  # 1.89 / 2.07
    (False, None): TileConfig(64, 128, 4, 3),
    (True, 16): TileConfig(64, 128, 4, 3),  # 1.06; 64 columns 1.12
    (True, 32): TileConfig(64, 128, 4, 3),  # 1.14; 64 columns 1.24
    (True, 64): TileConfig(64, 128, 4, 2),  # 1.73; 64 columns 2.04
    (True, 128): TileConfig(64, 64, 4, 2),  # 3.19; 128 x 64 3.68
    (True, None): TileConfig(64, 64, 4, 2),
}
NARROW = TileConfig(64, 64, 4, 4)  # weights of 320 columns: 1.19 / 1.26 at rank 32, where 128 columns take 1.31 / 1.41
NARROW_COLUMNS = 512
ROW_TILES = 12  # a program's walk at most; 24: 0 to 2 % slower at these shapes, 10 % at 1000 x 1544
CHUNK_RANKS = 64  # ranks of one pass over A
STREAMED_BYTES = 64 * 2**20  # of W0 from the host per launch; 16 to 128 MiB took 0.96 to 0.99 of the link (H200)


@dataclass(frozen=True)
class KernelVariant:
    """What all targets of one launch have in common. ``aligned``: every row starts at 16 bytes, and so does its end."""

    rows: int
    columns: int
    weight: torch.dtype
    a: torch.dtype
    b: torch.dtype
    ranks: tuple[int, ...]
    aligned: bool
    sequential: bool

    @property
    def split(self) -> bool:
        """Whether A and B are multiplied as float32, in three bfloat16 each; 16 bits are multiplied as they are.

        Closer to float64 than Triton's tf32x3 (1.8e-5 of bfloat16 elements differ at rank 64, 4.5e-5 there) and faster,
        since the groups of A are made once: 1.73 and 3.19 times the floor at ranks 64 and 128. Without statistics
        tf32x3 took 1.95 and 5.03, bf16x6 1.93 and 5.27, ieee 3.25 and 27.
        """
        return not self.sequential and (self.a is not self.b or self.a is torch.float32)

    @property
    def resident_ranks(self) -> int | None:
        """Ranks of the tile of A that stays, padded; None where A comes in passes."""
        padded: int = max(16, triton.next_power_of_2(self.ranks[0]))
        return padded if len(self.ranks) == 1 and (self.wide, padded) in TILE_CONFIGS else None

    @property
    def wide(self) -> bool:
        """Whether tiles take the shared memory, or the registers, of float32."""
        return self.split or torch.float32 in (self.weight, self.a, self.b)

    @property
    def launch(self) -> TileConfig:
        launch = TILE_CONFIGS[self.wide, self.resident_ranks]
        narrow = self.columns < NARROW_COLUMNS and self.columns % launch.columns and not self.wide
        return NARROW if narrow else launch

    @property
    def walk(self) -> int:
        """Row tiles of one program."""
        tiles = _blocks(self.rows, self.launch.rows)
        return _blocks(tiles, _blocks(tiles, ROW_TILES))

    @functools.cached_property
    def programs(self) -> int:
        """Programs of one target."""
        walks = _blocks(_blocks(self.rows, self.launch.rows), self.walk)
        return walks * _blocks(self.columns, self.launch.columns)

    @functools.cached_property
    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled for."""
        launch, resident = self.launch, self.resident_ranks
        ranks = resident or CHUNK_RANKS
        even = self.rows % launch.rows == 0 and self.columns % launch.columns == 0
        return {
            "W": TRITON_DTYPES[self.weight],
            "A": TRITON_DTYPES[self.a],
            "B": TRITON_DTYPES[self.b],
            "DOT": TRITON_DTYPES[self.weight if self.sequential else self.a],
            "TERMS": len(self.ranks),
            "RANKS": ranks,
            "RESIDENT": resident is not None,
            "SEQUENTIAL": self.sequential,
            "SPLIT": self.split,
            "ALIGNED": self.aligned,
            "EVEN": even and all(rank % ranks == 0 for rank in self.ranks),
            "ROWS": launch.rows,
            "COLUMNS": launch.columns,
            "STAGES": launch.stages,
            "emulated": triton.knobs.runtime.interpret,
            "num_warps": launch.warps,
        }


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


def _blocks(elements: int, block: int) -> int:
    return -(-elements // block)


_variant_of = functools.cache(KernelVariant)
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
        copy = torch.zeros(group.shape[0], _blocks(columns, ALIGNMENT) * ALIGNMENT, dtype=dtype, device=device)
        copy[:, :columns].copy_(group)
        staged[key] = (source, copy)
    copy = staged[key][1]
    return copy.data_ptr(), copy.stride(0)
