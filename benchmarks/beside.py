"""Two versions of the plugin side by side on one GPU: what a change costs a sync, or saves.

    python3 -m benchmarks.beside OTHER_PATH

OTHER_PATH is a folder with another version installed (``pip install --no-deps --target``), as PYTHONPATH would have it.
An engine of each is started on one Z-Image of random weights; then one sender posts an update to the one and to the
other in turn, so that machine, order and sender are the same for both. The sender sends random pairs over CUDA IPC, and
a figure is the time from POST to answer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.sync import DEVICE, ENGINES, RANK, SIZES, wait_for_the_kernel
from sgld_lora_merge import pack
from sgld_lora_merge.trainer import HttpTransport
from support import checkpoints, lora, server


@contextlib.contextmanager
def first_on_path(folder: str | None) -> Iterator[None]:
    """What starts in here finds a folder's packages first."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (folder, before) if part)
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


def post_ms(transport: HttpTransport, shapes: list[tuple[str, tuple[int, ...]]], number: int) -> dict[str, float]:
    """Milliseconds of one update: from POST to answer, and the stages that the engine tells."""
    named = [(name, torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(0, 0.02)) for name, shape in shapes]
    payload, buffers = pack({"transformer": named}, compact=True)
    fields = {
        "serialized_named_tensors": [payload], "load_format": "flattened_bucket", "target_modules": ["transformer"],
        "weight_update_mode": "lora_merge", "lora_alpha": 96, "lora_rank": RANK, "weight_version": str(number),
        "update_id": f"beside-{number}-{time.time_ns()}",
    }  # fmt: skip
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    time.sleep(0.3)
    started = time.perf_counter()
    answer = transport.update(fields)
    took = (time.perf_counter() - started) * 1e3
    del buffers
    stages: dict[str, float] = answer["timings_ms"]
    rest = 2 * stages["total"] - sum(stages.values())  # the total is one of them
    return {"post": took, "outside the worker": took - stages["total"], "rest of the engine": rest, **stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", help="folder with the other version of the plugin")
    parser.add_argument("--size", choices=SIZES, default="Z-Image")
    parser.add_argument("--syncs", type=int, default=40, help="updates of each engine; the first four do not count")
    options = parser.parse_args()
    env, flags = ENGINES["fp32"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as engines:
        checkpoint = checkpoints.zimage(Path(folder) / "model", size=SIZES[options.size], device=DEVICE)
        targets = lora.layers(lora.base_weights(checkpoint), lora.ZIMAGE_SUFFIXES)
        shapes = [
            (f"{layer}.lora_{side}", (RANK, weight.shape[1]) if side == "A" else (weight.shape[0], RANK))
            for layer, weight in targets.items()
            for side in "AB"
        ]
        del targets
        transports = {}
        for name, path in (("other", options.other), ("this", None)):
            with first_on_path(path):
                place = Path(folder) / name
                running = server.running(checkpoint, "Z-Image", place, arguments=flags, env=env, spins=DEVICE == "cuda")
                engine = engines.enter_context(running)
            if DEVICE == "cuda":
                wait_for_the_kernel(engine)
            transports[name] = HttpTransport(str(engine.client.base_url))
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in transports}
        for number in range(options.syncs):
            for name in ("this", "other") if number % 2 else ("other", "this"):
                rows[name].append(post_ms(transports[name], shapes, number))
    stages = ("deserialize", "validate", "merge", "rest of the engine", "outside the worker")
    print(f"| {' | '.join(('version', 'first', 'median', '10th to 90th percentile', *stages))} |")
    print("|---" * (4 + len(stages)) + "|")
    for name, found in rows.items():
        counted = found[4:]
        posts = sorted(row["post"] for row in counted)
        middle = [f"{statistics.median(row[stage] for row in counted):.2f}" for stage in stages]
        spread = f"{posts[len(posts) // 10]:.1f} to {posts[-1 - len(posts) // 10]:.1f}"
        cells = [name, f"{found[0]['post']:.0f} ms", f"{statistics.median(posts):.2f} ms", spread, *middle]
        print(f"| {' | '.join(cells)} |")
    pairs = [mine["post"] - other["post"] for mine, other in zip(rows["this"][4:], rows["other"][4:], strict=True)]
    print(f"\nthis - other, median of {len(pairs)} pairs: {statistics.median(pairs):+.2f} ms")


if __name__ == "__main__":
    main()
