"""Choose the launch constants of the merge kernel; needs a GPU. The numbers are multiples of the copy floor.

    python3 -m benchmarks.tune                         every case
    python3 -m benchmarks.tune --product tf32x3        float32 pairs as Triton multiplies them itself; bf16x6, ieee
    python3 -m benchmarks.tune --product plain         without inline assembly
    python3 -m benchmarks.tune --only bf16-r64,terms   some cases

What a candidate writes is compared with the definition before it is timed.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch
import triton
import triton.language as tl

from benchmarks.measure import copy_bandwidth, floor_of, graph_of, jobs_of, launches_of, milliseconds
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.kernels import MergeJob, tiles
from sgld_lora_merge.merge.kernels import grouped as kernel
from sgld_lora_merge.merge.kernels.grouped import Launch, Variant

B16, F32 = torch.bfloat16, torch.float32
QWEN = ((120, 3072, 3072), (30, 12288, 3072), (30, 3072, 12288))  # a quarter of Qwen-Image: 3.4 B parameters
ODD, SMALL = ((1000, 1000, 1544),), ((9000, 320, 320),)
CANDIDATES = tuple(
    Launch(*sizes)
    for sizes in (
        *((64, columns, 4, stages) for columns in (64, 128) for stages in (2, 3, 4)),
        (32, 128, 4, 4),
        (64, 32, 4, 3),
        (64, 128, 8, 2),
        (64, 128, 8, 3),
        (64, 256, 8, 2),
        (64, 256, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (128, 256, 8, 2),
    )
)
DIFFERING = 1e-3  # share of the elements that may differ from float64 rounded once; none may from eager torch


@dataclass(frozen=True)
class Case:
    name: str
    rank: int
    pair: torch.dtype = B16
    shapes: tuple[tuple[int, int, int], ...] = QWEN
    terms: int = 1
    row_tiles: int = kernel.ROW_TILES
    precisions: tuple[Precision, ...] = tuple(Precision)

    def variant(self, precision: Precision) -> Variant:
        _, rows, columns = self.shapes[0]
        ranks = (self.rank,) * self.terms
        return Variant(rows, columns, B16, self.pair, self.pair, ranks, True, precision is Precision.FP16)


CASES = (
    *(Case(f"bf16-r{rank}", rank) for rank in (16, 32, 64, 128, 256)),
    *(Case(f"fp32-r{rank}", rank, F32, precisions=(Precision.FP32,)) for rank in (16, 32, 64, 128)),
    Case("fp32-passes", 320, F32, precisions=(Precision.FP32,)),
    Case("bf16-passes", 320),
    Case("terms", 64, terms=2),
    *(Case(f"odd-walk{tiles}", 32, shapes=ODD, row_tiles=tiles) for tiles in (12, 24, 48)),
    *(Case(f"walk{tiles}", 64, row_tiles=tiles) for tiles in (12, 24, 48)),
    *(Case(f"small-r{rank}", rank, shapes=SMALL) for rank in (32, 64)),
)


def use_product(name: str) -> None:
    """In this process let Triton multiply float32 itself, or convert bfloat16 itself ("plain")."""
    if name == "plain":

        @triton.jit
        def rounded(x, dtype: tl.constexpr, emulated: tl.constexpr):
            result = x.to(dtype)
            return result, result.to(tl.float32)

        @triton.jit
        def eager_sum(w, product, scale, dtype: tl.constexpr, emulated: tl.constexpr):
            delta = (product.to(dtype).to(tl.float32) * scale).to(dtype)
            result = (w + delta.to(tl.float32)).to(dtype)
            return result, result.to(tl.float32)

        tiles._rounded, tiles._eager_sum = rounded, eager_sum
    elif name != "split":

        @triton.jit
        def planes(x, DOT: tl.constexpr, SPLIT: tl.constexpr, emulated: tl.constexpr):
            return x, x, x

        @triton.jit
        def product(b, b_middle, b_low, a, a_middle, a_low, product, SPLIT: tl.constexpr, emulated: tl.constexpr):
            return tl.dot(b, a, product, input_precision=PRECISION)  # noqa: F821

        product.__globals__["PRECISION"] = tl.constexpr(name)
        tiles._planes, tiles._product = planes, product


def use_launch(case: Case, variant: Variant, launch: Launch) -> None:
    kernel.TILE_CONFIGS[variant.wide, variant.resident_ranks] = launch
    kernel.NARROW_COLUMNS, kernel.ROW_TILES = 0, case.row_tiles
    kernel._variant_of.cache_clear()


def compiled(work: tuple[str, Case, Precision, Launch]) -> None:
    """Compile one candidate into the cache on disk."""
    product, case, precision, launch = work
    use_product(product)
    variant = case.variant(precision)
    use_launch(case, variant, launch)
    try:
        kernel.merge_group.warmup(torch.int64, torch.float64, *[1] * 5, grid=(1,), **variant.constants)
    except Exception as error:  # one that does not fit is no candidate
        print(case.name, launch, type(error).__name__, str(error)[:80], file=sys.stderr)


def differing(job: MergeJob, precision: Precision) -> float:
    """Share of the elements that are not those of the definition: float64 rounded once, or eager torch."""
    expected = job.base if precision is Precision.FP16 else job.base.double()
    for term in job.terms:
        expected = expected + (term.b.to(expected.dtype) @ term.a.to(expected.dtype)) * term.scale
    return (job.out != expected.to(job.out.dtype)).double().mean().item()


def measured(case: Case, jobs: list[MergeJob], precision: Precision, launch: Launch, floor: float) -> float:
    """The candidate's time over the floor."""
    use_launch(case, case.variant(precision), launch)
    jobs[0].out.fill_(torch.nan)
    scratch = kernel.scratch_for(jobs, precision)
    assert scratch is not None
    kernel.merge(jobs, precision, scratch)
    if (share := differing(jobs[0], precision)) > (DIFFERING if precision is Precision.FP32 else 0):
        raise AssertionError(f"{case.name} {precision} {launch}: {share} of the elements differ")
    return milliseconds(graph_of(launches_of(jobs, scratch))) / floor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--product", default="split", choices=("split", "plain", "tf32x3", "bf16x6", "ieee"))
    parser.add_argument("--only", help="names of cases, with commas between")
    arguments = parser.parse_args()
    cases = [case for case in CASES if not arguments.only or case.name in arguments.only.split(",")]
    work = [
        (arguments.product, case, precision, launch)
        for case in cases
        for precision in case.precisions
        for launch in CANDIDATES
    ]
    with ProcessPoolExecutor(min(15, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        list(pool.map(compiled, work))
    use_product(arguments.product)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, triton {triton.__version__}, copy {bandwidth / 1e12:.3f} TB/s", flush=True)
    for case in cases:
        jobs = jobs_of(case.shapes, case.rank, B16, case.pair, case.terms)
        floor = floor_of(jobs, bandwidth)
        for precision in case.precisions:
            ratios = {}
            for launch in CANDIDATES:
                try:
                    ratios[launch] = measured(case, jobs, precision, launch, floor)
                except triton.runtime.errors.OutOfResources:
                    continue
            best = sorted(ratios.items(), key=lambda item: item[1])[:4]
            row = ", ".join(f"{x.rows}x{x.columns} w{x.warps} s{x.stages} {ratio:.3f}" for x, ratio in best)
            print(f"{arguments.product} {case.name} {precision.value}: {row}", flush=True)
        del jobs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
