# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-untyped-calls=False
"""The merge at the speed of memory: one Triton launch for all targets of one shape.

A program walks down the rows of one block of columns. Its tile of A stays where it is, tiles of W0 and B stream past it
through a software pipeline, and W' and the statistics leave in the same pass. Targets of one shape, whichever layers they
belong to, are one launch: a table on the device holds what differs between them.

What the kernel does not take goes through `reference.merge`: fp16 mode outside the envelope in which the kernel's order of
summation is known to be that of eager torch (`EXACT_RANKS`), and weights whose rows are not contiguous.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from sgld_lora_merge.kernels import reference
from sgld_lora_merge.kernels.reference import MergeJob, MergeStats, Term
from sgld_lora_merge.precision import Precision
from sgld_lora_merge.targets import Span

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
ROW_TILES = 12  # row tiles that a program walks down at most
CHUNK_RANKS = 64  # ranks of one pass where A does not stay: several terms, or more ranks than LAUNCHES has
EXACT_CAPABILITIES = {(9, 0)}
EXACT_RANKS = frozenset((*range(1, 65), 128, 192, 256, 512))
ALIGNMENT = 8  # elements: 16 bytes of a 16-bit dtype, 32 of float32
LONGEST_STRIDE = 2**24  # elements; offsets inside a tile are 32-bit
JOB_FIELDS, TERM_FIELDS = 4, 6


@dataclass(frozen=True)
class Launch:
    """Tile of W0 per step of a program, its warps, and the depth of its pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


# By whether A and B are split (float32), and by ranks, padded. The last entry of each kind is for passes over A.
LAUNCHES = {
    (False, 16): Launch(64, 128, 4, 4),
    (False, 32): Launch(64, 128, 4, 4),
    (False, 64): Launch(64, 128, 4, 3),
    (False, 128): Launch(64, 128, 4, 3),
    (True, 16): Launch(64, 64, 4, 3),
    (True, 32): Launch(64, 64, 4, 3),
    (True, 64): Launch(64, 64, 4, 3),
    (True, 128): Launch(64, 64, 4, 2),
    (False, None): Launch(64, 128, 4, 3),
    (True, None): Launch(64, 64, 4, 2),
}


@dataclass(frozen=True)
class Variant:
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
        return not self.sequential and (self.a is not self.b or self.a is torch.float32)

    @property
    def resident_ranks(self) -> int | None:
        """Ranks of the tile of A that stays, padded; None where A comes in passes."""
        padded = max(16, triton.next_power_of_2(self.ranks[0]))
        return padded if len(self.ranks) == 1 and (self.split, padded) in LAUNCHES else None

    @property
    def launch(self) -> Launch:
        return LAUNCHES[self.split, self.resident_ranks]

    @property
    def grid(self) -> tuple[int, int]:
        """Row tiles of one program, and the programs of one target."""
        tiles = triton.cdiv(self.rows, self.launch.rows)
        walks = triton.cdiv(tiles, ROW_TILES)
        return triton.cdiv(tiles, walks), walks * triton.cdiv(self.columns, self.launch.columns)


@dataclass(frozen=True, eq=False)
class Operand:
    """The slice of an A or B that a target needs, as the kernel reads it; ``source`` is kept so that its id stays its own."""

    source: torch.Tensor
    memory: torch.Tensor


OperandKey = tuple[int, tuple[Span, ...], torch.dtype]


@dataclass(frozen=True, eq=False)
class Scratch:
    """All memory of a merge besides the weights.

    Attributes:
        table: int64, what the kernel must know of each target and term; on the device. table_host: the same, pinned.
        partials: float32 ``[programs, 3]``, statistics of each program. sums: float64 ``[jobs, 3]``, of each target.
        operands: the slices of A and B.
        eager: for the jobs that `reference.merge` does.
    """

    table: torch.Tensor
    table_host: torch.Tensor
    partials: torch.Tensor
    sums: torch.Tensor
    operands: dict[OperandKey, Operand]
    eager: reference.Scratch | None


