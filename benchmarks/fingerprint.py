"""What fingerprints cost on a GPU, beside reading the same bytes once.

    python3 -m benchmarks.fingerprint

267 MiB are the pairs of Z-Image's 210 target layers at rank 64 in bfloat16: 420 tensors of one bucket. One pass over
the bucket is what an update of several ranks adds, and what a sender's fingerprint adds; the pass over each tensor by
itself is made only where two ranks' buckets are not the same.
"""

from __future__ import annotations

import time

import torch

from benchmarks.measure import copy_bandwidth, milliseconds
from sgld_lora_merge.merge.fingerprint import _sums, fingerprint_of
from sgld_lora_merge.merge.kernels import word_sum
from sgld_lora_merge.wire.layout import aligned

RANK, WIDTH, HIDDEN = 64, 3840, 10240
LAYERS = 30
SHAPES = [*[(RANK, WIDTH), (WIDTH, RANK)] * 4, *[(RANK, WIDTH), (HIDDEN, RANK)] * 2, (RANK, HIDDEN), (WIDTH, RANK)]


def host_milliseconds(act, repeats=20):  # type: ignore[no-untyped-def]
    """Median on the host's clock, with the wait for the GPU, of runs after the first."""
    act()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        act()
        times.append((time.perf_counter() - started) * 1e3)
    return sorted(times)[repeats // 2]


def main() -> None:
    nbytes = sum(aligned(2 * rows * columns) for rows, columns in SHAPES) * LAYERS
    flat = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    tensors, start = [], 0
    for rows, columns in SHAPES * LAYERS:
        size = 2 * rows * columns
        tensors.append(flat[start : start + size].view(torch.bfloat16).view(rows, columns))
        start += aligned(size)
    copied = copy_bandwidth()
    floor = nbytes / copied * 1e3
    kernel = milliseconds(lambda: word_sum(flat.view(torch.int64)), repeats=20)
    whole = host_milliseconds(lambda: fingerprint_of(flat))
    each = host_milliseconds(lambda: _sums(tensors))
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {nbytes / 2**20:.0f} MiB, {len(tensors)} tensors"
    )
    print("| what | ms | times the floor |\n|---|---|---|")
    print(f"| floor: reading the bytes at the speed of a copy, {copied / 1e12:.2f} TB/s | {floor:.3f} | 1.0 |")
    print(f"| the kernel, on the device's clock | {kernel:.3f} | {kernel / floor:.1f} |")
    print(f"| the fingerprint of the bucket, until the host has it | {whole:.3f} | {whole / floor:.1f} |")
    print(f"| the sums of all tensors, one by one, until the host has them | {each:.3f} | {each / floor:.1f} |")
    cpu = flat.cpu()
    assert fingerprint_of(cpu) == fingerprint_of(flat)
    started = time.perf_counter()
    fingerprint_of(cpu)
    print(f"| the same fingerprint on the CPU | {(time.perf_counter() - started) * 1e3:.0f} | |")


if __name__ == "__main__":
    main()
