"""Two GPUs: two FSDP2 ranks of a trainer beside two engines, or beside one engine of two workers; four ways to sync.

    python3 -m benchmarks.two_gpus --out benchmarks/results

A Z-Image of random weights, LoRA of rank 64 on 210 layers. In each layout the ranks sync by each strategy, once to warm
up and then as often as --cycles says; what is timed is `update_weights` on the first rank, all of it. After every sync
some elements of every layer are compared with what eager torch computes from the ranks' own shards, on every engine;
they must be equal, for the engines run in fp16 mode. Then the same trainer syncs LoRA into sglang without the plugin,
whose engines stand idle beside ours until then. The trainer's processes see the GPUs in reverse order, so that only
UUIDs tell which payload is whose.

Without a GPU this runs with --size tiny, over gloo, and shows no more than that it runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ZImageTransformer2DModel
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.sync import ALPHA, DEVICE, IPC, RANK, SIZES, TARGETS, arguments, step, wait_for_the_kernel
from sgld_lora_merge.trainer import (
    HttpTransport,
    SyncError,
    UploadTransport,
    select_weight_sync,
)
from sgld_lora_merge.trainer.expected import merged_weight
from sgld_lora_merge.trainer.names import LayerPair
from support import checkpoints, server

RANKS = 2
REVERSED = ",".join(str(gpu) for gpu in reversed(range(RANKS)))
# engines, GPUs of each
LAYOUTS: Mapping[str, tuple[int, int]] = {"two engines, tp 1": (2, 1), "one engine, tp 2": (1, 2)}
OURS, OWN = "with the plugin", "sglang's own"
FLAGS: Mapping[str, tuple[str, ...]] = {
    "LoRA, IPC": IPC,
    "LoRA, upload": ("--use-lora", "--lora-upload-weight-sync"),
    "merged by the trainer": ("--use-lora",),
    "full weights": (),
}
# what changes the base comes after what is added to it; full weights take sglang's own route with the plugin too
ORDER = {OURS: list(FLAGS), OWN: ["LoRA, IPC"]}
CHECKED = 64  # elements of each layer
GROWTH = ("before", "after ten", "after the last")


@dataclass(frozen=True)
class Job:
    """What the ranks do with the engines of one kind.

    Attributes:
        urls, pids: of the engines.
        gpus: of one engine.
        kind: `OURS` or `OWN`.
        many: LoRA syncs one after the other, during which memory must not grow.
    """

    urls: Sequence[str]
    pids: Sequence[int]
    gpus: int
    kind: str
    cycles: int
    many: int
    hashed: bool
    out: Path


# the trainer's ranks


def sharded(checkpoint: Path, *, lora: bool) -> torch.nn.Module:
    """The checkpoint's transformer over both ranks, block by block; with LoRA in every target layer where asked."""
    base = ZImageTransformer2DModel.from_pretrained(checkpoint / "transformer", torch_dtype=torch.bfloat16)
    model: torch.nn.Module = base
    if lora:
        model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS)).to(torch.bfloat16)
    mesh = init_device_mesh(DEVICE, (RANKS,))
    for block in base.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(base, mesh=mesh)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def target_weights(model: torch.nn.Module, *, lora: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Layer by layer what an engine must hold: the plain weight, or eager torch's merge in bfloat16. A collective."""
    tensors = dict(model.named_parameters())
    for name in list(tensors):
        layer, _, end = name.removeprefix("base_model.model.").rpartition(".base_layer.")
        if lora and end == "weight":
            stem = name.removesuffix(".base_layer.weight")
            pair = LayerPair(*(whole(tensors[f"{stem}.lora_{side}.default.weight"]) for side in "AB"))
            yield layer, merged_weight(whole(tensors[name]), pair, ALPHA / RANK)
        elif not lora and name.startswith("layers.") and tensors[name].dim() == 2 and "adaLN" not in name:
            yield name.removesuffix(".weight"), whole(tensors[name])


class KeptTransport(HttpTransport):
    """Can ask again what it was asked to verify."""

    expected: Mapping[str, Any]

    def holds(self, expected: Mapping[str, Any]) -> int:
        """How many layers were compared; all are equal."""
        self.expected = expected
        return int(self.ask("/lora_merge/verify", {"modules": {"transformer": expected}})["checked"])


class Garbling(HttpTransport):
    """Sends the last worker of its engine what nobody can read."""

    def update(self, fields: Mapping[str, Any], file: Any = None) -> dict[str, Any]:
        payloads = [*fields["serialized_named_tensors"][:-1], "Z2FyYmFnZQ=="]
        return super().update({**fields, "serialized_named_tensors": payloads}, file)


class Trainer:
    """One rank with its shards of two models, and the engines of one job."""

    def __init__(self, rank: int, job: Job, lora: torch.nn.Module, plain: torch.nn.Module) -> None:
        self.rank, self.job, self.lora, self.plain = rank, job, lora, plain
        self.asked = [KeptTransport(url) for url in job.urls]
        self.seed = 0

    def sync_of(self, strategy: str, transport: type[HttpTransport] | None = None) -> Any:
        args = arguments(FLAGS[strategy])
        made = transport or (UploadTransport if strategy == "LoRA, upload" else HttpTransport)
        model = self.plain if strategy == "full weights" else self.lora
        return select_weight_sync(args)(
            args, model, [made(url) for url in self.job.urls], gpus_per_engine=self.job.gpus
        )

    def timed(self, sync: Any) -> tuple[float, Any]:
        """Seconds of one sync, and its report."""
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        report = sync.update_weights()
        return time.perf_counter() - started, report

    def change(self, strategy: str) -> None:
        step(self.plain, "attention") if strategy == "full weights" else step(self.lora)

    def check(self, strategy: str) -> int:
        """Layers compared on every engine; they are what they must be."""
        self.seed += 1
        expected = {}
        generator = torch.Generator().manual_seed(self.seed)
        for layer, weight in target_weights(
            self.plain if strategy == "full weights" else self.lora, lora=strategy != "full weights"
        ):
            chosen = torch.randint(weight.numel(), (CHECKED,), generator=generator)
            values = weight.flatten()[chosen.to(weight.device)].double().tolist()
            rows, columns = (chosen // weight.shape[1]).tolist(), (chosen % weight.shape[1]).tolist()
            expected[layer] = {"samples": [(*each, 0.0) for each in zip(rows, columns, values, strict=True)]}
        checked = sum(transport.holds(expected) for transport in self.asked) if self.rank == 0 else 0
        dist.barrier()
        return checked

    def strategy(self, strategy: str) -> dict[str, Any]:
        sync = self.sync_of(strategy)
        row: dict[str, Any] = {"strategy": strategy, "seconds": [], "checked": []}
        for _ in range(1 + self.job.cycles):
            self.change(strategy)
            seconds, report = self.timed(sync)
            row["seconds"].append(seconds)
            if self.job.kind == OURS:
                row["checked"].append(self.check(strategy))
            self.tell(f"{self.job.kind}, {strategy}: {seconds:.3f} s, {row['checked'][-1:]} layers compared")
        row |= {"nbytes": report.nbytes, "buckets": report.buckets, "stages": dict(report.seconds)}
        return row

    def many(self) -> dict[str, Any]:
        """Many LoRA syncs; memory before, after the warm-up of ten, and after the last."""
        sync = self.sync_of("LoRA, IPC")
        memory, seconds = {GROWTH[0]: self.memory()}, []
        for number in range(self.job.many):
            self.change("LoRA, IPC")
            seconds.append(self.timed(sync)[0])
            if number == min(9, self.job.many - 1):
                memory[GROWTH[1]] = self.memory()
        memory[GROWTH[2]] = self.memory()
        return {"syncs": self.job.many, "seconds": seconds, "memory": memory, "checked": self.check("LoRA, IPC")}

    def refused(self) -> str:
        """A payload that cannot be read, for one worker of one engine: no engine changes."""
        self.change("LoRA, IPC")
        try:
            self.sync_of("LoRA, IPC", Garbling).update_weights()
        except SyncError as error:
            told = str(error)
        else:
            raise AssertionError("garbage was taken")
        if self.rank == 0:
            for transport in self.asked:
                transport.holds(transport.expected)
        dist.barrier()
        return told

    def hashed(self) -> float:
        """Seconds in which both sides hashed every target layer, whole, and agreed."""
        sync = self.sync_of("LoRA, IPC")
        sync.verify = True
        return float(sync.update_weights().seconds["verify"])

    def memory(self) -> list[dict[str, float]]:
        """GB by rank: its GPU in use, the trainer's part of that, host memory of the trainer and of the engines."""
        import psutil

        free, total = torch.cuda.mem_get_info() if DEVICE == "cuda" else (0, 0)
        own = {
            "GPU in use": (total - free) / 1e9,
            "of it the trainer": (torch.cuda.memory_reserved() if DEVICE == "cuda" else 0) / 1e9,
            "trainer, RSS": psutil.Process().memory_info().rss / 1e9,
            "largest engine process, RSS": max(max(server.rss_bytes(pid).values()) for pid in self.job.pids) / 1e9,
        }
        by_rank: list[Any] = [None] * RANKS
        dist.all_gather_object(by_rank, own)
        return by_rank

    def tell(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def rank_main(rank: int, checkpoint: Path, meet: Path, jobs: Sequence[Job]) -> None:
    """What each rank runs; the first one writes what it found."""
    torch.manual_seed(rank)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=RANKS)
    models = sharded(checkpoint, lora=True), sharded(checkpoint, lora=False)
    for job in jobs:
        found = run_job(Trainer(rank, job, *models))
        if rank == 0:
            job.out.write_text(json.dumps(found))
    dist.destroy_process_group()


def run_job(trainer: Trainer) -> dict[str, Any]:
    job = trainer.job
    found: dict[str, Any] = {"strategies": []}
    for strategy in ORDER[job.kind]:
        found["strategies"].append(trainer.strategy(strategy))
        if job.kind == OURS and strategy == "LoRA, IPC":
            if job.hashed:
                found["hash_seconds"] = trainer.hashed()
            found["many"] = trainer.many()
            found["refused"] = trainer.refused()
            trainer.tell(f"refused: {found['refused']}")
    return found


# the engines


@contextmanager
def engines(layout: str, checkpoint: Path, folder: Path) -> Iterator[dict[str, list[server.Server]]]:
    """The layout's engines of both kinds, all healthy; one beside each rank, or one beside both."""
    count, gpus = LAYOUTS[layout]
    flags = ["--num-gpus", str(gpus), "--tp-size", str(gpus)]
    if DEVICE == "cuda":
        flags += ["--text-encoder-cpu-offload", "false", "--dit-cpu-offload", "false"]
    with ExitStack() as stack, ThreadPoolExecutor(count * len(ORDER)) as pool:

        def start(kind: str, number: int) -> server.Server:
            env = {"SGLANG_DIFFUSION_LORA_MERGE_FP32": "0"}
            if kind == OWN:
                env["SGLANG_PLUGINS"] = "none"
            if DEVICE == "cuda":
                # the first rank's GPU is the last one; one engine of both has them in the usual order
                env["CUDA_VISIBLE_DEVICES"] = str(RANKS - 1 - number) if count > 1 else "0,1"
            place = folder / f"{count}-{number}-{kind.split()[0]}"
            running = server.running(
                checkpoint, "Z-Image", place, arguments=flags, env=env, spins=DEVICE == "cuda" and kind == OURS
            )
            engine = running.__enter__()
            stack.callback(running.__exit__, None, None, None)
            return engine

        starts = {kind: [pool.submit(start, kind, number) for number in range(count)] for kind in ORDER}
        yield {kind: [each.result() for each in started] for kind, started in starts.items()}


def measured(layout: str, options: Namespace, checkpoint: Path, folder: Path) -> list[dict[str, Any]]:
    """One layout, with both kinds of engine."""
    with engines(layout, checkpoint, folder) as running:
        if DEVICE == "cuda":
            for engine in running[OURS]:
                wait_for_the_kernel(engine, LAYOUTS[layout][1])
        jobs = [
            Job(
                urls=[str(each.client.base_url) for each in engines_of_kind],
                pids=[each.pid for each in engines_of_kind],
                gpus=LAYOUTS[layout][1],
                kind=kind,
                cycles=options.cycles if kind == OURS else options.own_cycles,
                many=options.many,
                hashed=not options.no_hash,
                out=folder / f"{LAYOUTS[layout][0]}-{kind.split()[0]}.json",
            )
            for kind, engines_of_kind in running.items()
        ]
        spawn(rank_main, checkpoint, folder / f"meet-{LAYOUTS[layout][0]}", jobs)
    return [{"layout": layout, "kind": job.kind, **json.loads(job.out.read_text())} for job in jobs]


def spawn(run: Callable[..., None], *given: object) -> None:
    """Both ranks, until they have ended; they see the GPUs in reverse order.

    Raises:
        SystemExit: a rank failed.
    """
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run, args=(rank, *given)) for rank in range(RANKS)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = REVERSED
    try:
        for rank in ranks:
            rank.start()
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
    while any(rank.is_alive() for rank in ranks):
        for rank in ranks:
            rank.join(0.5)
        if any(rank.exitcode for rank in ranks):  # the other one waits in a collective
            for rank in ranks:
                rank.kill()
    if failed := [number for number, rank in enumerate(ranks) if rank.exitcode]:
        raise SystemExit(f"ranks {failed} failed")


# what was found


def median(row: Mapping[str, Any]) -> float:
    """Seconds, of all syncs but the first."""
    return statistics.median(row["seconds"][1:] or row["seconds"])


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: seconds and bytes by layout and strategy, ours beside sglang's own; then many syncs and memory."""
    head = ("layout", "engine", "strategy", "first", "median", "min", "max", "syncs", "MiB an engine", "buckets")
    head += ("time, of full weights'", "bytes, of full weights'", "layers compared, all equal")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for result in results:
        rows = {row["strategy"]: row for row in result["strategies"]}
        full = next(
            (
                row
                for other in results
                if other["layout"] == result["layout"]
                for row in other["strategies"]
                if row["strategy"] == "full weights"
            ),
            None,
        )
        for row in rows.values():
            seconds = row["seconds"]
            later = seconds[1:] or seconds
            cells = [result["layout"], result["kind"], row["strategy"], f"{seconds[0]:.2f} s", f"{median(row):.3f} s"]
            cells += [f"{min(later):.3f}", f"{max(later):.3f}", str(len(seconds)), f"{row['nbytes'] / 2**20:.0f}"]
            cells.append(str(row["buckets"]))
            cells += (
                [f"{100 * median(row) / median(full):.1f} %", f"{100 * row['nbytes'] / full['nbytes']:.1f} %"]
                if full
                else ["", ""]
            )
            cells.append(f"{len(row['checked'])} times {row['checked'][-1]}" if row["checked"] else "")
            lines.append("| " + " | ".join(cells) + " |")
    for result in results:
        if (many := result.get("many")) is None:
            continue
        later = sorted(many["seconds"][5:] or many["seconds"])
        lines += [
            "",
            f"{result['layout']}, {many['syncs']} LoRA syncs over IPC one after the other: median "
            f"{statistics.median(later) * 1e3:.1f} ms, 90 % within {later[int(0.9 * len(later))] * 1e3:.1f} ms."
            + (
                f" Every target layer hashed whole on both sides: {result['hash_seconds']:.1f} s."
                if "hash_seconds" in result
                else ""
            ),
            "",
            "| when | rank | " + " | ".join(many["memory"][GROWTH[0]][0]) + " |",
            "|---" * (2 + len(many["memory"][GROWTH[0]][0])) + "|",
        ]
        for when in GROWTH:
            for rank, each in enumerate(many["memory"][when]):
                lines.append(f"| {when} | {rank} | " + " | ".join(f"{value:.3f} GB" for value in each.values()) + " |")
        lines += ["", f"A payload that cannot be read for the last worker: {result['refused']}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for two_gpus.json and two_gpus.md")
    parser.add_argument("--size", choices=SIZES, default="Z-Image", help="layers and parameters of the model")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="which, in this order")
    parser.add_argument("--cycles", type=int, default=5, help="syncs of each strategy after the warm-up")
    parser.add_argument("--own-cycles", type=int, default=3, help="the same of sglang's own path")
    parser.add_argument("--many", type=int, default=100, help="LoRA syncs during which memory is watched")
    parser.add_argument("--no-hash", action="store_true", help="do not hash every target layer on both sides once")
    parser.add_argument("--checkpoint", type=Path, help="where the checkpoint is, or is to be kept for another run")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that no engine is left
    if DEVICE == "cuda" and torch.cuda.device_count() < RANKS:
        parser.error(f"there are {torch.cuda.device_count()} GPUs; {RANKS} are needed")
    options.out.mkdir(parents=True, exist_ok=True)
    gpus = f"{RANKS} {torch.cuda.get_device_name()}" if DEVICE == "cuda" else "a CPU"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "sglang", "peft"))
    heading = f"{options.size}, rank {RANK}, bfloat16, fp16 mode, FSDP2 over {RANKS} ranks; {gpus}, {versions}"
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkpoint = options.checkpoint or folder / "model"
        if not (checkpoint / "model_index.json").exists():
            checkpoints.zimage(checkpoint, size=SIZES[options.size], device=DEVICE)
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
        for layout in options.layouts:
            started = time.perf_counter()
            results += measured(layout, options, checkpoint, folder)
            print(f"{layout}: {time.perf_counter() - started:.0f} s in all", flush=True)
            stem = options.out / "two_gpus"
            stem.with_suffix(".json").write_text(json.dumps({"on": heading, "results": results}, indent=1) + "\n")
            stem.with_suffix(".md").write_text(f"{heading}\n\n{table(results)}\n")
    print(f"{heading}\n\n{table(results)}")


if __name__ == "__main__":
    main()