def scratch_for(jobs: Sequence[MergeJob], precision: Precision) -> Scratch | None:
    """Allocate what `merge` will need for these jobs, or for some of them; None without jobs.

    A and B that the kernel cannot read where they are (on another device, several spans, unaligned) are copied here.
    """
    if not jobs:
        return None
    device = jobs[0].out.device
    operands: dict[OperandKey, Operand] = {}
    fields = programs = 0
    eager = []
    for job in jobs:
        if not _takes(job, precision):
            eager.append(job)
            continue
        variant = _variant(job, precision)
        fields += JOB_FIELDS + TERM_FIELDS * len(job.terms)
        programs += variant.grid[1]
        for term in job.terms:
            for key, source, spans, dim in _sides(term, variant):
                if key not in operands:
                    operands[key] = Operand(source, _readable(source, spans, dim, key[2], device))
    return Scratch(
        torch.empty(fields, dtype=torch.int64, device=device),
        torch.empty(fields, dtype=torch.int64, pin_memory=device.type == "cuda"),
        torch.empty(programs, 3, dtype=torch.float32, device=device),
        torch.empty(len(jobs), 3, dtype=torch.float64, device=device),
        operands,
        reference.scratch_for(eager, precision),
    )


def merge(jobs: Iterable[MergeJob], precision: Precision, scratch: Scratch | None) -> list[MergeStats]:
    """Run the jobs, each written in place; one statistics object per job, as `reference.merge` does."""
    if scratch is None:
        return []
    stats: dict[int, MergeStats] = {}
    groups: dict[Variant, list[tuple[int, MergeJob]]] = {}
    for position, job in enumerate(jobs):
        if _takes(job, precision):
            groups.setdefault(_variant(job, precision), []).append((position, job))
        else:
            (stats[position],) = reference.merge([job], precision, scratch.eager)
    fields = [
        field
        for variant, members in groups.items()
        for _, job in members
        for field in _fields(job, variant, scratch.operands)
    ]
    if fields:
        scratch.table_host[: len(fields)].copy_(torch.tensor(fields, dtype=torch.int64))
        scratch.table[: len(fields)].copy_(scratch.table_host[: len(fields)], non_blocking=True)
        positions = _launch_all(groups, scratch)
        for position, (lost, update, non_finite) in zip(
            positions, scratch.sums[: len(positions)].tolist(), strict=True
        ):
            stats[position] = MergeStats(lost, update, int(non_finite))
    return [stats[position] for position in sorted(stats)]


def _launch_all(groups: dict[Variant, list[tuple[int, MergeJob]]], scratch: Scratch) -> list[int]:
    """One launch for each group; positions of the jobs in the order of ``scratch.sums``."""
    positions: list[int] = []
    first_field = first_program = 0
    for variant, members in groups.items():
        tiles, programs = variant.grid
        _merge_group[(programs, len(members))](
            scratch.table,
            scratch.partials,
            first_field,
            first_program,
            variant.rows,
            variant.columns,
            tiles,
            **_constants(variant),
        )
        stop = first_program + programs * len(members)
        torch.sum(
            scratch.partials[first_program:stop].view(len(members), programs, 3),
            dim=1,
            dtype=torch.float64,
            out=scratch.sums[len(positions) : len(positions) + len(members)],
        )
        positions.extend(position for position, _ in members)
        first_field += len(members) * (JOB_FIELDS + TERM_FIELDS * len(variant.ranks))
        first_program = stop
    return positions


