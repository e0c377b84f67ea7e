"""What the GPU benchmarks share: jobs of random data, times on the device, the copy floor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch

from sgld_lora_merge.merge.kernels import MergeJob, Term
from sgld_lora_merge.merge.kernels import grouped as kernel
from sgld_lora_merge.merge.spans import Span

Shapes = Iterable[tuple[int, int, int]]  # (layers, rows, columns)


def milliseconds(act: Callable[[], object], repeats: int = 7, pause: float = 0.0) -> float:
    """Median time on the device, after one run that is not counted; ``pause`` seconds of rest before each run."""
    act()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        time.sleep(pause)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        act()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def graph_of(act: Callable[[], object]) -> Callable[[], object]:
    """The same work without the time that the host takes to launch it."""
    act()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    return graph.replay


def copy_bandwidth(pause: float = 0.0) -> float:
    """Bytes per second of a device copy of 2 GiB, read and written ones counted."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda").normal_()
    destination = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: destination.copy_(source), pause=pause) * 1e3


def floor_of(jobs: list[MergeJob], bandwidth: float) -> float:
    """Milliseconds that reading every W0 and writing every W' takes at the speed of a copy."""
    return 2 * sum(job.out.nbytes for job in jobs) / bandwidth * 1e3


def jobs_of(shapes: Shapes, rank: int, weight: torch.dtype, pair: torch.dtype, terms: int = 1) -> list[MergeJob]:
    """Random layers, each with its own W0 and pairs."""
    jobs = []
    for layers, rows, columns in shapes:
        for _ in range(layers):
            base = torch.empty(rows, columns, dtype=weight, device="cuda").normal_(0, 0.02)
            pairs = []
            for _ in range(terms):
                a = torch.empty(rank, columns, dtype=pair, device="cuda").normal_(0, 0.02)
                b = torch.empty(rows, rank, dtype=pair, device="cuda").normal_(0, 0.01)
                pairs.append(Term(a, b, 2.0, (Span(0, rows),), (Span(0, columns),)))
            jobs.append(MergeJob(torch.full_like(base, torch.nan), base, tuple(pairs)))
    return jobs


def launches_of(jobs: list[MergeJob], scratch: kernel.KernelScratch) -> Callable[[], None]:
    """What `kernel.merge` does on the device for jobs whose table is there."""
    groups: dict[kernel.KernelVariant, list[tuple[int, kernel.PreparedJob]]] = {}
    for position, job in enumerate(jobs):
        entry = scratch.entries[job]
        assert entry is not None
        groups.setdefault(entry.variant, []).append((position, entry))
    parts = [kernel.LaunchGroup(variant, members) for variant, members in groups.items()]
    return lambda: kernel.launch(parts, scratch, [None] * len(parts))
