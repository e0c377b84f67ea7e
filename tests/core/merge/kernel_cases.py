"""What `test_triton_interpreter` runs, with TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools

import pytest
import torch

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.kernels import MergeJob, Term, reference, word_tiles, words
from sgld_lora_merge.merge.kernels import grouped as kernel
from sgld_lora_merge.merge.spans import Span

FP32, FP16 = Precision.FP32, Precision.FP16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RANKS = (1, 3, 16, 64, 100, 128, 300)
MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
SMALLEST_ULP = {torch.float32: -149, torch.bfloat16: -133, torch.float16: -24}


def whole(a, b, scale=1.5):
    return Term(a, b, scale, (Span(0, b.shape[0]),), (Span(0, a.shape[1]),))


def job_of(base, *terms):
    return MergeJob(torch.full_like(base, torch.nan, memory_format=torch.contiguous_format), base, terms)


def draw(shape, rank, dtype=torch.bfloat16, a_dtype=torch.float32, b_dtype=None):
    rows, columns = shape
    base = (torch.randn(rows, columns) * 0.02).to(dtype)
    a, b = torch.randn(rank, columns) * 0.05, torch.randn(rows, rank) * 0.05
    return base, a.to(a_dtype), b.to(b_dtype or a_dtype)


def few_bits(*shape, dtype):
    """Values whose sums of products float32 holds exactly, so that no order of summation shows."""
    return (torch.randint(-16, 17, shape) / 16).to(dtype)


def merged(job, precision):
    """The job's result, with scratch that held something before."""
    scratch = kernel.scratch_for([job], precision)
    for memory in (scratch.table, scratch.partials, scratch.sums):
        memory.fill_(-1)
    (stats,) = kernel.merge([job], precision, scratch)
    return job.out, stats


def exact(job):
    """The merged weight in float64, and the sum of magnitudes that its bound is a multiple of."""
    value, magnitude, ranks = job.base.double(), job.base.double().abs(), 0
    for term in job.terms:
        b = torch.cat([term.b[span.start : span.stop] for span in term.b_rows]).double()
        a = torch.cat([term.a[:, span.start : span.stop] for span in term.a_cols], dim=1).double()
        scale = float(torch.tensor(term.scale, dtype=torch.float32))
        value, magnitude = value + scale * (b @ a), magnitude + abs(scale) * (b.abs() @ a.abs())
        ranks += a.shape[0]
    return value, 4 * ranks * 2.0**-24 * magnitude


def assert_within_promise(job):
    value, allowed = exact(job)
    dtype = job.out.dtype
    _, exponent = torch.frexp(value.to(dtype).double())
    ulp = torch.exp2((exponent.double() - 1 - MANTISSA_BITS[dtype]).clamp(min=SMALLEST_ULP[dtype]))
    assert ((job.out.double() - value).abs() <= 0.5 * ulp + allowed).all()


def eager(base, *terms):
    for term in terms:
        base = base + ((term.b.to(base.dtype) @ term.a.to(base.dtype)) * term.scale).to(base.dtype)
    return base


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp32_mode_keeps_its_bound(dtype, rank):
    for shape, pair, scale in (((70, 40), torch.float32, -3.25), ((64, 128), torch.bfloat16, 0.7071)):
        base, a, b = draw(shape, rank, dtype, pair)
        job = job_of(base, whole(a, b, scale))
        merged(job, FP32)
        assert_within_promise(job)


@pytest.mark.parametrize("rank", [1, 8, 24, 64, 128, 320])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp16_mode_is_eager_torch_in_every_element(dtype, rank):
    for shape, scale in (((70, 40), 1.5), ((64, 128), 0.7071)):
        base, *_ = draw(shape, 1, dtype)
        term = whole(few_bits(rank, shape[1], dtype=dtype), few_bits(shape[0], rank, dtype=torch.float32), scale)
        job = job_of(base, term)
        assert kernel.scratch_for([job], FP16).entries[job] is not None  # the kernel's, not the reference's
        out, _ = merged(job, FP16)
        assert torch.equal(out, eager(base, term))