def _constants(variant: Variant) -> dict[str, Any]:
    launch, resident = variant.launch, variant.resident_ranks
    ranks = resident or CHUNK_RANKS
    even = variant.rows % launch.rows == 0 and variant.columns % launch.columns == 0
    return {
        "W": TRITON_DTYPES[variant.weight],
        "A": TRITON_DTYPES[variant.a],
        "B": TRITON_DTYPES[variant.b],
        "DOT": TRITON_DTYPES[variant.weight if variant.sequential else variant.a],
        "TERMS": len(variant.ranks),
        "RANKS": ranks,
        "RESIDENT": resident is not None,
        "SEQUENTIAL": variant.sequential,
        "SPLIT": variant.split,
        "ALIGNED": variant.aligned,
        "EVEN": even and all(rank % ranks == 0 for rank in variant.ranks),
        "ROWS": launch.rows,
        "COLUMNS": launch.columns,
        "STAGES": launch.stages,
        "EMULATED": triton.knobs.runtime.interpret,
        "num_warps": launch.warps,
    }


def _takes(job: MergeJob, precision: Precision) -> bool:
    """Whether the kernel computes this job, and exactly what its precision promises."""
    out, base = job.out, job.base
    if out.stride(1) != 1 or base.stride(1) != 1 or max(out.stride(0), base.stride(0)) > LONGEST_STRIDE:
        return False
    if any(term.a.shape[1] > LONGEST_STRIDE for term in job.terms):
        return False
    if precision is Precision.FP32:
        return True
    exact_device = out.device.type != "cuda" or torch.cuda.get_device_capability(out.device) in EXACT_CAPABILITIES
    return exact_device and out.dtype is not torch.float32 and all(t.a.shape[0] in EXACT_RANKS for t in job.terms)


def _variant(job: MergeJob, precision: Precision) -> Variant:
    out, base, first = job.out, job.base, job.terms[0]
    rows, columns = out.shape
    aligned = columns % ALIGNMENT == 0 and _aligned(out) and _aligned(base)
    same = all(term.a.dtype is first.a.dtype and term.b.dtype is first.b.dtype for term in job.terms)
    a, b = (first.a.dtype, first.b.dtype) if same else (torch.float32, torch.float32)
    ranks = tuple(term.a.shape[0] for term in job.terms)
    return Variant(rows, columns, out.dtype, a, b, ranks, aligned, precision is Precision.FP16)


def _sides(term: Term, variant: Variant) -> tuple[tuple[OperandKey, torch.Tensor, tuple[Span, ...], int], ...]:
    return (
        ((id(term.a), term.a_cols, variant.a), term.a, term.a_cols, 1),
        ((id(term.b), term.b_rows, variant.b), term.b, term.b_rows, 0),
    )


def _fields(job: MergeJob, variant: Variant, operands: dict[OperandKey, Operand]) -> list[int]:
    fields = [job.out.data_ptr(), job.base.data_ptr(), job.out.stride(0), job.base.stride(0)]
    for term in job.terms:
        a, b = (operands[key].memory for key, *_ in _sides(term, variant))
        scale = struct.unpack("<i", struct.pack("<f", term.scale))[0]
        fields += (a.data_ptr(), b.data_ptr(), a.stride(0), b.stride(0), term.a.shape[0], scale)
    return fields


