"""The definition of a merge: fp16 mode is eager torch bit for bit, fp32 mode is float64 rounded once, nearly always."""

import itertools

import pytest
import torch

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge import kernels
from sgld_lora_merge.merge.kernels import MergeJob, MergeStats, Term, reference
from sgld_lora_merge.merge.spans import Span

FP32, FP16 = Precision.FP32, Precision.FP16
WEIGHT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAIR_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALES = [1.5, 2.0, 0.7071, -3.25, 0.0, 1.0]
RANKS = [1, 3, 16, 64, 100, 128, 300]
SHAPES = [(128, 96), (37, 53), (1, 64), (64, 1), (1, 1), (257, 130)]
MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
SMALLEST_ULP = {torch.float32: -149, torch.bfloat16: -133, torch.float16: -24}


def layer(shape, rank, dtype=torch.bfloat16, *, seed=0, b_size=0.01, a_dtype=torch.float32, b_dtype=torch.float32):
    """W0, A and B of the size that they have in a run."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size, std):
        return torch.randn(*size, generator=generator) * std

    rows, columns = shape
    base = random(rows, columns, std=0.02).to(dtype)
    return base, random(rank, columns, std=0.02).to(a_dtype), random(rows, rank, std=b_size).to(b_dtype)


def merge(base, a, b, scale, precision, *, b_rows=None, a_cols=None, out=None):
    """W' and its statistics; what is not written stays NaN."""
    b_rows = b_rows or (Span(0, b.shape[0]),)
    a_cols = a_cols or (Span(0, a.shape[1]),)
    if out is None:
        out = torch.full_like(base, torch.nan, memory_format=torch.contiguous_format)
    job = MergeJob(out, base, (Term(a, b, scale, b_rows, a_cols),))
    scratch = kernels.scratch_for([job], precision)
    if scratch is not None:  # what a scratch held before must not matter
        for chunk in scratch.chunks:
            chunk.fill_(torch.nan)
        if scratch.product is not None:
            scratch.product.fill_(255)
    (stats,) = kernels.merge([job], precision, scratch)
    return out, stats


def eager(base, a, b, scale):
    """What a trainer computes, with A and B in the weight's dtype."""
    a, b = a.to(base.dtype), b.to(base.dtype)
    return base + ((b @ a) * scale).to(base.dtype)


def exact(base, a, b, scale):
    """In float64, with the scale as the float32 that is applied."""
    return base.double() + float(torch.tensor(scale, dtype=torch.float32)) * (b.double() @ a.double())


def ulp(values, dtype):
    _, exponent = torch.frexp(values)
    return torch.exp2((exponent.double() - 1 - MANTISSA_BITS[dtype]).clamp(min=SMALLEST_ULP[dtype]))


def rounded_once(values, dtype):
    """float64 to a shorter dtype in one rounding, half to even; torch itself goes by way of float32."""
    unit = ulp(values, dtype)
    return torch.round(values / unit) * unit


def differing(left, right):
    """Elements whose bytes differ."""
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    return int((left.contiguous().view(integers) != right.contiguous().view(integers)).sum())


# fp16 mode


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_fp16_mode_is_eager_torch_bit_for_bit(dtype, rank):
    """Case M3, for every scale and shape."""
    for seed, (shape, scale) in enumerate(itertools.product(SHAPES, SCALES)):
        base, a, b = layer(shape, rank, dtype, seed=seed)

        merged, _ = merge(base, a, b, scale, FP16)

        assert differing(merged, eager(base, a, b, scale)) == 0, (shape, scale)


@pytest.mark.parametrize(("a_dtype", "b_dtype"), list(itertools.product(PAIR_DTYPES, PAIR_DTYPES)), ids=str)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_fp16_mode_is_eager_torch_for_any_mix_of_pair_dtypes(dtype, a_dtype, b_dtype):
    base, a, b = layer((96, 80), 16, dtype, a_dtype=a_dtype, b_dtype=b_dtype)

    merged, _ = merge(base, a, b, 0.7071, FP16)

    assert differing(merged, eager(base, a, b, 0.7071)) == 0


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_fp16_mode_of_a_shard_is_the_shard_of_the_whole(dtype):
    base, a, b = layer((48, 40), 16, dtype)
    whole = eager(base, a, b, 1.5)
    rows, columns = (Span(5, 21), Span(30, 31)), (Span(3, 20), Span(25, 40))

    shard = take(base, rows, columns)
    merged, _ = merge(shard, a, b, 1.5, FP16, b_rows=rows, a_cols=columns)

    assert differing(merged, take(whole, rows, columns)) == 0


