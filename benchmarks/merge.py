"""The merge of whole models on one GPU, against the copy floor, cuBLAS, and what sglang itself does for each layer.

    python3 -m benchmarks.merge --out benchmarks/results

Weights and pairs are random, and bfloat16 unless said otherwise; the layers are those of inventories.json. The floor is
the time that a device copy of as many bytes takes as there are in every W0 read and W' written, measured in the same
run. The kernel's times include its statistics. `merge()` is the whole call: table, launches, and the wait for the
statistics. "Extra" is the device memory that a plan and its merge take beside weights, W0 and pairs, at their peak.

Once more with W0 in pinned host memory, against the time that one copy of as many bytes takes over the link.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
import triton

from benchmarks.inventories import PATH
from benchmarks.measure import copy_bandwidth, floor_of, graph_of, jobs_of, launches_of, milliseconds
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.base_store import host_copies
from sgld_lora_merge.merge.kernels import MergeJob
from sgld_lora_merge.merge.kernels import grouped as kernel

B16, F32 = torch.bfloat16, torch.float32
CASES = (
    ("SD3.5-medium", 32, B16, 1),
    ("Z-Image", 64, B16, 1),
    ("FLUX.1-dev", 64, B16, 1),
    *(("Qwen-Image", rank, B16, 1) for rank in (16, 32, 64, 128)),
    *(("Qwen-Image", rank, F32, 1) for rank in (32, 64, 128)),
    ("Qwen-Image", 320, B16, 1),
    ("Qwen-Image", 64, B16, 2),
    ("Wan2.2-A14B", 64, B16, 1),
)
SGLANG_CHUNK = 32 * 2**20  # bytes of rows in one of its addmm_
FROM_HOST = ("SD3.5-medium", "Z-Image")
SGLANG_SAMPLE = 24  # one layer in so many is timed, and the time scaled by parameters: it is slow


def seconds(act, repeats: int = 5) -> float:
    """Median time on the host, until the device is done; one run is not counted."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        act()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def cublas(jobs: list[MergeJob]) -> None:
    """W0 on the device, copied and added to layer by layer."""
    for job in jobs:
        (term,) = job.terms
        job.out.copy_(job.base).addmm_(term.b, term.a, alpha=term.scale)