def _readable(
    source: torch.Tensor, spans: tuple[Span, ...], dim: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The spans as a matrix of aligned rows on the device: a view where they are that already, else a copy.

    Rows of a copy are filled up with zeros to whole multiples of ALIGNMENT.
    """
    parts = [source.narrow(dim, span.start, span.size) for span in spans]
    part = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    rows, columns = part.shape
    if (part.device, part.dtype) == (device, dtype) and columns % ALIGNMENT == 0 and _aligned(part):
        return part
    copy = torch.zeros(rows, -(-columns // ALIGNMENT) * ALIGNMENT, dtype=dtype, device=device)
    copy[:, :columns].copy_(part)
    return copy


def _aligned(matrix: torch.Tensor) -> bool:
    return matrix.stride(1) == 1 and matrix.stride(0) % ALIGNMENT == 0 and matrix.data_ptr() % 16 == 0


# the kernel


# Two bfloat16 share a register. The compiler takes them apart for each conversion, which costs more than all the rest of
# the merge; these three keep them together. Elsewhere, and in the interpreter, whose own conversion to bfloat16 cuts
# off, they are plain Triton.


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, EMULATED: tl.constexpr):
    """float32 to DTYPE, half to even, and the float32 that the result is."""
    if DTYPE == tl.bfloat16:
        if EMULATED:
            bits = x.to(tl.uint32, bitcast=True)
            even = bits + 0x7FFF + ((bits >> 16) & 1)
            bits = tl.where(x == x, even, bits | 0x400000) & 0xFFFF0000
            return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), bits.to(tl.float32, bitcast=True)
        return tl.inline_asm_elementwise(
            """
            cvt.rn.bf16x2.f32 $0, $4, $3;
            shl.b32 $1, $0, 16;
            and.b32 $2, $0, 0xffff0000;
            """,
            "=r,=r,=r,r,r",
            [x],
            dtype=(tl.bfloat16, tl.float32),
            is_pure=True,
            pack=2,
        )
    result = x.to(DTYPE)
    return result, result.to(tl.float32)


@triton.jit
def _wide(x, EMULATED: tl.constexpr):
    """To float32."""
    if x.dtype == tl.bfloat16 and not EMULATED:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    return x.to(tl.float32)


@triton.jit
def _eager_sum(w, product, scale, W: tl.constexpr, EMULATED: tl.constexpr):
    """``w + (product.to(W) * scale).to(W)`` in dtype W, and the float32 that the result is."""
    if W == tl.bfloat16 and not EMULATED:  # a sum of two bfloat16 is the same rounded once as by way of float32
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 pair, low, high;
            cvt.rn.bf16x2.f32 pair, $5, $4;
            shl.b32 low, pair, 16;
            and.b32 high, pair, 0xffff0000;
            mul.rn.f32 low, low, $6;
            mul.rn.f32 high, high, $7;
            cvt.rn.bf16x2.f32 pair, high, low;
            add.rn.bf16x2 $0, $3, pair;
            shl.b32 $1, $0, 16;
            and.b32 $2, $0, 0xffff0000;
            }
            """,
            "=&r,=&r,=&r,r,r,r,r,r",
            [w, product, scale],
            dtype=(tl.bfloat16, tl.float32),
            is_pure=True,
            pack=2,
        )
    _, rounded = _rounded(product, W, EMULATED)
    _, delta = _rounded(rounded * scale, W, EMULATED)
    return _rounded(_wide(w, EMULATED) + delta, W, EMULATED)


@triton.jit
def _cast(x, DTYPE: tl.constexpr, EMULATED: tl.constexpr):
    if x.dtype == DTYPE:
        return x
    result, _ = _rounded(_wide(x, EMULATED), DTYPE, EMULATED)
    return result


@triton.jit
def _planes(x, DOT: tl.constexpr, SPLIT: tl.constexpr, EMULATED: tl.constexpr):
    """An operand as the tensor cores take it: cast to DOT, or three bfloat16 that add up to its float32."""
    if SPLIT:
        x = _wide(x, EMULATED)
        high, value = _rounded(x, tl.bfloat16, EMULATED)
        x -= value
        middle, value = _rounded(x, tl.bfloat16, EMULATED)
        low, _ = _rounded(x - value, tl.bfloat16, EMULATED)
    else:
        high = _cast(x, DOT, EMULATED)
        middle = high
        low = high
    return high, middle, low


@triton.jit
def _dot(b, a, product, EMULATED: tl.constexpr):
    if EMULATED:  # its matrix product of bfloat16 is wrong
        return tl.dot(b.to(tl.float32), a.to(tl.float32), product, input_precision="ieee")
    return tl.dot(b, a, product)


@triton.jit
def _product(b, b_middle, b_low, a, a_middle, a_low, product, SPLIT: tl.constexpr, EMULATED: tl.constexpr):
    """``product + b @ a`` in float32; of a split the six products that float32 can see, the smallest first."""
    if SPLIT:
        product = _dot(b_low, a, product, EMULATED)
        product = _dot(b, a_low, product, EMULATED)
        product = _dot(b_middle, a_middle, product, EMULATED)
        product = _dot(b_middle, a, product, EMULATED)
        product = _dot(b, a_middle, product, EMULATED)
    return _dot(b, a, product, EMULATED)


