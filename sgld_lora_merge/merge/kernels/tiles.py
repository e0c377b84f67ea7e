# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The device code of the grouped merge: ``W' = W0 + sum over terms of s * B @ A`` for many targets in one launch.

    grid      (programs of one target, targets of the launch)
    program   one block of COLUMNS columns and a walk of ROWS rows at a time down it: the tile of A stays, tiles of W0
              and B stream past it, and W' is stored with two sums, |W' - exact|^2 and |update|^2
    table     one row for each target: `table.pack_row` writes it, `table.read_target` and `table.read_term` read it
    partials  float64 [programs of all targets, STATISTICS], one row for each program

In fp32 mode a result is rounded once: ``round(W0 + s * (B @ A))``. In fp16 mode (SEQUENTIAL) every step is rounded to
the weight's dtype, as eager torch computes ``W0 + round(s * round(B @ A))``.

``emulated`` is for Triton's interpreter on a CPU: it has no inline assembly, cuts bfloat16 off where it should round,
and multiplies matrices of bfloat16 wrongly.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from sgld_lora_merge.merge.kernels.table import TARGET_FIELDS, TERM_FIELDS, read_target, read_term

STATISTICS = tl.constexpr(
    3
)  # of a program: what rounding lost squared, the update squared, elements that are not finite


# Two bfloat16 share a register. The compiler takes them apart for every conversion, which makes a loop of 704 (fp32
# mode) or 933 (fp16 mode) instructions; these three keep them together: 643 or 865. W0 itself is left to the compiler,
# which then lays it out in shared memory without bank conflicts (1.04 times the copy floor; 1.3 with `_wide`).


@triton.jit
def _rounded(x, dtype: tl.constexpr, emulated: tl.constexpr):
    """Return round float32 to dtype, half to even; return also the float32 that the result is."""
    if dtype == tl.bfloat16:
        if emulated:
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
    result = x.to(dtype)
    return result, result.to(tl.float32)


@triton.jit
def _wide(x, emulated: tl.constexpr):
    """Convert to float32."""
    if x.dtype == tl.bfloat16 and not emulated:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    return x.to(tl.float32)