def sglang_steps(job: MergeJob, snapshot: torch.Tensor) -> None:
    """One layer as sglang 0.5.23 unmerges and merges it with LORA_MERGE_FP32=1: the base weight comes from the host."""
    (term,) = job.terms
    job.out.copy_(snapshot.clone())
    data = job.out.float()
    a, b = term.a.float(), term.b.float()
    step = max(1, SGLANG_CHUNK // (data.shape[1] * data.element_size()))
    for start in range(0, data.shape[0], step):
        data[start : start + step].addmm_(b[start : start + step], a, alpha=term.scale)
    job.out.copy_(data.to(job.out.dtype))


def sglang_milliseconds(jobs: list[MergeJob]) -> float:
    sample = jobs[::SGLANG_SAMPLE]
    snapshots = [job.base.cpu() for job in sample]
    took = seconds(lambda: [sglang_steps(job, kept) for job, kept in zip(sample, snapshots, strict=True)], repeats=2)
    return took * 1e3 * sum(job.out.numel() for job in jobs) / sum(job.out.numel() for job in sample)


def measured(jobs: list[MergeJob], bandwidth: float, pause: float, *, others: bool) -> dict[str, float]:
    """Milliseconds of everything, for jobs of one model."""
    row = {"floor": floor_of(jobs, bandwidth)}
    for precision in Precision:
        torch.cuda.reset_peak_memory_stats()
        before, plan = torch.cuda.memory_allocated(), time.perf_counter()
        scratch = kernel.scratch_for(jobs, precision)
        assert scratch is not None
        torch.cuda.synchronize()
        row[f"{precision.value} plan"] = (time.perf_counter() - plan) * 1e3
        stats = kernel.merge(jobs, precision, scratch)
        assert all(found.non_finite == 0 and 0 < found.rounding_loss < 1 for found in stats)
        row[f"{precision.value} extra MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        row[precision.value] = milliseconds(graph_of(launches_of(jobs, scratch)), pause=pause)
        row[f"{precision.value} merge()"] = seconds(lambda: kernel.merge(jobs, precision, scratch)) * 1e3  # noqa: B023
    if others:
        row["cuBLAS"] = milliseconds(lambda: cublas(jobs), repeats=3, pause=pause)
        row["sglang's steps"] = sglang_milliseconds(jobs)
    return row


def from_host(jobs: list[MergeJob]) -> dict[str, float]:
    """Milliseconds of `merge()` with W0 in pinned host memory, and of one copy of as many bytes from there."""
    bases = host_copies({("", index): job.base for index, job in enumerate(jobs)}, jobs[0].out.device)
    hosted = [replace(job, base=base) for job, base in zip(jobs, bases.values(), strict=True)]
    source = torch.empty(2**31, dtype=torch.uint8, pin_memory=True)
    landing = torch.empty_like(source, device="cuda")
    nbytes = sum(job.base.nbytes for job in jobs)
    row = {"GB": nbytes / 1e9}
    row["link"] = milliseconds(lambda: landing.copy_(source, non_blocking=True)) * nbytes / source.nbytes
    for precision in Precision:
        scratch = kernel.scratch_for(hosted, precision)
        row[precision.value] = seconds(lambda: kernel.merge(hosted, precision, scratch)) * 1e3  # noqa: B023
    return row


def host_table(results: list[dict]) -> str:
    """Markdown: W0 on the host, as shares of the link."""
    lines = ["| model | W0 | link | merge() fp32 | merge() fp16 | of the link, fp32 | fp16 |", "|---" * 7 + "|"]
    for result in results:
        if (times := result.get("host")) is not None:
            link = times["link"]
            cells = [result["model"], f"{times['GB']:.2f} GB", f"{link:.1f} ms, {times['GB'] / link * 1e3:.1f} GB/s"]
            cells += [f"{times[mode]:.1f} ms" for mode in ("fp32", "fp16")]
            cells += [f"{link / times[mode]:.3f}" for mode in ("fp32", "fp16")]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(results: list[dict]) -> str:
    """Markdown: each case's floor in milliseconds, then multiples of it, and the host's times."""
    head = ("model", "layers", "parameters", "rank", "pairs", "floor", "fp32", "fp16", "cuBLAS", "sglang's steps")
    head += ("merge() fp32", "merge() fp16", "plan a layer", "merge() a layer beyond the device", "extra")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for result in results:
        times, layers = result["milliseconds"], result["layers"]

        def ratio(name: str, times: dict[str, float] = times) -> str:
            return f"{times[name] / times['floor']:.2f}x" if name in times else ""

        adapters = "" if result["terms"] == 1 else f", {result['terms']} adapters"
        cells = [result["model"], str(layers), f"{result['parameters'] / 1e9:.2f} B", str(result["rank"])]
        cells += [result["pair"] + adapters, f"{times['floor']:.2f} ms", ratio("fp32"), ratio("fp16"), ratio("cuBLAS")]
        cells += [ratio("sglang's steps"), f"{times['fp32 merge()']:.2f} ms", f"{times['fp16 merge()']:.2f} ms"]
        cells += [f"{times['fp32 plan'] / layers * 1e3:.1f} us"]
        cells += [f"{(times['fp32 merge()'] - times['fp32']) / layers * 1e3:.1f} us"]
        cells += [f"{max(times['fp32 extra MiB'], times['fp16 extra MiB']):.1f} MiB"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(results: list[dict], path: Path) -> None:
    """Bars of the cases that have all four, as multiples of the copy floor."""
    from matplotlib import pyplot

    names = ("fp32", "fp16", "cuBLAS", "sglang's steps")
    shown = [result for result in results if all(name in result["milliseconds"] for name in names)]
    figure, axes = pyplot.subplots(figsize=(9, 4))
    for position, name in enumerate(names):
        values = [result["milliseconds"][name] / result["milliseconds"]["floor"] for result in shown]
        bars = axes.bar([place + (position - 1.5) * 0.2 for place in range(len(shown))], values, 0.2, label=name)
        axes.bar_label(bars, fmt="%.3g", fontsize=7)
    axes.set_yscale("log")
    axes.set_xticks(range(len(shown)), [f"{result['model']}\nrank {result['rank']}" for result in shown])
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("multiples of the copy floor")
    axes.legend(ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for merge.json, merge.md and merge.png")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of rest before each run, as between updates")
    arguments = parser.parse_args()
    shapes = json.loads(PATH.read_text())
    bandwidth = max(copy_bandwidth(), copy_bandwidth(arguments.pause))
    versions = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    heading = f"{versions}, copy {bandwidth / 1e12:.3f} TB/s, {arguments.pause} s of rest before each run"
    print(heading, flush=True)
    results = []
    for model, rank, pair, terms in CASES:
        jobs = jobs_of(shapes[model], rank, B16, pair, terms)
        others = pair is B16 and terms == 1 and rank <= 64 and (model != "Qwen-Image" or rank == 64)
        result = {"model": model, "rank": rank, "pair": str(pair).removeprefix("torch."), "terms": terms}
        result |= {"layers": len(jobs), "parameters": sum(job.out.numel() for job in jobs)}
        result["milliseconds"] = measured(jobs, bandwidth, arguments.pause, others=others)
        if model in FROM_HOST:
            result["host"] = from_host(jobs)
            print(host_table([result]).splitlines()[-1], flush=True)
        results.append(result)
        print(table([result]).splitlines()[-1], flush=True)
        del jobs
        torch.cuda.empty_cache()
    (arguments.out / "merge.json").write_text(json.dumps({"on": heading, "results": results}, indent=1) + "\n")
    (arguments.out / "merge.md").write_text(f"{heading}\n\n{table(results)}\n\n{host_table(results)}\n")
    draw(results, arguments.out / "merge.png")


if __name__ == "__main__":
    main()