@triton.jit
def _term(entry, A: tl.constexpr, B: tl.constexpr):
    a = tl.multiple_of(tl.load(entry).to(tl.pointer_type(A)), 16)
    b = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(B)), 16)
    a_stride = tl.multiple_of(tl.load(entry + 2), 8)
    b_stride = tl.multiple_of(tl.load(entry + 3), 8)
    rank = tl.load(entry + 4).to(tl.int32)
    scale = tl.load(entry + 5).to(tl.int32).to(tl.float32, bitcast=True)
    return a, b, a_stride, b_stride, rank, scale


@triton.jit
def _load_a(a, stride, ranks, rank, columns, column_count, EVEN: tl.constexpr):
    at = a + ranks[:, None] * stride.to(tl.int32) + columns[None, :]
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(ranks[:, None] < rank) & (columns[None, :] < column_count), other=0.0)


@triton.jit
def _load_b(b, stride, rows, row_count, ranks, rank, EVEN: tl.constexpr):
    at = b + rows[:, None] * stride.to(tl.int32) + ranks[None, :]
    if EVEN:
        return tl.load(at)
    padded = tl.multiple_of((rank + 7) // 8 * 8, 8)  # B is filled up with zeros to there
    return tl.load(at, mask=(rows[:, None] < row_count) & (ranks[None, :] < padded), other=0.0)


@triton.jit
def _load_w(base, stride, rows, row_count, columns, column_count, EVEN: tl.constexpr):
    at = base + rows[:, None] * stride.to(tl.int32) + columns[None, :]
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(rows[:, None] < row_count) & (columns[None, :] < column_count), other=0.0)


@triton.jit
def _store_w(out, stride, rows, row_count, columns, column_count, w, EVEN: tl.constexpr):
    at = out + rows[:, None] * stride.to(tl.int32) + columns[None, :]
    if EVEN:
        tl.store(at, w)
    else:
        tl.store(at, w, mask=(rows[:, None] < row_count) & (columns[None, :] < column_count))


