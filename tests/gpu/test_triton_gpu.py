"""The grouped kernel on a GPU: every promise over dtypes, ranks, shapes, slices and scales; float64 and eager judge.

Data are fresh in every run and outputs poisoned; `pytest -s` shows the seed and what was measured.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.kernels import MergeJob, Term
from sgld_lora_merge.merge.spans import Span

kernel = pytest.importorskip("sgld_lora_merge.merge.kernels.grouped")

FP32, FP16 = Precision.FP32, Precision.FP16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RANKS = (1, 3, 16, 64, 100, 128, 300)
SHAPES = ((3072, 3072), (1000, 1544), (77, 1536), (320, 320), (77, 53), (1, 3072), (3, 1))
SCALES = (1.5, 0.7071, 2.0, -3.25, 0.0)
MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
SMALLEST_ULP = {torch.float32: -149, torch.bfloat16: -133, torch.float16: -24}


@pytest.fixture(autouse=True)
def seed():
    value = random.SystemRandom().randrange(2**31)
    torch.manual_seed(value)
    print(f"\nseed {value}")
    return value


def draw(shape, rank, dtype, pair, size=0.05):
    rows, columns = shape
    base = torch.empty(rows, columns, device="cuda").normal_(0, 0.02).to(dtype)
    a = torch.empty(rank, columns, device="cuda").normal_(0, size).to(pair)
    b = torch.empty(rows, rank, device="cuda").normal_(0, size).to(pair)
    return base, a, b


def whole(a, b, scale):
    return Term(a, b, scale, (Span(0, b.shape[0]),), (Span(0, a.shape[1]),))


def merged(base, *terms, precision):
    job = MergeJob(torch.full_like(base, torch.nan), base, terms)
    (stats,) = kernel.merge([job], precision, kernel.scratch_for([job], precision))
    return job.out, stats


def eager(base, *terms):
    for term in terms:
        base = base + ((term.b.to(base.dtype) @ term.a.to(base.dtype)) * term.scale).to(base.dtype)
    return base


def promise(base, *terms):
    """The merged weight in float64, and how far from it the promise lets an element be beside half an ulp."""
    value, allowed = base.double(), 0
    for term in terms:
        value = value + term.scale * (term.b.double() @ term.a.double())
        products = abs(term.scale) * (term.b.double().abs() @ term.a.double().abs())
        allowed = allowed + 4 * term.a.shape[0] * 2.0**-24 * (base.double().abs() + products)
    return value, allowed


def excess(out, value, allowed):
    """The largest error beyond half an ulp, as a share of what is allowed; the promise is at most 1."""
    _, exponent = torch.frexp(value.to(out.dtype).double())
    ulp = torch.exp2((exponent.double() - 1 - MANTISSA_BITS[out.dtype]).clamp_min(SMALLEST_ULP[out.dtype]))
    return float((((out.double() - value).abs() - 0.5 * ulp) / allowed.clamp_min(1e-300)).max())


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("pair", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp32_mode_keeps_its_bound(dtype, pair, rank):
    worst, differing, elements = 0.0, 0, 0
    for shape, scale in itertools.product(SHAPES, SCALES):
        base, a, b = draw(shape, rank, dtype, pair)
        scale = float(torch.tensor(scale, dtype=torch.float32))
        out, stats = merged(base, whole(a, b, scale), precision=FP32)
        value, allowed = promise(base, whole(a, b, scale))
        worst = max(worst, excess(out, value, allowed))
        differing += int((out != value.to(dtype)).sum())
        elements += out.numel()
        if dtype is not torch.float32 and scale:
            lost, update = float((out.double() - value).square().sum()), float((value - base.double()).square().sum())
            exactness = 1e-3 if out.numel() > 1000 else 1e-1  # what float32 gets wrong averages out over many elements
            assert stats.lost_sq == pytest.approx(lost, rel=exactness)
            assert stats.update_sq == pytest.approx(update, rel=1e-3)
        assert stats.non_finite == 0
    print(f"{dtype} weights, {pair} pairs, rank {rank}: {worst:.3f} of the bound, {differing / elements:.1e} differ")
    assert worst <= 1
    if dtype is torch.bfloat16 and rank <= 64:  # beyond, and for float16, sums in float32 do not get there
        assert differing <= 1e-4 * elements


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [16, 64, 128, 300])
def test_fp32_mode_of_updates_as_large_as_in_a_run_is_float64_rounded_once(dtype, rank):
    base, a, b = draw((3072, 3072), rank, dtype, torch.bfloat16, size=0.01)
    out, _ = merged(base, whole(a, b, 2.0), precision=FP32)
    differing = (out != promise(base, whole(a, b, 2.0))[0].to(dtype)).double().mean().item()
    print(f"{dtype}, rank {rank}: {differing:.1e} differ")
    if dtype is torch.bfloat16:
        assert differing <= 1e-4


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp16_mode_is_eager_torch_in_every_element(dtype, rank):
    for shape, scale, pair in itertools.product(SHAPES, SCALES, (dtype, torch.float32)):
        base, a, b = draw(shape, rank, dtype, pair)
        out, _ = merged(base, whole(a, b, scale), precision=FP16)
        assert (out != eager(base, whole(a, b, scale))).sum() == 0, (shape, scale, pair)


def test_fp16_mode_is_eager_torch_wherever_the_kernel_takes_it(seed):
    """Random shapes inside the envelope: if another cuBLAS sums in another order, this is where it shows."""
    choose = random.Random(seed)
    for _ in range(2000):
        rows = choose.choice((choose.randint(1, 64), choose.randint(1, 6000), 2 ** choose.randint(0, 12)))
        columns = 8 * choose.choice((choose.randint(1, 16), choose.randint(1, 900), 2 ** choose.randint(0, 9)))
        rank, dtype = choose.choice(sorted(kernel.EXACT_RANKS)), choose.choice((torch.bfloat16, torch.float16))
        size, scale = choose.choice((1.0, 0.05, 0.001)), choose.choice(SCALES)
        base, a, b = draw((rows, columns), rank, dtype, dtype, size)
        job = MergeJob(torch.full_like(base, torch.nan), base, (whole(a, b, scale),))
        scratch = kernel.scratch_for([job], FP16)
        if torch.cuda.get_device_capability() in kernel.EXACT_CAPABILITIES:
            assert scratch.entries[job] is not None
        kernel.merge([job], FP16, scratch)
        wrong = int((job.out != eager(base, *job.terms)).sum())
        assert wrong == 0, (rows, columns, rank, dtype, size, scale)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("rank", [1, 3, 64, 100, 300])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ((Span(256, 1024),), (Span(512, 1536),)),
        ((Span(7, 1000),), (Span(13, 999),)),
        ((Span(768, 1024), Span(0, 256)), (Span(1024, 1536), Span(0, 128))),
    ],
    ids=["aligned", "odd", "swapped"],
)
def test_a_shard_is_the_shard_of_the_whole(precision, rank, rows, columns):
    """Every element of W' depends on its own row of B and column of A alone, so bytes are equal."""
    base, a, b = draw((1024, 1536), rank, torch.bfloat16, torch.bfloat16)

    def shard(matrix):
        part = torch.cat([matrix[span.start : span.stop] for span in rows])
        return torch.cat([part[:, span.start : span.stop] for span in columns], dim=1).clone()

    wanted = shard(merged(base, whole(a, b, 0.7071), precision=precision)[0])
    out, _ = merged(shard(base), Term(a, b, 0.7071, rows, columns), precision=precision)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("pair", [torch.bfloat16, torch.float32], ids=str)
