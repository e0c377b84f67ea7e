"""The real engine as a child process, as tests, examples and benchmarks use it."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil

from sgld_lora_merge.rollout.engine_process import EngineProcess, EngineSpec, sglang_script
from sgld_lora_merge.trainer import SyncError

START_TIMEOUT_S = 240
COVERAGE_VARIABLES = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")  # by which a process is measured
# An engine is not measured: its start takes 57 s with coverage, 37 s without. The core has tests in other processes.
UNMEASURED = ("env", *(word for name in COVERAGE_VARIABLES for word in ("-u", name)))
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class ServerDied(Exception):
    """The engine ended before it was healthy; the text is its log."""


@dataclass(frozen=True)
class Server:
    """A running engine.

    Attributes:
        client: an HTTP client with its base URL.
        log: everything the engine prints.
        pid: of its main process.
    """

    client: httpx.Client
    log: Path
    pid: int

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self.client.post(path, json=body if body is not None else {}, **kwargs)

    def image(self, prompt: str = "a photo of a cat", *, seed: int = 7, steps: int = 2) -> bytes:
        """Generate a 64 x 64 image and return it as the engine encodes it; equal weights give equal bytes."""
        return self.image_and_version(prompt, seed=seed, steps=steps)[0]

    def image_and_version(self, prompt: str, *, seed: int = 7, steps: int = 2) -> tuple[bytes, str | None]:
        """Generate an image; return it with the version of the weights that made it, None for base weights."""
        answer = self.post(
            "/v1/images/generations",
            {"prompt": prompt, "size": "64x64", "num_inference_steps": steps, "seed": seed, "n": 1,
             "response_format": "b64_json", "output_format": "png"},
        )  # fmt: skip
        answer.raise_for_status()
        return base64.b64decode(answer.json()["data"][0]["b64_json"]), answer.headers.get("x-weight-version")

    def video(self, prompt: str = "a photo of a cat", *, seed: int = 7, steps: int = 2) -> bytes:
        """Generate five frames of 64 x 64 and return them as the engine encodes them."""
        answer = self.post(
            "/v1/videos",
            {"prompt": prompt, "size": "64x64", "num_frames": 5, "fps": 8, "num_inference_steps": steps, "seed": seed},
        )
        job = answer.raise_for_status().json()
        while job["status"] in ("queued", "in_progress"):
            time.sleep(0.1)
            job = self.client.get(f"/v1/videos/{job['id']}").raise_for_status().json()
        if job["status"] != "completed":
            raise RuntimeError(f"the video is {job['status']}: {job['error']}")
        return self.client.get(f"/v1/videos/{job['id']}/content").raise_for_status().content

    def rss_bytes(self) -> dict[int, int]:
        """Return the resident memory of the engine's processes by process id."""
        return rss_bytes(self.pid)

    def uploads_left(self) -> list[str]:
        """Name the upload files that this engine has open or that no engine has locked."""
        files = list(Path("/dev/shm").glob("sgld_lora_upload_*"))
        own = {file.path for file in psutil.Process(self.pid).open_files()}
        return [file.name for file in files if str(file) in own or (file.exists() and not _is_locked(file))]


def rss_bytes(pid: int) -> dict[int, int]:
    """Return the resident memory of a process and of all its descendants by process id."""
    parent = psutil.Process(pid)
    return {p.pid: p.memory_info().rss for p in (parent, *parent.children(recursive=True))}


def _is_locked(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def before_0_5_23() -> bool:
    """Return whether the engine here is sglang 0.5.21 or 0.5.22."""
    return version("sglang") in ("0.5.21", "0.5.22")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a process beside an engine: offline, without coverage."""
    own = {name: value for name, value in os.environ.items() if name not in COVERAGE_VARIABLES}
    paths = filter(None, (own.get("PYTHONPATH"), (extra or {}).get("PYTHONPATH")))
    return {**own, **OFFLINE, **(extra or {}), "PYTHONPATH": os.pathsep.join(paths)}


@contextlib.contextmanager
def running(
    model: Path,
    model_id: str,
    folder: Path,
    *,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    config: Mapping[str, object] | None = None,
    spins: bool = False,
) -> Iterator[Server]:
    """Start an engine on free ports; it is healthy on entry and gone on exit.

    Args:
        spins: as sglang ships it, on a whole core while it has nothing to do; else it sleeps then.

    Raises:
        ServerDied: it ended, or was not healthy in time.
    """
    # sglang 0.5.21 and 0.5.22 always spin
    idle = () if spins or before_0_5_23() else ("--sleep-on-idle",)
    spec = EngineSpec(
        ["--model-path", str(model), "--model-id", model_id, "--backend", "sglang", "--warmup-mode", "off",
         *idle, *arguments],
        folder,
        environment={**OFFLINE, **(env or {}), "PYTHONPATH": environment(env)["PYTHONPATH"]},
        config=config or {},
        command=(*UNMEASURED, sglang_script()),
        start_timeout=START_TIMEOUT_S,
    )  # fmt: skip
    engine = EngineProcess(spec, "engine", gpus=())
    try:
        engine.start()
    except SyncError as error:
        raise ServerDied(engine.log.read_text(errors="replace")) from error
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{engine.port}", timeout=120) as client:
            yield Server(client, engine.log, engine.pid)
    finally:
        engine.stop()