@pytest.mark.parametrize("rank", [3, 100, 520])
def test_fp16_mode_of_ranks_that_the_kernel_sums_otherwise_is_eager_torch_itself(rank):
    base, a, b = draw((64, 40), rank, a_dtype=torch.bfloat16)
    job = job_of(base, whole(a, b))
    assert kernel.scratch_for([job], FP16).entries[job] is None
    out, _ = merged(job, FP16)
    assert torch.equal(out, eager(base, whole(a, b)))


@pytest.mark.parametrize(("a_dtype", "b_dtype"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_any_mix_of_pair_dtypes_keeps_the_promises(a_dtype, b_dtype):
    base, a, b = draw((40, 24), 16, torch.bfloat16, a_dtype, b_dtype)
    job = job_of(base, whole(a, b))
    merged(job, FP32)
    assert_within_promise(job)
    term = whole(few_bits(16, 24, dtype=a_dtype), few_bits(40, 16, dtype=b_dtype))
    out, _ = merged(job_of(base, term), FP16)
    assert torch.equal(out, eager(base, term))


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ((Span(8, 40),), (Span(16, 48),)),
        ((Span(3, 36),), (Span(5, 30),)),
        ((Span(32, 64), Span(0, 32)), (Span(40, 64), Span(0, 8))),
    ],
    ids=["aligned", "odd", "swapped"],
)
def test_a_shard_is_the_shard_of_the_whole(precision, rows, columns):
    whole_base, *_ = draw((64, 64), 1)
    a, b = few_bits(16, 64, dtype=torch.bfloat16), few_bits(64, 16, dtype=torch.bfloat16)
    wanted = merged(job_of(whole_base, whole(a, b)), precision)[0]

    def shard(matrix):
        part = torch.cat([matrix[span.start : span.stop] for span in rows])
        return torch.cat([part[:, span.start : span.stop] for span in columns], dim=1).clone()

    out, _ = merged(job_of(shard(whole_base), Term(a, b, 1.5, rows, columns)), precision)
    assert torch.equal(out, shard(wanted))


@pytest.mark.parametrize("precision", Precision)
def test_several_adapters_are_one_pass_whatever_their_ranks_and_dtypes(precision):
    base, *_ = draw((70, 40), 1)
    terms = [
        whole(few_bits(rank, 40, dtype=dtype), few_bits(70, rank, dtype=dtype), scale)
        for rank, dtype, scale in ((8, torch.bfloat16, 1.5), (72, torch.float32, -0.25), (1, torch.float16, 0.7071))
    ]
    job = job_of(base, *terms)
    out, _ = merged(job, precision)
    if precision is FP16:
        assert torch.equal(out, eager(base, *terms))
    else:
        assert_within_promise(job)


@pytest.mark.parametrize("precision", Precision)
def test_only_the_rows_of_the_target_are_written(precision):
    fused = torch.full((96, 40), torch.nan, dtype=torch.bfloat16)
    base, a, b = draw((32, 40), 8)
    kernel.merge([job := MergeJob(fused[32:64], base, (whole(a, b),))], precision, kernel.scratch_for([job], precision))
    assert torch.isfinite(fused[32:64]).all()
    assert torch.isnan(fused[:32]).all()
    assert torch.isnan(fused[64:]).all()


def test_transposed_pairs_and_strided_weights_are_read_right():
    base, a, b = draw((40, 24), 8)
    job = job_of(base.t().contiguous().t(), whole(a.t().contiguous().t(), b.t().contiguous().t()))
    merged(job, FP32)
    assert_within_promise(job)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("terms", [1, 2])
