"""See it work: the real engine on a CPU, a PEFT trainer, LoRA updates by IPC handle, every byte checked.

    make demo            (or: python -m examples.demo --updates 5 --output demo_output)

A tiny random Z-Image checkpoint is written and served by sglang-diffusion in its own processes, the plugin in force
through its entry point. This process is the trainer: PEFT LoRA on the diffusers model, moved a little at each step (the
"training" is a random walk; the sync is what is shown). It posts lora_A and lora_B as shared-memory handles, lets the
engine's own checker compare every merged weight with what it computed itself, and looks at the image.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import peft
import torch
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from sgld_lora_merge import pack
from support import checkpoints, lora, server

RANK, ALPHA = 4, 6
PROMPT = "a photo of a cat"
STAGES = ("deserialize", "validate", "merge")
console = Console(width=max(118, Console().width))  # the table needs it, also in a log


@dataclass(frozen=True)
class Row:
    """One line of the table and one picture."""

    step: str
    version: str | None
    layers: int
    post_ms: float
    timings_ms: dict[str, float]
    verified: bool
    image: bytes

    @property
    def image_hash(self) -> str:
        return hashlib.sha256(self.image).hexdigest()[:10]


class Trainer:
    """PEFT LoRA on the diffusers transformer, and the calls to one engine.

    Args:
        checkpoint: where the transformer's base weights are.
        engine: the engine that serves the same checkpoint.
    """

    def __init__(self, checkpoint: Path, engine: server.Server) -> None:
        torch.manual_seed(1)
        diffusers.utils.logging.set_verbosity_error()  # the checkpoint's config has two fields for sglang alone
        base = diffusers.ZImageTransformer2DModel.from_pretrained(
            checkpoint / "transformer", torch_dtype=torch.bfloat16
        )
        config = peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=r"layers\..*\.(to_q|to_k|to_v|to_out\.0|w1|w2|w3)"
        )
        self.model = peft.get_peft_model(base, config)
        self.targets = lora.layers(lora.base_weights(checkpoint), lora.ZIMAGE_SUFFIXES)
        self.engine = engine

    def step(self) -> None:
        """Move every LoRA weight a little."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.6)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """lora_A and lora_B under PEFT's names; the engine strips the wrapper."""
        return [(name, each.detach().clone()) for name, each in self.model.named_parameters() if "lora_" in name]

    def push(self, version: str) -> tuple[dict[str, Any], float]:
        """One update; the engine's answer, and milliseconds from POST to answer."""
        payload, buffers = pack({"transformer": self.tensors()})
        body = {
            "serialized_named_tensors": [payload], "load_format": "flattened_bucket",
            "target_modules": ["transformer"], "weight_update_mode": "lora_merge", "lora_alpha": ALPHA,
            "lora_rank": RANK, "weight_version": version, "update_id": f"demo-{version}-{time.time_ns()}",
        }  # fmt: skip
        started = time.perf_counter()
        answer = self.engine.post("/update_weights_from_tensor", body)
        elapsed_ms = (time.perf_counter() - started) * 1e3
        del buffers  # kept until here: the engine has its own copy now
        if answer.status_code != 200:
            raise SystemExit(f"the engine refused the update: {answer.text}")
        return answer.json(), elapsed_ms

    def verify(self, *, base: bool = False) -> bool:
        """The engine's own checker against weights computed here, all target layers, byte for byte."""
        adapter = {} if base else _by_layer(self.tensors())
        merged = lora.merged(self.targets, adapter, ALPHA / RANK, lora.merge_fp32)
        body = {
            "target_module": "transformer",
            "expected_named_tensors_sha256": lora.checksums(lora.engine_zimage(merged)),
        }
        answer = self.engine.post("/update_weights_from_tensor_checker", body)
        return answer.status_code == 200


def _by_layer(tensors: list[tuple[str, torch.Tensor]]) -> lora.Adapter:
    by_name = {name.removeprefix("base_model.model.").removesuffix(".default.weight"): t for name, t in tensors}
    layers = sorted({name.rpartition(".")[0] for name in by_name})
    return {layer: (by_name[f"{layer}.lora_A"], by_name[f"{layer}.lora_B"]) for layer in layers}