def test_several_adapters_are_merged_as_one_after_the_other(pair):
    base, *_ = draw((1000, 1544), 1, torch.bfloat16, pair)
    terms = [
        whole(*draw((1000, 1544), rank, torch.bfloat16, pair)[1:], scale) for rank, scale in ((16, 1.5), (64, -0.25))
    ]
    out, _ = merged(base, *terms, precision=FP16)
    assert torch.equal(out, eager(base, *terms))
    out, _ = merged(base, *terms, precision=FP32)
    assert excess(out, *promise(base, *terms)) <= 1


@pytest.mark.parametrize("precision", Precision)
def test_weights_beyond_2_to_the_31_elements(precision):
    base, a, b = draw((40_000, 65_536), 16, torch.bfloat16, torch.bfloat16)
    out, stats = merged(base, whole(a, b, 1.5), precision=precision)
    for rows in torch.arange(40_000).split(4000):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        if precision is FP16:
            assert torch.equal(out[part], eager(base[part], whole(a, b[part], 1.5)))
        else:
            assert excess(out[part], *promise(base[part], whole(a, b[part], 1.5))) <= 1
    assert stats.update_sq == pytest.approx(
        1.5**2 * float((b.double().T @ b.double() * (a.double() @ a.double().T)).sum()), rel=1e-3
    )


@pytest.mark.parametrize("precision", Precision)
def test_many_layers_are_few_launches_and_no_allocation(precision):
    shapes = [(3072, 3072)] * 6 + [(1536, 3072)] * 3 + [(77, 53)]
    layers = [draw(shape, 64, torch.bfloat16, torch.bfloat16) for shape in shapes]
    jobs = [MergeJob(torch.full_like(base, torch.nan), base, (whole(a, b, 1.5),)) for base, a, b in layers]
    scratch = kernel.scratch_for(jobs[:-1], precision)
    stats = kernel.merge(jobs[:-1], precision, scratch)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    again = kernel.merge(jobs[:-1], precision, scratch)
    assert torch.cuda.max_memory_allocated() == before
    assert again == stats  # to the last bit, as are the weights
    for job, found in zip(jobs[:-1], stats, strict=True):
        out, alone = merged(job.base, *job.terms, precision=precision)
        assert torch.equal(out, job.out)
        assert alone == found


@pytest.mark.parametrize("precision", Precision)
def test_elements_that_overflow_are_counted_one_by_one(precision):
    base, a, b = draw((1000, 1544), 8, torch.float16, torch.float16)
    a[0, :77], b[:500, 0] = 3e4, 30.0
    out, stats = merged(base, whole(a, b, 1.5), precision=precision)
    assert stats.non_finite == int((~torch.isfinite(out)).sum()) == 500 * 77


def test_pairs_on_the_host_are_read_from_there():
    base, a, b = draw((1000, 1544), 64, torch.bfloat16, torch.bfloat16)
    out, _ = merged(base, whole(a.cpu(), b.cpu(), 1.5), precision=FP16)
    assert torch.equal(out, eager(base, whole(a, b, 1.5)))


def test_tf32_of_the_process_changes_nothing():
    base, a, b = draw((1000, 1544), 64, torch.float32, torch.float32)
    before, _ = merged(base, whole(a, b, 1.5), precision=FP32)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert torch.equal(merged(base, whole(a, b, 1.5), precision=FP32)[0], before)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