@triton.jit(do_not_specialize=["first_field", "first_program", "row_count", "column_count", "tiles"])
def _merge_group(
    table,
    partials,
    first_field,
    first_program,
    row_count,
    column_count,
    tiles,
    W: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    DOT: tl.constexpr,
    TERMS: tl.constexpr,
    RANKS: tl.constexpr,
    RESIDENT: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    EMULATED: tl.constexpr,
):
    job = tl.program_id(1)
    program = tl.program_id(0)
    entry = table + first_field + job * (4 + 6 * TERMS)
    out = tl.load(entry).to(tl.pointer_type(W))
    base = tl.load(entry + 1).to(tl.pointer_type(W))
    out_stride = tl.load(entry + 2)
    base_stride = tl.load(entry + 3)
    if ALIGNED:
        out = tl.multiple_of(out, 16)
        base = tl.multiple_of(base, 16)
        out_stride = tl.multiple_of(out_stride, 8)
        base_stride = tl.multiple_of(base_stride, 8)
        column_count = column_count // 8 * 8  # of an argument itself the compiler takes no hint
    column_blocks = tl.cdiv(column_count, COLUMNS)
    columns = (program % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    first_tile = (program // column_blocks) * tiles
    last_tile = tl.minimum(first_tile + tiles, tl.cdiv(row_count, ROWS))
    tile_rows = tl.arange(0, ROWS)
    ranks = tl.arange(0, RANKS)
    lost_sq = tl.zeros((ROWS,), dtype=tl.float32)
    update_sq = tl.zeros((ROWS,), dtype=tl.float32)
    if RESIDENT:
        a, b, a_stride, b_stride, rank, scale = _term(entry + 4, A, B)
        a_tile = _load_a(a, a_stride, ranks, rank, columns, column_count, EVEN)
        a_high, a_middle, a_low = _planes(a_tile, DOT, SPLIT, EMULATED)
        for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
            row = tile * ROWS
            rows_left = row_count - row
            w = _load_w(base + row * base_stride, base_stride, tile_rows, rows_left, columns, column_count, EVEN)
            b_tile = _load_b(b + row * b_stride, b_stride, tile_rows, rows_left, ranks, rank, EVEN)
            b_high, b_middle, b_low = _planes(b_tile, DOT, SPLIT, EMULATED)
            product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            product = _product(b_high, b_middle, b_low, a_high, a_middle, a_low, product, SPLIT, EMULATED)
            exact = _wide(w, EMULATED) + scale * product
            if SEQUENTIAL:
                merged, value = _eager_sum(w, product, scale, W, EMULATED)
            else:
                merged, value = _rounded(exact, W, EMULATED)
            at = out + row * out_stride
            _store_w(at, out_stride, tile_rows, rows_left, columns, column_count, merged, EVEN)
            lost = exact - value
            lost_sq += tl.sum(lost * lost, axis=1)
            update_sq += tl.sum(product * product, axis=1)
        update_sq *= scale * scale
    else:
        for tile in range(first_tile, last_tile):
            row = tile * ROWS
            rows_left = row_count - row
            w = _load_w(base + row * base_stride, base_stride, tile_rows, rows_left, columns, column_count, EVEN)
            merged, value = w, _wide(w, EMULATED)
            update = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for position in tl.static_range(TERMS):
                a, b, a_stride, b_stride, rank, scale = _term(entry + 4 + 6 * position, A, B)
                b += row * b_stride
                product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
                for start in tl.range(0, rank, RANKS, num_stages=STAGES):
                    at = a + start * a_stride
                    a_tile = _load_a(at, a_stride, ranks, rank - start, columns, column_count, EVEN)
                    b_tile = _load_b(b + start, b_stride, tile_rows, rows_left, ranks, rank - start, EVEN)
                    a_high, a_middle, a_low = _planes(a_tile, DOT, SPLIT, EMULATED)
                    b_high, b_middle, b_low = _planes(b_tile, DOT, SPLIT, EMULATED)
                    if SEQUENTIAL:  # as eager torch adds up
                        product = _product(b_high, b_middle, b_low, a_high, a_middle, a_low, product, SPLIT, EMULATED)
                    else:  # a long sum in the tensor cores cuts off more than one outside of them rounds
                        zero = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
                        product += _product(b_high, b_middle, b_low, a_high, a_middle, a_low, zero, SPLIT, EMULATED)
                update += scale * product
                if SEQUENTIAL:
                    merged, value = _eager_sum(merged, product, scale, W, EMULATED)
            exact = _wide(w, EMULATED) + update
            if not SEQUENTIAL:
                merged, value = _rounded(exact, W, EMULATED)
            at = out + row * out_stride
            _store_w(at, out_stride, tile_rows, rows_left, columns, column_count, merged, EVEN)
            lost = exact - value
            lost_sq += tl.sum(lost * lost, axis=1)
            update_sq += tl.sum(update * update, axis=1)
    lost_total = tl.sum(lost_sq)
    non_finite = 0
    if not (lost_total < float("inf")):  # an element that is not finite makes the sum so; count them, or a square overflowed
        tl.debug_barrier()  # what other threads of this program have stored is read back
        for tile in range(first_tile, last_tile):
            row = tile * ROWS
            at = out + row * out_stride
            merged = _load_w(at, out_stride, tile_rows, row_count - row, columns, column_count, EVEN)
            non_finite += tl.sum((tl.abs(merged.to(tl.float32)) < float("inf")).to(tl.int32) ^ 1)
    sums = partials + (first_program + job * tl.num_programs(0) + program) * 3
    tl.store(sums, lost_total)
    tl.store(sums + 1, tl.sum(update_sq))
    tl.store(sums + 2, non_finite.to(tl.float32))