@triton.jit
def _eager_sum(w, product, scale, dtype: tl.constexpr, emulated: tl.constexpr):
    """Return ``w + (product.to(dtype) * scale).to(dtype)`` in dtype, w given as float32; and the result's float32."""
    if dtype == tl.bfloat16 and not emulated:  # a sum of two bfloat16 is the same rounded once as by way of float32
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 pair, low, high;
            cvt.rn.bf16x2.f32 pair, $6, $5;
            shl.b32 low, pair, 16;
            and.b32 high, pair, 0xffff0000;
            mul.rn.f32 low, low, $7;
            mul.rn.f32 high, high, $8;
            cvt.rn.bf16x2.f32 pair, high, low;
            prmt.b32 low, $3, $4, 0x7632;
            add.rn.bf16x2 $0, low, pair;
            shl.b32 $1, $0, 16;
            and.b32 $2, $0, 0xffff0000;
            }
            """,
            "=&r,=&r,=&r,r,r,r,r,r,r",
            [w, product, scale],
            dtype=(tl.bfloat16, tl.float32),
            is_pure=True,
            pack=2,
        )
    _, rounded = _rounded(product, dtype, emulated)
    _, delta = _rounded(rounded * scale, dtype, emulated)
    return _rounded(w + delta, dtype, emulated)


@triton.jit
def _cast(x, dtype: tl.constexpr, emulated: tl.constexpr):
    if x.dtype == dtype:
        return x
    result, _ = _rounded(_wide(x, emulated), dtype, emulated)
    return result


@triton.jit
def _planes(x, DOT: tl.constexpr, SPLIT: tl.constexpr, emulated: tl.constexpr):
    """Return an operand as the tensor cores take it: cast to DOT, or three bfloat16 that add up to its float32."""
    if SPLIT:
        x = _wide(x, emulated)
        high, value = _rounded(x, tl.bfloat16, emulated)
        x -= value
        middle, value = _rounded(x, tl.bfloat16, emulated)
        low, _ = _rounded(x - value, tl.bfloat16, emulated)
    else:
        high = _cast(x, DOT, emulated)
        middle = high
        low = high
    return high, middle, low


@triton.jit
def _dot(b, a, product, emulated: tl.constexpr):
    if emulated:  # its matrix product of bfloat16 is wrong
        return tl.dot(b.to(tl.float32), a.to(tl.float32), product, input_precision="ieee")
    return tl.dot(b, a, product)


@triton.jit
def _product(b, b_middle, b_low, a, a_middle, a_low, product, SPLIT: tl.constexpr, emulated: tl.constexpr):
    """Return ``product + b @ a`` in float32; of a split the six products that float32 can see, the smallest first."""
    if SPLIT:
        product = _dot(b_low, a, product, emulated)
        product = _dot(b, a_low, product, emulated)
        product = _dot(b_middle, a_middle, product, emulated)
        product = _dot(b_middle, a, product, emulated)
        product = _dot(b, a_middle, product, emulated)
    return _dot(b, a, product, emulated)


@triton.jit
def _load_a(a_ptr, a_stride, ranks, rank, columns, column_count, EVEN: tl.constexpr):
    at_ptr = a_ptr + ranks[:, None] * a_stride.to(tl.int32) + columns[None, :]
    if EVEN:
        return tl.load(at_ptr)
    return tl.load(at_ptr, mask=(ranks[:, None] < rank) & (columns[None, :] < column_count), other=0.0)


@triton.jit
def _load_b(b_ptr, b_stride, rows, row_count, ranks, rank, EVEN: tl.constexpr):
    at_ptr = b_ptr + rows[:, None] * b_stride.to(tl.int32) + ranks[None, :]
    if EVEN:
        return tl.load(at_ptr)
    padded = tl.multiple_of((rank + 7) // 8 * 8, 8)  # B is filled up with zeros to there
    return tl.load(at_ptr, mask=(rows[:, None] < row_count) & (ranks[None, :] < padded), other=0.0)


@triton.jit
def _load_w(base_ptr, base_stride, rows, row_count, columns, column_count, EVEN: tl.constexpr):
    at_ptr = base_ptr + rows[:, None] * base_stride.to(tl.int32) + columns[None, :]
    if EVEN:
        return tl.load(at_ptr)
    return tl.load(at_ptr, mask=(rows[:, None] < row_count) & (columns[None, :] < column_count), other=0.0)


@triton.jit
def _store_w(out_ptr, out_stride, rows, row_count, columns, column_count, w, EVEN: tl.constexpr):
    at_ptr = out_ptr + rows[:, None] * out_stride.to(tl.int32) + columns[None, :]
    if EVEN:
        tl.store(at_ptr, w)
    else:
        tl.store(at_ptr, w, mask=(rows[:, None] < row_count) & (columns[None, :] < column_count))


@triton.jit(do_not_specialize=["first_field", "first_program", "row_count", "column_count", "tiles"])
def merge_group(
    table_ptr,
    partials_ptr,
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
    emulated: tl.constexpr,
):
    job = tl.program_id(1)
    program = tl.program_id(0)
    row_ptr = table_ptr + first_field + job * (TARGET_FIELDS + TERM_FIELDS * TERMS)
    out_ptr, base_ptr, out_stride, base_stride = read_target(row_ptr, W, ALIGNED)
    if ALIGNED:
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
        a_ptr, b_ptr, a_stride, b_stride, rank, scale = read_term(row_ptr + TARGET_FIELDS, A, B)
        a_tile = _load_a(a_ptr, a_stride, ranks, rank, columns, column_count, EVEN)
        a_high, a_middle, a_low = _planes(a_tile, DOT, SPLIT, emulated)
        for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
            row = tile * ROWS
            rows_left = row_count - row
            w = _load_w(base_ptr + row * base_stride, base_stride, tile_rows, rows_left, columns, column_count, EVEN)
            b_tile = _load_b(b_ptr + row * b_stride, b_stride, tile_rows, rows_left, ranks, rank, EVEN)
            b_high, b_middle, b_low = _planes(b_tile, DOT, SPLIT, emulated)
            product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            product = _product(b_high, b_middle, b_low, a_high, a_middle, a_low, product, SPLIT, emulated)
            w = w.to(tl.float32)
            exact = w + scale * product
            if SEQUENTIAL:
                merged, value = _eager_sum(w, product, scale, W, emulated)
            else:
                merged, value = _rounded(exact, W, emulated)
            at_ptr = out_ptr + row * out_stride
            _store_w(at_ptr, out_stride, tile_rows, rows_left, columns, column_count, merged, EVEN)
            lost = exact - value
            lost_sq += tl.sum(lost * lost, axis=1)
            update_sq += tl.sum(product * product, axis=1)
        update_sq *= scale * scale
    else:
        for tile in range(first_tile, last_tile):
            row = tile * ROWS
            rows_left = row_count - row
            w = _load_w(base_ptr + row * base_stride, base_stride, tile_rows, rows_left, columns, column_count, EVEN)
            w = w.to(tl.float32)
            value = w
            update = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for position in tl.static_range(TERMS):
                a_ptr, b_ptr, a_stride, b_stride, rank, scale = read_term(
                    row_ptr + TARGET_FIELDS + TERM_FIELDS * position, A, B
                )
                b_ptr += row * b_stride
                product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
                for start in tl.range(0, rank, RANKS, num_stages=STAGES):
                    at_ptr = a_ptr + start * a_stride
                    a_tile = _load_a(at_ptr, a_stride, ranks, rank - start, columns, column_count, EVEN)
                    b_tile = _load_b(b_ptr + start, b_stride, tile_rows, rows_left, ranks, rank - start, EVEN)
                    a_high, a_middle, a_low = _planes(a_tile, DOT, SPLIT, emulated)
                    b_high, b_middle, b_low = _planes(b_tile, DOT, SPLIT, emulated)
                    if SEQUENTIAL:  # as eager torch adds up
                        product = _product(b_high, b_middle, b_low, a_high, a_middle, a_low, product, SPLIT, emulated)
                    else:  # a long sum in the tensor cores cuts off more than one outside of them rounds
                        zero = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
                        product += _product(b_high, b_middle, b_low, a_high, a_middle, a_low, zero, SPLIT, emulated)
                update += scale * product
                if SEQUENTIAL:
                    merged, value = _eager_sum(value, product, scale, W, emulated)
            exact = w + update
            if not SEQUENTIAL:
                merged, value = _rounded(exact, W, emulated)
            at_ptr = out_ptr + row * out_stride
            _store_w(at_ptr, out_stride, tile_rows, rows_left, columns, column_count, merged, EVEN)
            lost = exact - value
            lost_sq += tl.sum(lost * lost, axis=1)
            update_sq += tl.sum(update * update, axis=1)
    lost_total = tl.sum(lost_sq)
    non_finite = 0
    if not (lost_total < float("inf")):  # as one element that is not finite makes it; a square may overflow as well
        tl.debug_barrier()  # what other threads of this program have stored is read back
        for tile in range(first_tile, last_tile):
            row = tile * ROWS
            at_ptr = out_ptr + row * out_stride
            merged = _load_w(at_ptr, out_stride, tile_rows, row_count - row, columns, column_count, EVEN)
            non_finite += tl.sum((tl.abs(merged.to(tl.float32)) < float("inf")).to(tl.int32) ^ 1)
    sums_ptr = partials_ptr + (first_program + job * tl.num_programs(0) + program) * STATISTICS
    tl.store(sums_ptr, lost_total)
    tl.store(sums_ptr + 1, tl.sum(update_sq))
    tl.store(sums_ptr + 2, non_finite)
