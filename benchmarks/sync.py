"""The real engine on a GPU, with this plugin and without it, and a trainer that syncs LoRA into it over CUDA IPC.

    python3 -m benchmarks.sync --out benchmarks/results

A Z-Image of random weights is written and served; this process holds a PEFT model of it on the same GPU and syncs
through the trainer library, with a rest before each sync, in which the engine is idle. POST to answer is what
`HttpTransport` waits for; what the engine spends on it is in its answer. After every sync but the first live weights
are verified, 16 elements of every layer against float64, in fp16 mode whole layers by checksum where --hash asks for
it, which takes its time. The same trainer then syncs into sglang's own path.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor

from sgld_lora_merge.trainer import (
    HttpTransport,
    add_lora_arguments,
    select_weight_sync,
    validate_lora_arguments,
)
from support import checkpoints, server

RANK, ALPHA = 64, 96
SIZES = {
    "Z-Image": checkpoints.ZImageSize(30, 3840, 30, (32, 48, 48)),  # 210 target layers of 5.31 B parameters
    # about as many layers and parameters as that has (720, 13.6 B), and like there widths that are multiples of 16
    "Qwen-Image": checkpoints.ZImageSize(101, 3360, 28, (24, 48, 48)),
    "narrow": checkpoints.ZImageSize(30, 96, 4, (8, 8, 8)),  # Z-Image's layers, for what their width does not change
    "tiny": checkpoints.ZImageSize(),
}
TARGETS = r"layers\.\d+\.(attention\.(to_q|to_k|to_v|to_out\.0)|feed_forward\.w[123])"
IPC = ("--use-lora", "--colocate", "--lora-ipc-weight-sync")
RESIDENT = ("--num-gpus", "1", "--text-encoder-cpu-offload", "false", "--dit-cpu-offload", "false")
PARKED = (*RESIDENT[:-1], "true")
ENGINES: Mapping[str, tuple[Mapping[str, str], tuple[str, ...]]] = {
    "fp32": ({"SGLANG_DIFFUSION_LORA_MERGE_FP32": "1"}, RESIDENT),
    "fp16": ({"SGLANG_DIFFUSION_LORA_MERGE_FP32": "0"}, RESIDENT),
    "fp32, W0 on the host": ({"SGLD_LORA_BASE_STORE": "host"}, RESIDENT),
    "fp32, --dit-cpu-offload": ({}, PARKED),
    "sglang's own": ({"SGLANG_PLUGINS": "none"}, RESIDENT),
}
OWN = "sglang's own"
REST_S = 0.5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU shows that this runs, with --size tiny, and no more
COMPILED = re.compile(r"the merge kernel is compiled: ([\d.]+) s")


class TimedTransport(HttpTransport):
    """Keeps how long each update took to be answered, in milliseconds."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.milliseconds: list[float] = []

    def update(self, fields: Mapping[str, Any], file: bytes | None = None) -> dict[str, Any]:
        start = time.perf_counter()
        answer = super().update(fields, file)
        self.milliseconds.append((time.perf_counter() - start) * 1e3)
        return answer


def trained_model(checkpoint: Path) -> PeftModel:
    """The checkpoint's transformer on the GPU, with a LoRA whose values `step` draws."""
    base = ZImageTransformer2DModel.from_pretrained(checkpoint / "transformer", torch_dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS))
    return model.to(DEVICE, torch.bfloat16)


