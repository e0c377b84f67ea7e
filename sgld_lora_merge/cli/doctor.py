"""Find what may keep an engine or its trainer from working on this machine; say what it means and what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from sgld_lora_merge.adapter.precision import Precision, precision_from_environment
from sgld_lora_merge.cli import sharing
from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.settings import PRECISION_VARIABLE, settings_from, variables
from sgld_lora_merge.trainer.memory import VARIABLES, are_expandable

SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_MEMORY = 2**30  # bytes; an upload, and handles of CPU tensors, lie there
PROBE_TIMEOUT_S = 300


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        meaning: what was found, and what follows from it.
        remedy: what to do; empty where there is nothing to do.
    """

    name: str
    state: Literal["ok", "warning", "failure"]
    meaning: str
    remedy: str = ""


def examine(environ: Mapping[str, str] = os.environ) -> list[Check]:
    """Run all checks, in the order in which their failures are worth curing."""
    return [*engine(), gpu(), share(), allocator(environ), shared_memory(), precision(environ), settings(environ)]


def engine() -> list[Check]:
    """Check sglang and the plugin, in a process of their own: to apply the hooks imports the engine's whole runtime."""
    # -P: nothing of the current folder
    probe = [sys.executable, "-P", "-W", "ignore", "-m", "server_patches.plugin_check"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        last = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
        return [Check("sglang", "failure", f"its import ended with: {' '.join(last)}", "install sglang anew")]
    if found["sglang"] is not None:
        meaning, _, remedy = found["sglang"].partition(": ")
        return [Check("sglang", "failure", meaning, remedy)]
    sglang = Check("sglang", "ok", f"sglang {found['version']}, which this plugin is for")
    if found["plugin"] is not None:
        meaning, _, remedy = found["plugin"].partition(": ")
        return [sglang, Check("plugin", "failure", meaning, remedy or "see what it says")]
    return [sglang, Check("plugin", "ok", "sglang finds the plugin, and all hooks apply")]


def gpu() -> Check:
    """Check which GPUs torch sees, and their driver."""
    if not torch.cuda.is_available():
        built = f"torch {torch.__version__} is a build for CUDA {torch.version.cuda}"
        why = built if torch.version.cuda else f"torch {torch.__version__} is a build without CUDA"
        return Check("GPU", "warning", f"none: {why}; an engine here runs on the CPU", "for a GPU, see nvidia-smi")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return Check("GPU", "ok", f"{gpus}, driver {_driver() or 'unknown'}, torch for CUDA {torch.version.cuda}")


def share() -> Check:
    """Check whether another process can open memory of this one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    what = "CUDA memory" if device.type == "cuda" else "shared memory on the CPU"
    try:
        sharing.try_it(device)
    except LoraMergeError as error:
        remedy = "let both run in one container, or with --ipc=host, as one user; or send adapters by upload"
        return Check("sharing", "failure", f"another process cannot open {what}: {error}", remedy)
    return Check("sharing", "ok", f"another process has opened {what} of this one, and read it")


def allocator(environ: Mapping[str, str]) -> Check:
    """Check the settings of torch's allocator: with some of them memory has no handle that others can open."""
    for variable in VARIABLES:
        if are_expandable(environ.get(variable, "")):
            meaning = (
                f"{variable}={environ[variable]}: memory in expandable segments cannot be shared by handle everywhere"
            )
            return Check("allocator", "failure", meaning, f"unset it in the trainer: env -u {variable} ...")
    return Check("allocator", "ok", "no setting that keeps memory from being shared")


def shared_memory(
    folder: Path = SHARED_MEMORY, usage: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage
) -> Check:
    """Check the room for uploads and for handles of CPU tensors."""
    if not folder.is_dir():
        return Check("/dev/shm", "warning", "there is none; uploads are written to the disk", "mount a tmpfs there")
    total, _, free = usage(folder)
    room = f"{total / 2**30:.2f} GiB, of which {free / 2**30:.2f} are free"
    if free < ENOUGH_SHARED_MEMORY:
        remedy = "start the container with --shm-size=8g, or more"
        return Check("/dev/shm", "warning", f"{room}: a larger adapter than that cannot be uploaded", remedy)
    return Check("/dev/shm", "ok", room)


def precision(environ: Mapping[str, str]) -> Check:
    """Check how an engine with this environment would merge."""
    try:
        chosen = precision_from_environment(environ)
    except LoraMergeError as error:
        meaning, _, remedy = str(error).partition(": ")
        return Check("precision", "failure", meaning, remedy)
    if chosen is Precision.FP32:
        return Check("precision", "ok", "fp32: computed above the weight's precision, rounded once")
    meaning = f"fp16 ({PRECISION_VARIABLE}=0): every step in the weight's own dtype, as a trainer's eager merge has it"
    return Check("precision", "ok", meaning)


def settings(environ: Mapping[str, str]) -> Check:
    """Check whether an engine or a trainer with this environment would start."""
    try:
        settings_from(environ)
    except LoraMergeError as error:
        return Check(
            "settings", "failure", str(error), "correct or unset them: docs/configuration.md has all variables"
        )
    names = [variable.name for variable in variables().values() if environ.get(variable.name)]
    meaning = (
        f"all variables have their defaults but {', '.join(names)}" if names else "all variables have their defaults"
    )
    return Check("settings", "ok", meaning)


def _driver() -> str | None:
    """Return the driver's version, where nvidia-smi is there."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None