# fp32 mode


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_fp32_mode_is_within_its_bound_of_float64(dtype, rank):
    for seed, (shape, scale) in enumerate(itertools.product(SHAPES, SCALES)):
        base, a, b = layer(shape, rank, dtype, seed=seed)

        merged, _ = merge(base, a, b, scale, FP32)

        assert_within_bound(merged, base, a, b, scale)


@pytest.mark.parametrize(("a_dtype", "b_dtype"), list(itertools.product(PAIR_DTYPES, PAIR_DTYPES)), ids=str)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_fp32_mode_is_within_its_bound_for_any_mix_of_pair_dtypes(dtype, a_dtype, b_dtype):
    base, a, b = layer((96, 80), 16, dtype, a_dtype=a_dtype, b_dtype=b_dtype)

    merged, _ = merge(base, a, b, 0.7071, FP32)

    assert_within_bound(merged, base, a, b, 0.7071)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_fp32_mode_is_within_its_bound_for_an_update_larger_than_the_weight(dtype):
    base, a, b = layer((96, 80), 16, dtype, b_size=10.0)

    merged, _ = merge(base, a, b, -3.25, FP32)

    assert_within_bound(merged, base, a, b, -3.25)


@pytest.mark.parametrize("rank", [1, 16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_at_most_one_element_in_ten_thousand_differs_from_float64_rounded_once(dtype, rank):
    base, a, b = layer((1024, 1024), rank, dtype)

    merged, _ = merge(base, a, b, 2.0, FP32)

    different = merged.double() != rounded_once(exact(base, a, b, 2.0), dtype)
    assert float(different.double().mean()) <= 1e-4
    assert_within_bound(merged, base, a, b, 2.0)


def test_float32_products_are_float32_whatever_shortcut_the_process_uses():
    base, a, b = layer((96, 80), 64, torch.float32)
    expected, _ = merge(base, a, b, 1.5, FP32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        merged, _ = merge(base, a, b, 1.5, FP32)
        after = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)

    assert after == "medium"  # restored
    assert differing(merged, expected) == 0


def test_the_matmul_precision_is_restored_after_a_merge_that_raised():
    base, a, b = layer((8, 8), 2)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(RuntimeError):
            merge(base, a, b[:, :1], 1.0, FP32)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("backend", ["cuda", "mkldnn"])
def test_a_process_that_uses_torchs_newer_precision_switch_can_merge(backend):
    """``torch.backends.*.matmul.fp32_precision`` and the older functions refuse to work with each other."""
    base, a, b = layer((96, 80), 64, torch.float32)
    expected, _ = merge(base, a, b, 1.5, FP32)
    switch = getattr(torch.backends, backend).matmul
    before = switch.fp32_precision
    switch.fp32_precision = "tf32"
    try:
        merged, _ = merge(base, a, b, 1.5, FP32)
        after = switch.fp32_precision
    finally:
        switch.fp32_precision = before

    assert after == "tf32"  # restored
    assert differing(merged, expected) == 0


def assert_within_bound(merged, base, a, b, scale):
    """``0.5 ulp_w(W') + 4 r 2^-24 (abs(W0) + abs(s) (abs(B) @ abs(A)))``, numerics.md."""
    rank = a.shape[0]
    size = base.double().abs() + abs(scale) * (b.double().abs() @ a.double().abs())
    bound = 0.5 * ulp(merged.double(), base.dtype) + 4 * rank * 2.0**-24 * size
    assert torch.isfinite(merged).all()
    assert ((merged.double() - exact(base, a, b, scale)).abs() <= bound).all()


# shards and chunks


def take(tensor, rows, columns):
    rows = torch.cat([tensor[span.start : span.stop] for span in rows])
    return torch.cat([rows[:, span.start : span.stop] for span in columns], dim=1)


@pytest.mark.parametrize("precision", [FP32, FP16])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ((Span(32, 64),), (Span(0, 96),)),
        ((Span(0, 128),), (Span(48, 96),)),
        ((Span(32, 64), Span(96, 128)), (Span(0, 96),)),
        ((Span(96, 128), Span(0, 32)), (Span(64, 96), Span(0, 32))),
        ((Span(64, 128),), (Span(24, 48), Span(72, 96))),
    ],
    ids=["rows", "columns", "fused rows", "rows and columns in another order", "rows of two column spans"],
)
def test_a_shard_is_merged_as_its_part_of_the_whole(precision, dtype, rows, columns):
    base, a, b = layer((128, 96), 16, dtype)
    whole, _ = merge(base, a, b, 0.7071, precision)

    shard, _ = merge(take(base, rows, columns), a, b, 0.7071, precision, b_rows=rows, a_cols=columns)

    assert differing(shard, take(whole, rows, columns)) == 0


