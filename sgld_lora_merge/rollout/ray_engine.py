"""One engine on Ray: the actor that owns it, and what the driver sees of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sgld_lora_merge.rollout.engine_process import EngineProcess, EngineSpec
from sgld_lora_merge.rollout.gpus import uuids_of
from sgld_lora_merge.trainer.ray_transport import result
from sgld_lora_merge.trainer.transport import Answer, HttpTransport, SyncError, Transport, UploadTransport

PROGRESS_S = 10
ANSWER_S = 60  # for what an actor answers without asking its engine
ANY_HOST = "0.0.0.0"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Running:
    """An engine that is healthy, as its actor tells it.

    Attributes:
        url: where it serves.
        node: the address of its machine.
        pid: its main process.
        gpus: UUIDs.
        log: path on its machine.
        seconds: that its start took, by stage.
    """

    url: str
    node: str
    pid: int
    gpus: Sequence[str]
    log: str
    seconds: Mapping[str, float]


class EngineActor:
    """Owns one engine, on the machine where Ray has placed it. What `RayTransport` asks for is here."""

    def __init__(self, spec: EngineSpec, name: str) -> None:
        gpus = [str(index) for index in ray.get_gpu_ids()]
        self._uuids = uuids_of(gpus)
        self._node = ray.util.get_node_ip_address()
        self._host = self._node if spec.host == ANY_HOST else spec.host
        self._process = EngineProcess(spec, name, gpus)

    def start(self) -> Running:
        """Start it, again if need be, and wait until it is healthy."""
        seconds = self._process.start()
        pid = self._process.pid
        assert pid is not None
        return Running(self._url, self._node, pid, self._uuids, str(self._process.log), seconds)

    def fault(self) -> str | None:
        """Return why it is not healthy; None where it is."""
        return self._process.fault()

    def last_lines(self, count: int) -> str:
        """Return the end of its log."""
        return self._process.last_lines(count)

    def stop(self) -> None:
        """End it."""
        self._process.stop()

    def update_weights_from_tensor(self, **fields: Any) -> Answer:
        """Send one request of an update, payloads as handles."""
        return HttpTransport(self._url).update(fields)

    def upload(self, file: bytes, **fields: Any) -> Answer:
        """Send one update as a file."""
        return UploadTransport(self._url).update(fields, file)

    def ask(self, route: str, fields: Mapping[str, Any] | None = None) -> Answer:
        """Ask any other route."""
        return HttpTransport(self._url).ask(route, fields)

    @property
    def _url(self) -> str:
        return f"http://{self._host}:{self._process.port}"


class RayEngine:
    """An engine, seen from the driver.

    Args:
        spec: what it is started with.
        group, index: where it is placed.
        gpus: how many GPUs it has, or which share of one.
        timeout: seconds for the answer to an update.

    Attributes:
        url, pid, gpus, log: those of `Running`, of the last time that it became healthy.
        actor: its handle.
    """

    transport: Transport
    probe: Transport

    def __init__(self, spec: EngineSpec, group: PlacementGroup, index: int, gpus: float, timeout: float) -> None:
        self.name = f"engine {index}"
        self.url, self.log = "", ""
        self.pid: int | None = None
        self.gpus: Sequence[str] = ()
        self._spec, self._timeout, self._closed = spec, timeout, False
        place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        self._options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": place, "max_concurrency": 8}
        self.actor = self._make()

    def fault(self) -> str | None:
        """Return why it must be started again; None for an engine that is well.

        Raises:
            SyncError: it is closed.
        """
        if not self.url:
            return "it is new"
        try:
            fault: str | None = result(self.actor.fault.remote, ANSWER_S + self._spec.patience)
        except SyncError as error:
            self._check_open()
            return str(error)
        self._check_open()
        return fault

    def restart(self) -> Mapping[str, float]:
        """End it, start it, and wait with a line now and then until it is healthy; seconds by stage.

        Raises:
            SyncError: it did not become healthy.
        """
        try:
            running = self._started()
        except ray.exceptions.RayActorError as error:
            logger.warning("%s has lost its actor, and gets another one: %s", self.name, error)
            self.actor = self._make()
            try:
                running = self._started()
            except ray.exceptions.RayActorError as again:
                raise SyncError(f"{self.name} has no actor: {again}") from again
        if self._spec.host != ANY_HOST and running.node != ray.util.get_node_ip_address():
            raise SyncError(f"{self.name} is on {running.node}, another machine; give the manager host={ANY_HOST!r}")
        self.url, self.pid, self.gpus, self.log = running.url, running.pid, running.gpus, running.log
        self.transport = UploadTransport(self.url, self._timeout)
        self.probe = HttpTransport(self.url, self._spec.patience)
        return running.seconds

    def last_lines(self, count: int) -> str:
        """Return the end of its log."""
        try:
            return str(result(lambda: self.actor.last_lines.remote(count), ANSWER_S))
        except SyncError as error:
            return f"({error})"

    def stopping(self) -> Any:
        """End it for good; what to wait for before `end`."""
        self._closed = True
        return self.actor.stop.remote()

    def end(self) -> None:
        """End its actor, and with it what is left of the engine."""
        ray.kill(self.actor)

    def _check_open(self) -> None:
        if self._closed:
            raise SyncError(f"{self.name} is closed")

    def _make(self) -> Any:
        self._check_open()
        return ray.remote(EngineActor).options(**self._options).remote(self._spec, self.name.replace(" ", "-"))

    def _started(self) -> Running:
        self._check_open()
        begun, started = time.monotonic(), self.actor.start.remote()
        while not ray.wait([started], timeout=PROGRESS_S)[0]:
            waited = time.monotonic() - begun
            if waited > self._spec.start_timeout + ANSWER_S:
                raise SyncError(f"{self.name} has no actor after {waited:.0f} s: is there a machine for it?")
            logger.info("%s is not healthy after %.0f s; its log: %s", self.name, waited, self.last_lines(1))
        try:
            running: Running = ray.get(started)
        except ray.exceptions.RayTaskError as error:
            raise SyncError(str(error.cause)) from error
        return running