def step(model: nn.Module, part_of_name: str = "lora_") -> None:
    """In place of an optimiser's step: other values of the named parameters; a rank draws those of its own shards."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part_of_name in name:
                own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                own.normal_(0, 0.02)


CHECKS = ("base", "verify")  # stages of a sync beside its sending


def arguments(flags: Sequence[str] = IPC) -> Namespace:
    """A trainer's arguments with these flags; those of LoRA's shape are added where it has any."""
    parser = argparse.ArgumentParser()
    add_lora_arguments(parser)
    shape = ("--lora-rank", str(RANK), "--lora-alpha", str(ALPHA), "--lora-target-modules", "to_q")
    given = [*flags, "--diffusion-forward-dtype", "bf16", *(shape if "--use-lora" in flags else ())]
    return validate_lora_arguments(parser.parse_args(given), parser)


def memory(engine: server.Server) -> dict[str, float]:
    """GB: of the GPU in use, of it this process, and of host memory the engine's largest process."""
    free, total = torch.cuda.mem_get_info() if DEVICE == "cuda" else (0, 0)
    return {
        "device": (total - free) / 1e9,
        "trainer": torch.cuda.memory_reserved() / 1e9,
        "engine rss": max(engine.rss_bytes().values()) / 1e9,
    }


def wait_for_the_kernel(engine: server.Server, workers: int = 1, limit_s: float = 120) -> float | None:
    """Seconds that its compilation took the slowest worker beside the start; None where not all have told."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = COMPILED.findall(engine.log.read_text(errors="replace"))
        if len(found) >= workers:
            return max(map(float, found))
        time.sleep(0.5)
    return None


def measured(
    name: str, checkpoint: Path, model: PeftModel, syncs: int, folder: Path, *, hashed: bool
) -> dict[str, Any]:
    """One engine, ``syncs`` updates."""
    env, flags = ENGINES[name]
    started = time.perf_counter()
    rows: list[dict[str, float]] = []
    place = folder / re.sub(r"\W+", "-", name)
    with server.running(checkpoint, "Z-Image", place, arguments=flags, env=env, spins=True) as engine:
        healthy_s = time.perf_counter() - started
        compiled_s = None if name == OWN or DEVICE == "cpu" else wait_for_the_kernel(engine)
        transport = TimedTransport(str(engine.client.base_url))
        args = arguments()
        sync = select_weight_sync(args)(args, model, transport)
        memories = {"before": memory(engine)}
        for number in range(syncs):
            step(model)
            sync.verify = number > 0 and (name.startswith("fp32") or (name == "fp16" and hashed))
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            time.sleep(REST_S)
            report = sync.update_weights()
            row = {"post": transport.milliseconds[-1], "send": report.seconds["send"] * 1e3}
            row |= {f"{stage} in all": report.seconds[stage] * 1e3 for stage in CHECKS if stage in report.seconds}
            row |= {f"engine {stage}": each for stage, each in (report.answer.get("timings_ms") or {}).items()}
            rows.append(row)
            print(name, {stage: round(each, 1) for stage, each in row.items()}, flush=True)
            memories["after the first" if number == 0 else "after the last"] = memory(engine)
    result = {"name": name, "nbytes": report.nbytes, "layers": report.layers, "rows": rows, "memory": memories}
    return result | {"healthy_s": healthy_s, "compiled_s": compiled_s, "base_store": report.answer.get("base_store")}


def median(result: Mapping[str, Any], stage: str) -> float | None:
    """Of all syncs but the first, in milliseconds."""
    values = [row[stage] for row in result["rows"][1:] if stage in row]
    return statistics.median(values) if values else None


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: POST to answer, its parts, and how often sglang's own path is slower; then memory."""
    own = next((median(result, "post") for result in results if result["name"] == OWN), None)
    head = ("engine", "first", "median", "min", "max", "syncs", "sglang's own / ours", "deserialize", "validate")
    head += ("merge", "rest of the engine", "outside the worker", "trainer before and after")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for result in results:
        posts = [row["post"] for row in result["rows"]]
        middle = median(result, "post") or posts[0]
        cells = [result["name"], f"{posts[0]:.0f} ms", f"{middle:.1f} ms"]
        cells += [f"{min(posts[1:] or posts):.1f}", f"{max(posts[1:] or posts):.1f}", str(len(posts))]
        cells.append(f"{own / middle:.0f}x" if own is not None and result["name"] != OWN else "")
        stages = {stage: median(result, f"engine {stage}") for stage in ("deserialize", "validate", "merge", "total")}
        known = [each for each in stages.values() if each is not None]
        if len(known) == len(stages):
            *parts, total = known
            cells += [f"{each:.1f}" for each in (*parts, total - sum(parts), middle - total)]
        else:
            cells += [""] * 5
        cells.append(f"{(median(result, 'send') or 0) - middle:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| engine | base weights compared, first sync | verified, median of later ones |", "|---" * 3 + "|"]
    for result in results:
        base, verified = result["rows"][0].get("base in all"), median(result, "verify in all")
        cells = [result["name"], *("" if each is None else f"{each:.0f} ms" for each in (base, verified))]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| engine | when | GPU in use | of it the trainer | largest process of the engine, RSS |",
        "|---" * 5 + "|",
    ]
    for result in results:
        for when, each in result["memory"].items():
            cells = [result["name"], when, *(f"{value:.2f} GB" for value in each.values())]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Where the median sync's time is; of engines that take ten times as long as the fastest it would not be seen."""
    from matplotlib import pyplot

    timed = [
        (median(result, "post") or 0.0, result) for result in results if median(result, "engine total") is not None
    ]
    fastest = min((post for post, _ in timed), default=0.0)
    shown = [result for post, result in timed if post <= 10 * fastest]
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.6 * len(shown)))
    for position, result in enumerate(shown):
        left = 0.0
        stages = {stage: median(result, f"engine {stage}") or 0.0 for stage in ("deserialize", "validate", "merge")}
        total = median(result, "engine total") or 0.0
        stages |= {"rest": total - sum(stages.values()), "outside": (median(result, "post") or 0.0) - total}
        for color, (stage, each) in enumerate(stages.items()):
            label = stage if position == 0 else None
            axes.barh(position, each, left=left, color=f"C{color}", label=label)
            left += each
        axes.text(left, position, f" {left:.1f} ms", va="center", fontsize=8)
    axes.set_yticks(range(len(shown)), [result["name"] for result in shown])
    axes.margins(x=0.08)
    axes.set_xlabel("milliseconds from POST to answer, median")
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for sync.json, sync.md and sync.png")
    parser.add_argument("--size", choices=SIZES, default="Z-Image", help="layers and parameters of the model")
    parser.add_argument("--syncs", type=int, default=21, help="updates of each engine, the first included")
    parser.add_argument("--own-syncs", type=int, default=4, help="updates of sglang's own path, which takes seconds")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="which, in this order")
    parser.add_argument("--hash", action="store_true", help="verify in fp16 mode too, by checksums")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that no engine is left
    gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else "a CPU"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "sglang", "peft"))
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = checkpoints.zimage(Path(folder) / "model", size=SIZES[options.size], device=DEVICE)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        model = trained_model(checkpoint)
        parameters = sum(p.numel() for name, p in model.named_parameters() if name.endswith("base_layer.weight"))
        for name in options.engines:
            syncs = options.own_syncs if name == OWN else options.syncs
            results.append(measured(name, checkpoint, model, syncs, Path(folder) / "engines", hashed=options.hash))
            size = f"{results[0]['layers']} layers of {parameters / 1e9:.2f} B parameters, rank {RANK}"
            heading = f"{options.size}: {size}, {results[0]['nbytes'] / 2**20:.0f} MiB of bfloat16 over CUDA IPC\n\n"
            heading += f"{gpu}, {versions}, {REST_S} s of rest before each sync"
            write(
                results,
                heading,
                options.out / ("sync" if options.size == "Z-Image" else f"sync-{options.size.lower()}"),
            )
    print(f"{heading}\n\n{table(results)}")


def write(results: list[dict[str, Any]], heading: str, stem: Path) -> None:
    """What there is so far: an engine that does not start must not cost what was measured before it."""
    stem.with_suffix(".json").write_text(json.dumps({"on": heading, "results": results}, indent=1) + "\n")
    stem.with_suffix(".md").write_text(f"{heading}\n\n{table(results)}\n")
    draw(results, stem.with_suffix(".png"))


if __name__ == "__main__":
    main()
