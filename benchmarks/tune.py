"""Choose the launch constants of the merge kernel, and how float32 pairs are multiplied; needs a GPU.

    python3 -m benchmarks.tune                     every candidate launch, as a ratio to the copy floor
    python3 -m benchmarks.tune --product tf32x3    the same for Triton's own products of float32

Every candidate merges the same targets; what it writes is compared with float64 before it is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import triton
import triton.language as tl

from sgld_lora_merge.kernels import MergeJob, Term
from sgld_lora_merge.kernels import triton as kernel
from sgld_lora_merge.kernels.triton import Launch, Variant
from sgld_lora_merge.precision import Precision
from sgld_lora_merge.targets import Span

SHAPES = ((30, 3072, 3072), (8, 12288, 3072), (8, 3072, 12288))  # Qwen-Image's, a fifteenth of them: 0.89 B parameters
CANDIDATES = {
    False: [
        (64, 128, 4, 2), (64, 128, 4, 3), (64, 128, 4, 4), (32, 128, 4, 3), (32, 128, 4, 4), (64, 64, 4, 3), (64, 64, 4, 4),
        (64, 256, 8, 3), (128, 128, 8, 3), (64, 128, 8, 3),
    ],
    True: [
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (64, 128, 8, 2), (128, 64, 8, 2), (128, 128, 8, 2),
        (64, 32, 4, 3), (64, 256, 8, 2),
    ],
}  # fmt: skip
RANKS = {False: (16, 32, 64, 128, 256), True: (16, 32, 64, 128, 256)}


@triton.jit
def _whole(x, DOT: tl.constexpr, SPLIT: tl.constexpr, EMULATED: tl.constexpr):
    return x, x, x


def use_product(name: str) -> None:
    """Let Triton multiply float32 itself, in this process."""
    if name == "split":
        return

    @triton.jit
    def product(b, b_middle, b_low, a, a_middle, a_low, product, SPLIT: tl.constexpr, EMULATED: tl.constexpr):
        return tl.dot(b, a, product, input_precision=PRECISION)

    product.__globals__["PRECISION"] = tl.constexpr(name)
    kernel._planes, kernel._product = _whole, product


def compiled(work: tuple[str, Variant, tuple[int, int, int, int]]) -> None:
    """Compile one candidate into the cache on disk."""
    product, variant, launch = work
    use_product(product)
    use_launch(variant, launch)
    try:
        kernel._merge_group.warmup(torch.int64, torch.float32, *[1] * 5, grid=(1,), **kernel._constants(variant))
    except Exception as error:  # one that does not fit is no candidate
        print(launch, variant.ranks, type(error).__name__, str(error)[:80], file=sys.stderr)


def use_launch(variant: Variant, launch: tuple[int, int, int, int]) -> None:
    padded = max(16, triton.next_power_of_2(variant.ranks[0]))
    kernel.LAUNCHES[variant.split, padded if len(variant.ranks) == 1 else None] = Launch(*launch)


def milliseconds(act, repeats: int = 7) -> float:
    """Median time on the device, after one run that is not counted."""
    act()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        act()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second of a device copy, read and written ones counted."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda").normal_()
    destination = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: destination.copy_(source)) * 1e3


def jobs_of(shapes, rank: int, weight: torch.dtype, pair: torch.dtype) -> list[MergeJob]:
    jobs = []
    for count, rows, columns in shapes:
        for _ in range(count):
            base = torch.empty(rows, columns, dtype=weight, device="cuda").normal_(0, 0.02)
            a = torch.empty(rank, columns, dtype=pair, device="cuda").normal_(0, 0.02)
            b = torch.empty(rows, rank, dtype=pair, device="cuda").normal_(0, 0.01)
            term = Term(a, b, 2.0, (Span(0, rows),), (Span(0, columns),))
            jobs.append(MergeJob(torch.empty_like(base), base, (term,)))
    return jobs


def differing(job: MergeJob, precision: Precision) -> float:
    """Share of the elements that are not those of the definition: float64 rounded once, or eager torch."""
    (term,) = job.terms
    if precision is Precision.FP16:
        expected = job.base + (term.b.to(job.base.dtype) @ term.a.to(job.base.dtype)) * term.scale
    else:
        expected = (job.base.double() + term.scale * (term.b.double() @ term.a.double())).to(job.base.dtype)
    return (job.out != expected).double().mean().item()


def launches_of(jobs: list[MergeJob], precision: Precision, scratch: kernel.Scratch):
    """What `merge` does on the device for jobs whose table is there."""
    groups: dict[Variant, list[tuple[int, MergeJob]]] = {}
    for position, job in enumerate(jobs):
        groups.setdefault(kernel._variant(job, precision), []).append((position, job))
    return lambda: kernel._launch_all(groups, scratch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--product", default="split", choices=("split", "tf32x3", "bf16x6", "ieee"))
    parser.add_argument("--out", default="tune.json")
    arguments = parser.parse_args()
    kinds = [(False, 0), (False, 1), (True, 0)] if arguments.product == "split" else [(True, 0)]
    work = []
    for (split, sequential), (_, rows, columns) in itertools.product(kinds, SHAPES[:1]):
        pair = torch.float32 if split else torch.bfloat16
        for rank, launch in itertools.product(RANKS[split], CANDIDATES[split]):
            variant = Variant(rows, columns, torch.bfloat16, pair, pair, (rank,), True, bool(sequential))
            work.append((arguments.product, variant, launch))
    with ProcessPoolExecutor(min(15, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        list(pool.map(compiled, work))
    use_product(arguments.product)
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.3f} TB/s, triton {triton.__version__}, {torch.cuda.get_device_name()}", flush=True)
    results = []
    for split in sorted({kind[0] for kind in kinds}):
        for rank in RANKS[split]:
            jobs = jobs_of(SHAPES, rank, torch.bfloat16, torch.float32 if split else torch.bfloat16)
            floor = 4 * sum(job.out.numel() for job in jobs) / bandwidth * 1e3
            for sequential in sorted({kind[1] for kind in kinds if kind[0] == split}):
                precision = Precision.FP16 if sequential else Precision.FP32
                row = []
                for launch in CANDIDATES[split]:
                    use_launch(kernel._variant(jobs[0], precision), launch)
                    jobs[0].out.fill_(torch.nan)
                    try:
                        scratch = kernel.scratch_for(jobs, precision)
                        kernel.merge(jobs, precision, scratch)
                        wrong = differing(jobs[0], precision)
                        ratio = milliseconds(launches_of(jobs, precision, scratch)) / floor
                    except Exception as error:
                        print(launch, rank, type(error).__name__, str(error)[:80])
                        continue
                    row.append((round(ratio, 3), launch, wrong))
                    results.append([arguments.product, split, rank, sequential, ratio, launch, wrong])
                row.sort()
                print("split" if split else "16bit", arguments.product, f"r{rank} {precision.value}:", *row[:4], flush=True)
                if row and row[-1][2] > 1e-3:
                    print("WRONG", row)
            del jobs
            torch.cuda.empty_cache()
    with open(arguments.out, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
