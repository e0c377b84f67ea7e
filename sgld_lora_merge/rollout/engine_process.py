"""An engine as a child process: started on ports of its own, waited for, looked at, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from sgld_lora_merge.errors import printable
from sgld_lora_merge.rollout.ports import Ports
from sgld_lora_merge.trainer.engine_client import EngineClient, Unanswered
from sgld_lora_merge.trainer.transport import SyncError

PORTS = 16  # HTTP, the broker beside it, torch's rendezvous, then a scheduler for each replica
STOP_S = 15
PROBE_S = 0.2
HEALTH_ROUTE = "/health"
SHOWN_LINES, SHOWN_COLUMNS, LOOKED_AT = 15, 300, 2**16


def sglang_script() -> str:
    """Return the path of the ``sglang`` script: beside the interpreter, else on the PATH."""
    beside = Path(sys.executable).with_name("sglang")
    return str(beside) if beside.exists() else shutil.which("sglang") or str(beside)


@dataclass(frozen=True)
class EngineSpec:
    """What every engine is started with.

    Attributes:
        arguments: of ``sglang serve``, without host, ports, ``--num-gpus`` and ``--config``.
        environment: in place of, or beside, what the machine's environment has.
        config: of sglang's configuration file: what has no flag.
        host: what the engine binds to.
        folder: for the logs, one folder an engine.
        command: what ``serve`` is an argument of.
        start_timeout: seconds until it is healthy.
        patience: seconds for an answer about its health.
    """

    arguments: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    host: str = "127.0.0.1"
    command: Sequence[str] = field(default_factory=lambda: (sglang_script(),))
    start_timeout: float = 1800.0
    patience: float = 30.0


class EngineProcess:
    """One engine on this machine. It ends with this process, however this one ends.

    Args:
        spec: what it is started with.
        name: of the engine and its folder.
        gpus: indices of its GPUs on this machine.
    """

    def __init__(self, spec: EngineSpec, name: str, gpus: Sequence[str]) -> None:
        self.log = spec.folder / name / "server.log"
        self.port: int | None = None
        self._spec, self._name, self._gpus = spec, name, list(gpus)
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: Ports | None = None
        # the kernel takes the end of the thread that starts a process for the end of its parent: one thread, kept
        self._starter = ThreadPoolExecutor(1)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> dict[str, float]:
        """End what there is of it, start it, and wait until it is healthy; seconds by stage.

        Raises:
            SyncError: it ended, or was not healthy in time, and is ended now; with the last lines of its log.
        """
        begun = time.perf_counter()
        self.stop()
        stopped = time.perf_counter()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._ports = Ports(PORTS)
        self.port = self._ports.first
        self._process = self._starter.submit(self._spawn, self.port).result()
        try:
            self._wait_healthy(self._process)
        except SyncError:
            self.stop()
            raise
        return {"stop": stopped - begun, "start": time.perf_counter() - stopped}

    def fault(self) -> str | None:
        """Return why it is not healthy; None where it is."""
        if self._process is None:
            return "it has not been started"
        if (code := self._process.poll()) is not None:
            return f"its process has ended with code {code}"
        try:
            answer = self._engine.send("GET", HEALTH_ROUTE, self._spec.patience)
        except Unanswered as error:
            return f"it does not answer: {error}"
        if answer.status == 200:
            return None
        return f"{HEALTH_ROUTE} answered {answer.status}: {printable(answer.body[:500].decode(errors='replace'), 500)}"

    def last_lines(self, count: int = SHOWN_LINES) -> str:
        """Return the end of its log."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOOKED_AT))
                lines = log.read().decode(errors="replace").splitlines()[-count:]
                return "\n".join(line[:SHOWN_COLUMNS] for line in lines)
        except OSError as error:
            return f"({error})"

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL to whatever of its process group is left."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._ports is not None:
            self._ports.close()
            self._ports = None

    @property
    def _engine(self) -> EngineClient:
        host = "127.0.0.1" if self._spec.host == "0.0.0.0" else self._spec.host
        return EngineClient(f"http://{host}:{self.port}")

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        config = self.log.with_name("config.json")
        config.write_text(json.dumps(dict(self._spec.config)))
        script = str(Path(__file__).with_name("die_with_parent.py"))
        die_with_parent = [sys.executable, "-I", "-S", script, str(os.getpid())]
        command = [
            *die_with_parent, *self._spec.command, "serve", "--output-path", str(self.log.with_name("outputs")),
            "--num-gpus", str(max(1, len(self._gpus))), *self._spec.arguments, "--config", str(config),
            "--host", self._spec.host, "--port", str(port), "--master-port", str(port + 2),
            "--scheduler-port", str(port + 3), "--strict-ports",
        ]  # fmt: skip
        with self.log.open("ab") as log:
            log.write(f"--- {self._name} is started on port {port}\n".encode())
            log.flush()
            return subprocess.Popen(
                command, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def _environment(self) -> dict[str, str]:
        # Ray gives an actor as many threads as it has CPUs, which here are none of the engine's
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment = {**inherited, **self._spec.environment}
        if self._gpus:
            # in the order of nvidia-smi, by which their UUIDs were looked up
            environment |= {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return environment

    def _wait_healthy(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._spec.start_timeout
        while time.monotonic() < deadline:
            if (code := process.poll()) is not None:
                raise SyncError(f"{self._name} ended with code {code} before it was healthy. {self._told()}")
            with contextlib.suppress(Unanswered):
                if self._engine.send("GET", HEALTH_ROUTE, self._spec.patience).status == 200:
                    return
            time.sleep(PROBE_S)
        raise SyncError(f"{self._name} was not healthy after {self._spec.start_timeout:g} s. {self._told()}")

    def _told(self) -> str:
        return f"The end of its log, {self.log}:\n{self.last_lines()}"
