"""The real engine as a child process: started, waited for, stopped."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import torch

ENGINE_SITE = Path(__file__).parent / "engine_site"
LAUNCHER = Path(__file__).parent / "launch" / "serve.py"
START_TIMEOUT_S = 240
COVERAGE_VARIABLES = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")  # by which a process is measured


class ServerDied(Exception):
    """The engine ended before it was healthy; the text is its log."""


@dataclass(frozen=True)
class Server:
    """A running engine.

    Attributes:
        client: an HTTP client with its base URL.
        log: everything the engine prints.
        process: its main process.
    """

    client: httpx.Client
    log: Path
    process: subprocess.Popen[bytes]

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self.client.post(path, json=body if body is not None else {}, **kwargs)

    def image(self, prompt: str = "a photo of a cat", *, seed: int = 7, steps: int = 2) -> bytes:
        """A 64 x 64 image, as the engine encodes it; equal weights give equal bytes."""
        return self.image_and_version(prompt, seed=seed, steps=steps)[0]

    def image_and_version(self, prompt: str, *, seed: int = 7, steps: int = 2) -> tuple[bytes, str | None]:
        """The same, and the version of the weights that made it; None of base weights."""
        import base64

        answer = self.post(
            "/v1/images/generations",
            {"prompt": prompt, "size": "64x64", "num_inference_steps": steps, "seed": seed, "n": 1,
             "response_format": "b64_json", "output_format": "png"},
        )  # fmt: skip
        answer.raise_for_status()
        return base64.b64decode(answer.json()["data"][0]["b64_json"]), answer.headers.get("x-weight-version")

    def video(self, prompt: str = "a photo of a cat", *, seed: int = 7, steps: int = 2) -> bytes:
        """Five frames of 64 x 64, as the engine encodes them; equal weights give equal bytes."""
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
        """Resident memory of the engine's processes by process id."""
        return rss_bytes(self.process.pid)

    def uploads_left(self) -> list[str]:
        """Files of uploads that this engine has open, or that nobody has: those of engines beside it are locked."""
        import psutil

        files = list(Path("/dev/shm").glob("sgld_lora_upload_*"))
        own = {file.path for file in psutil.Process(self.process.pid).open_files()}
        return [file.name for file in files if str(file) in own or (file.exists() and not _is_locked(file))]


def rss_bytes(pid: int) -> dict[int, int]:
    """Resident memory of a process and of all that it started, by process id."""
    import psutil

    parent = psutil.Process(pid)
    return {p.pid: p.memory_info().rss for p in (parent, *parent.children(recursive=True))}


def _is_locked(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, below those that the system gives to connections and other suites' sockets."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def before_0_5_23() -> bool:
    """Whether the engine here is sglang 0.5.21 or 0.5.22."""
    return version("sglang") in ("0.5.21", "0.5.22")


def command(
    model: Path, model_id: str, port: int, output: Path, arguments: Sequence[str] = (), *, spins: bool = False
) -> list[str]:
    """The command line of an engine. ``spins``: as sglang ships it, on a whole core while it has nothing to do."""
    master, scheduler = free_ports(2)
    # the older ones spin always, and know no flag against it
    idle = () if spins or before_0_5_23() else ("--sleep-on-idle",)
    return [
        sys.executable, str(LAUNCHER), "serve", "--model-path", str(model), "--model-id", model_id,
        "--backend", "sglang", "--host", "127.0.0.1", "--port", str(port), "--master-port", str(master),
        "--scheduler-port", str(scheduler), "--warmup-mode", "off", "--output-path", str(output),
        *idle, *arguments,
    ]  # fmt: skip


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of an engine: offline, and beside a CPU torch able to import torchvision.

    Without coverage, with which a start takes 57 seconds instead of 37; the core has its tests in other processes.
    """
    added = [] if torch.version.cuda else [str(ENGINE_SITE)]
    paths = [*added, os.environ.get("PYTHONPATH"), (extra or {}).get("PYTHONPATH")]
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    own = {name: value for name, value in os.environ.items() if name not in COVERAGE_VARIABLES}
    return {**own, **offline, **(extra or {}), "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


@contextlib.contextmanager
def running(
    model: Path,
    model_id: str,
    folder: Path,
    *,
    arguments: Sequence[str] = ("--num-gpus", "1"),
    env: Mapping[str, str] | None = None,
    spins: bool = False,
) -> Iterator[Server]:
    """An engine on a free port, healthy on entry, gone on exit; ``spins`` as `command` has it.

    Raises:
        ServerDied: it ended, or was not healthy in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_ports(1)[0]
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(model, model_id, port, folder / "outputs", arguments, spins=spins), env=environment(env),
            cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            _wait_healthy(client, process, log)
            yield Server(client, log, process)
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL for whatever of its process group is left."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(15)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_healthy(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerDied(log.read_text(errors="replace"))
        with contextlib.suppress(httpx.TransportError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(0.2)
    raise ServerDied(f"not healthy after {START_TIMEOUT_S} s:\n{log.read_text(errors='replace')}")