@pytest.mark.parametrize("precision", [FP32, FP16])
def test_statistics_of_all_shards_add_up_to_those_of_the_whole(precision):
    base, a, b = layer((64, 96), 16)
    _, whole = merge(base, a, b, 1.5, precision)
    total = MergeStats()

    for rows in (Span(0, 16), Span(16, 64)):
        for columns in (Span(0, 32), Span(32, 96)):
            shard = take(base, (rows,), (columns,))
            total += merge(shard, a, b, 1.5, precision, b_rows=(rows,), a_cols=(columns,))[1]

    assert total.lost_sq == pytest.approx(whole.lost_sq, rel=1e-4)
    assert total.update_sq == pytest.approx(whole.update_sq, rel=1e-6)


@pytest.mark.parametrize("rows_at_a_time", [1, 7, 100, 1000])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_chunks_do_not_change_fp16_mode(monkeypatch, dtype, rows_at_a_time):
    base, a, b = layer((301, 64), 16, dtype)
    expected, whole = merge(base, a, b, 0.7071, FP16)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", rows_at_a_time * 64)

    merged, stats = merge(base, a, b, 0.7071, FP16)

    assert differing(merged, expected) == 0
    assert stats.rounding_loss == pytest.approx(whole.rounding_loss, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("rows_at_a_time", [100, 150, 1000])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_chunks_do_not_change_fp32_mode(monkeypatch, dtype, rows_at_a_time):
    """301 rows, so that a chunk size of 100 or 150 leaves a last row, which a library multiplies in another order."""
    base, a, b = layer((301, 64), 16, dtype)
    expected, whole = merge(base, a, b, 0.7071, FP32)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", rows_at_a_time * 64)

    merged, stats = merge(base, a, b, 0.7071, FP32)

    assert differing(merged, expected) == 0
    assert stats.rounding_loss == pytest.approx(whole.rounding_loss, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("precision", [FP32, FP16])
def test_scratch_is_bounded_by_the_chunk_and_serves_every_job(monkeypatch, precision):
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 256)
    jobs, expected = [], []
    for seed, shape in enumerate([(64, 16), (3, 40), (1, 300)]):
        base, a, b = layer(shape, 3, torch.bfloat16, seed=seed)
        out = torch.full_like(base, torch.nan)
        jobs.append(MergeJob(out, base, (Term(a, b, 1.5, (Span(0, shape[0]),), (Span(0, shape[1]),)),)))
        expected.append(merge(base, a, b, 1.5, precision)[0])

    scratch = kernels.scratch_for(jobs, precision)
    kernels.merge(jobs, precision, scratch)

    assert [chunk.numel() for chunk in scratch.chunks] == [300, 300]  # one row at least
    assert [differing(job.out, want) for job, want in zip(jobs, expected, strict=True)] == [0, 0, 0]


@pytest.mark.parametrize("precision", [FP32, FP16])
def test_no_jobs_need_no_scratch(precision):
    assert kernels.scratch_for([], precision) is None
    assert kernels.merge([], precision, None) == []


# in place


@pytest.mark.parametrize("precision", [FP32, FP16])
def test_the_parameter_keeps_its_storage(precision):
    """Case M4."""
    base, a, b = layer((32, 16), 4)
    parameter = torch.nn.Parameter(base.clone(), requires_grad=False)
    address = parameter.data_ptr()

    merge(base, a, b, 1.5, precision, out=parameter.data)

    assert parameter.data_ptr() == address
    assert differing(parameter.data, merge(base, a, b, 1.5, precision)[0]) == 0


@pytest.mark.parametrize("precision", [FP32, FP16])
def test_a_parameter_made_under_inference_mode_is_written(precision):
    """Case M5."""
    base, a, b = layer((32, 16), 4)
    with torch.inference_mode():
        parameter = torch.nn.Parameter(base.clone(), requires_grad=False)

    merge(base, a, b, 1.5, precision, out=parameter.data)

    assert parameter.is_inference()
    assert differing(parameter.data, merge(base, a, b, 1.5, precision)[0]) == 0


@pytest.mark.parametrize("precision", [FP32, FP16])
def test_rows_of_a_larger_weight_are_written_and_no_others(precision):
    base, a, b = layer((16, 24), 4)
    weight = torch.full((40, 32), 7.0, dtype=base.dtype)

    merge(base, a, b, 1.5, precision, out=weight[8:24, 4:28])

    assert differing(weight[8:24, 4:28], merge(base, a, b, 1.5, precision)[0]) == 0
    weight[8:24, 4:28] = 7.0
    assert (weight == 7.0).all()


@pytest.mark.parametrize("precision", [FP32, FP16])
def test_base_and_pair_are_left_as_they_are(precision):
    tensors = layer((32, 16), 4, torch.float32)
    copies = [tensor.clone() for tensor in tensors]

    merge(*tensors, 1.5, precision)

    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


@pytest.mark.parametrize("precision", [FP32, FP16])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_layouts_of_the_pair_do_not_matter(precision, dtype):
    """Transposed and strided A and B give the bytes of eager torch on the same tensors, or the bound of fp32 mode."""
    base, _, _ = layer((48, 40), 16, dtype)
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(40, 16, generator=generator).mul(0.02).t()
    b = torch.randn(48, 32, generator=generator).mul(0.01)[:, ::2]

    merged, _ = merge(base, a, b, 1.5, precision)

    if precision is FP16:
        assert differing(merged, eager(base, a, b, 1.5)) == 0
    else:
        assert_within_bound(merged, base, a, b, 1.5)


# statistics


@pytest.mark.parametrize(("b_size", "loss"), [(1e-2, 0.01), (1e-3, 0.10), (1e-4, 0.69)])
def test_rounding_loss_of_bfloat16_layers_is_what_was_measured(b_size, loss):
    base, a, b = layer((512, 512), 64, torch.bfloat16, b_size=b_size)

    _, stats = merge(base, a, b, 2.0, FP32)

    assert stats.rounding_loss == pytest.approx(loss, rel=0.15)


@pytest.mark.parametrize("precision", [FP32, FP16])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_rounding_loss_is_its_definition(precision, dtype):
    base, a, b = layer((64, 48), 16, dtype)

    merged, stats = merge(base, a, b, 1.5, precision)

    if precision is FP16:
        a, b = a.to(dtype), b.to(dtype)
    update = 1.5 * (b.double() @ a.double())
    lost = merged.double() - (base.double() + update)
    assert stats.update_sq == pytest.approx(float(update.square().sum()), rel=1e-5)
    if dtype is not torch.float32:  # there it is noise of float32 sums
        assert stats.rounding_loss == pytest.approx(float(lost.norm() / update.norm()), rel=1e-3)
    assert stats.rounding_loss < 1


@pytest.mark.parametrize("precision", [FP32, FP16])
@pytest.mark.parametrize(("scale", "b_size"), [(0.0, 0.01), (1.5, 0.0)], ids=["scale 0", "B 0"])
def test_an_update_of_zeros_is_the_base_and_loses_nothing(precision, scale, b_size):
    """The first push of every run."""
    base, a, b = layer((64, 48), 16, b_size=b_size)

    merged, stats = merge(base, a, b, scale, precision)

    assert differing(merged, base) == 0
    assert stats == MergeStats(0.0, 0.0, 0)
    assert stats.rounding_loss == 0.0


@pytest.mark.parametrize("precision", [FP32, FP16])
def test_an_overflow_of_the_result_is_counted(precision):
    base, a, b = layer((4, 6), 1, torch.float16)
    a.fill_(1.0)
    b.copy_(torch.tensor([[1.0], [6e4], [-6e4], [1.0]]))

    merged, stats = merge(base, a, b, 2.0, precision)

    assert stats.non_finite == 12
    assert torch.isfinite(merged[[0, 3]]).all()


@pytest.mark.parametrize("precision", [FP32, FP16])
def test_a_finite_result_counts_no_overflow(precision):
    assert merge(*layer((64, 48), 16), 1.5, precision)[1].non_finite == 0


def test_statistics_add_up():
    total = MergeStats(1.0, 4.0, 1) + MergeStats(3.0, 12.0, 2)

    assert total == MergeStats(4.0, 16.0, 3)
    assert total.rounding_loss == 0.5