def test_the_statistics_are_those_of_the_definition(precision, terms):
    base, *_ = draw((70, 200), 1)
    pairs = [whole(*draw((70, 200), 8, a_dtype=torch.bfloat16)[1:]) for _ in range(terms)]
    _, stats = merged(job_of(base, *pairs), precision)
    job = job_of(base, *pairs)
    (wanted,) = reference.merge([job], precision, reference.scratch_for([job], precision))
    assert stats.lost_sq == pytest.approx(wanted.lost_sq, rel=1e-3)
    assert stats.update_sq == pytest.approx(wanted.update_sq, rel=1e-3)
    assert stats.non_finite == wanted.non_finite == 0


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("precision", Precision)
def test_elements_that_overflow_are_counted_one_by_one(precision):
    base = torch.zeros(70, 40, dtype=torch.float16)
    a, b = torch.zeros(8, 40), torch.zeros(70, 8)
    a[0, :7], b[:, 0], b[5] = 3e4, 3.0, 0.0
    out, stats = merged(job_of(base, whole(a, b)), precision)
    assert stats.non_finite == 69 * 7 == (~torch.isfinite(out)).sum()


@pytest.mark.parametrize("precision", Precision)
def test_an_update_of_zeros_gives_the_base_back_and_loses_nothing(precision):
    base, a, b = draw((70, 40), 16)
    out, stats = merged(job_of(base, whole(a, torch.zeros_like(b))), precision)
    assert torch.equal(out, base)
    assert stats.rounding_loss == 0


@pytest.mark.parametrize("precision", Precision)
def test_jobs_of_many_shapes_come_back_in_their_order(precision):
    shapes = [(70, 40), (8, 16), (70, 40), (3, 5), (8, 16)]
    jobs = [job_of(base, whole(a, b)) for base, a, b in (draw(shape, 8) for shape in shapes)]
    stats = kernel.merge(jobs, precision, scratch := kernel.scratch_for(jobs, precision))
    for job, found in zip(jobs, stats, strict=True):
        alone = job_of(job.base, *job.terms)
        assert merged(alone, precision)[1] == found
        assert torch.equal(alone.out, job.out)
    again = [job_of(job.base, *job.terms) for job in jobs[::-2]]  # some of them, as new objects, with the same scratch
    assert kernel.merge(again, precision, scratch) == stats[::-2]


def test_no_jobs_need_no_scratch():
    assert kernel.scratch_for([], FP32) is None
    assert kernel.merge([], FP32, None) == []


def test_a_kernel_that_is_compiled_ahead_is_the_one_of_the_first_update(monkeypatch):
    launched = []

    class Recorder:
        def __getitem__(self, grid):
            return self

        def __call__(self, table, partials, *sizes, **constants):
            launched.append(constants)
            partials.zero_()

    monkeypatch.setattr(kernel, "merge_group", Recorder())
    kernel.compile_ahead(torch.device("cpu"), FP32, torch.bfloat16, torch.bfloat16, 64)
    base, a, b = draw((768, 1024), 64, a_dtype=torch.bfloat16)
    kernel.merge([job := job_of(base, whole(a, b))], FP32, kernel.scratch_for([job], FP32))
    ahead, update = launched
    assert ahead == update


# the sum of words that fingerprints are made of


@pytest.mark.parametrize("count", [1, 7, word_tiles.BLOCK, 3 * word_tiles.BLOCK + 5])
@pytest.mark.parametrize("start", [0, 2**40])
def test_words_are_summed_as_the_definition_says(count, start):
    data = torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64)
    assert word_tiles.word_sum(data, start).item() == words.word_sum(data, start).item()


def test_programs_that_walk_over_several_blocks(monkeypatch):
    monkeypatch.setattr(word_tiles, "PROGRAMS", 2)
    data = torch.randint(-(2**63), 2**63 - 1, (5 * word_tiles.BLOCK + 1,), dtype=torch.int64)
    assert word_tiles.word_sum(data).item() == words.word_sum(data).item()