def run(trainer: Trainer, updates: int) -> list[Row]:
    """Base, then the updates, then the first one again, then reset."""

    def shown(step: str, version: str | None, act: Callable[[], tuple[dict[str, Any], float]], base: bool) -> Row:
        console.print(f"  {step} ...")
        answer, elapsed_ms = act()
        return Row(step, version, answer.get("layers", 0), elapsed_ms, answer.get("timings_ms", {}),
                   trainer.verify(base=base), trainer.engine.image(PROMPT))  # fmt: skip

    def reset() -> tuple[dict[str, Any], float]:
        started = time.perf_counter()
        answer = trainer.engine.post("/lora_merge/reset")
        answer.raise_for_status()
        return answer.json(), (time.perf_counter() - started) * 1e3

    rows = [shown("base", None, lambda: ({}, 0.0), True)]
    first: dict[str, torch.Tensor] = {}
    for number in range(1, updates + 1):
        trainer.step()
        first = first or dict(trainer.tensors())
        rows.append(shown(f"update {number}", str(number), lambda n=number: trainer.push(str(n)), False))  # type: ignore[misc]
    with torch.no_grad():
        for name, tensor in first.items():
            trainer.model.get_parameter(name).copy_(tensor)
    rows.append(shown("update 1 again", "1 again", lambda: trainer.push("1 again"), False))
    rows.append(shown("reset", None, reset, True))
    return rows


def table(rows: list[Row]) -> Table:
    made = Table(
        title=f"LoRA updates of a running engine on {os.cpu_count()} CPU cores; times in milliseconds",
        title_justify="left",
    )
    for heading in ("step", "weight version", "layers", "POST to answer", *STAGES, "checksums", "image"):
        made.add_column(heading, justify="right" if heading in ("layers", "POST to answer", *STAGES) else "left")
    for row in rows:
        times = [f"{row.timings_ms[stage]:.1f}" if row.timings_ms else "" for stage in STAGES]
        post = f"{row.post_ms:.1f}" if row.post_ms else ""
        verified = "verified" if row.verified else "WRONG"
        made.add_row(row.step, row.version or "none", str(row.layers or ""), post, *times, verified, row.image_hash)
    return made


def sheet(rows: list[Row], file: Path, scale: int = 3) -> None:
    """All images side by side under their steps."""
    side, band = 64 * scale, 30
    made = Image.new("RGB", (len(rows) * (side + 8) + 8, side + band + 8), "white")
    draw = ImageDraw.Draw(made)
    for index, row in enumerate(rows):
        left = 8 + index * (side + 8)
        picture = Image.open(io.BytesIO(row.image)).convert("RGB").resize((side, side), Image.Resampling.NEAREST)
        made.paste(picture, (left, band))
        draw.text((left, 3), row.step, "black")
        draw.text((left, 15), row.image_hash, "gray")
    made.save(file)


def failures(rows: list[Row]) -> list[str]:
    """What must hold, and does not."""
    base, *updates, again, reset = rows
    found = [f"{row.step}: the engine's weights are not what they should be" for row in rows if not row.verified]
    if len({row.image for row in (base, *updates)}) != 1 + len(updates):
        found.append("two different policies drew the same image")
    if again.image != updates[0].image:
        found.append("the first update again did not give its image again")
    if reset.image != base.image:
        found.append("reset did not give the first image back")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=3, help="how many different updates to push (default: 3)")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for the picture and the log")
    args = parser.parse_args()
    if args.updates < 1:
        parser.error("--updates is at least 1")
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = checkpoints.zimage(Path(folder) / "zimage")
        log = args.output / "engine" / "server.log"
        console.print(f"starting sglang-diffusion with a tiny Z-Image; takes 20 to 60 s, log in {log}")
        with server.running(checkpoint, "Z-Image", args.output) as engine:
            rows = run(Trainer(checkpoint, engine), args.updates)
    console.print(table(rows))
    picture = args.output / "images.png"
    sheet(rows, picture)
    console.print(f"images of every step: {picture}")
    for failure in (found := failures(rows)):
        console.print(f"[red]{failure}[/red]")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
