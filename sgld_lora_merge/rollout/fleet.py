"""Several engines as one: an update is taken by all of them or by none, and engines are brought back to its version."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar, get_args

from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.rollout.live_adapters import LiveAdapters, check_at, layers_in, modules_of, versions_in_words
from sgld_lora_merge.trainer.transport import Answer, SyncError, Transport
from sgld_lora_merge.wire.schema import (
    ABORT_ROUTE,
    COMMIT_ROUTE,
    RESOLVE_ROUTE,
    ROLLBACK_ROUTE,
    STATUS_ROUTE,
    VERIFY_ROUTE,
)

Policy = Literal["immediate", "pause", "wait"]
Result = TypeVar("Result")

READ_ROUTES = (STATUS_ROUTE, VERIFY_ROUTE, RESOLVE_ROUTE)

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """One engine, as far as this module needs it.

    Attributes:
        name: for messages.
        url: where it serves; another one after a restart.
        transport: for updates.
        probe: for questions that are answered at once.
    """

    name: str
    url: str
    transport: Transport
    probe: Transport

    def fault(self) -> str | None:
        """Return why it must be started again; None for an engine that is well."""

    def restart(self) -> Mapping[str, float]:
        """End it, start it, wait until it is healthy; seconds by stage.

        Raises:
            SyncError: it did not become healthy.
        """


class Router(Protocol):
    """What sends generations to the engines."""

    def add(self, url: str) -> None:
        """Send generations there."""

    def remove(self, url: str) -> None:
        """Send no new ones there."""


class EngineFleet:
    """A transport to several engines at once. An update is live on all of them, or on none.

    Args:
        engines: all of them.
        live: what is live on all of them.
        router: is given the engines that may be sent generations; None where there is no router.
        policy: "immediate": each engine goes live after what it has begun. "pause": the router sends nothing new while
            they go live, so that no generation begins on one version after another has begun on the next. "wait": nor
            while the update travels, so that the engines finish all that they have before it.
    """

    def __init__(
        self, engines: Sequence[Engine], live: LiveAdapters, router: Router | None = None, policy: Policy = "immediate"
    ) -> None:
        check_policy(policy, router)
        self._engines, self._live, self._router, self._policy = list(engines), live, router, policy
        self._suspects: dict[str, str] = {}  # engine -> why it is not trusted although it answers
        self._served: set[str] = set()  # URLs that the router has
        self._lock = threading.RLock()
        self._pool = ThreadPoolExecutor(len(self._engines))

    @property
    def versions(self) -> Mapping[str, str]:
        """Module -> live version, of those that are not at their base weights."""
        return dict(self._live.versions)

    def update(self, fields: Mapping[str, Any], file: bytes | None = None) -> Answer:
        """Upload to every engine: staged everywhere, then live everywhere. Return the first engine's answer.

        Raises:
            RequestError: it lacks an update_id or a version, or is more than may be kept.
            SyncError: an engine was left behind, and which. The others serve what they did before.
        """
        if file is None:
            raise SyncError(
                "handles go to the engine on their GPU (by_handles); what goes to several engines is a file"
            )
        with self._lock:
            self._live.check(fields, file)
            self.heal()
            name = {"update_id": fields["update_id"]}
            with self._without_router(self._policy == "wait"):
                held = {**fields, "commit": False}
                staged, faults = self._on_all(lambda engine: engine.transport.update(held, file))
                if faults:
                    self._on_all(lambda engine: engine.transport.ask(ABORT_ROUTE, name), staged)
                    raise self._left_behind(faults, "did not take")
                with self._without_router(self._policy == "pause"):
                    live, faults = self._on_all(lambda engine: engine.transport.ask(COMMIT_ROUTE, name))
                    if faults:
                        back = self._on_all(lambda engine: engine.transport.ask(ROLLBACK_ROUTE, {}), live)
                        raise self._left_behind(faults | back[1], "did not commit")
            answer = next(iter(live.values()))
            self._live.keep(fields, file, answer["modules"])
            return answer

    @contextmanager
    def by_handles(self) -> Iterator[Callable[[Mapping[str, Any], bytes], None]]:
        """Let trainer ranks update the engines on their GPUs by handles, while nobody else changes engines.

        The engines are well on entry. What is yielded is called once all of them are live, with the fields and the file
        of an upload of the same adapter, which an engine that comes back is given. Call it once for each upload: it is
        the adapter of its ``target_module``, or of those that engines route the names in the file to. Without that call
        the version before stays the live one, and engines that are found on another one are brought back to it.

        Raises:
            SyncError: an engine could not be brought back on entry, and which; or a module of the upload is not at its
                version on an engine.
            RequestError: the upload could not be kept.
        """
        with self._lock:
            self.heal()
            with self._without_router(self._policy != "immediate"):
                yield self._is_live

    def _is_live(self, fields: Mapping[str, Any], file: bytes) -> None:
        self._live.check(fields, file)
        version, target = fields["weight_version"], fields.get("target_module")
        layers = layers_in(file) if target is None else []

        def modules_at_version(engine: Engine) -> set[str]:
            # not all that are at the version: another module may be at one of the same name
            modules = modules_of(layers, engine.transport) if target is None else {target}
            check_at(version, modules, engine.probe.ask(STATUS_ROUTE))
            return modules

        modules, faults = self._on_all(modules_at_version)
        if faults:
            raise self._left_behind(faults, "did not take")
        self._live.keep(fields, file, next(iter(modules.values())))

    def ask(self, route: str, fields: Mapping[str, Any] | None = None) -> Answer:
        """Ask every engine what changes nothing: its status, a verify, a resolve; return the first one's answer.

        Raises:
            SyncError: an engine did not say success, and which; or the route changes something.
        """
        if route not in READ_ROUTES:
            raise SyncError(f"{route} is not asked of several engines; these are: {', '.join(READ_ROUTES)}")
        with self._lock:
            answers, faults = self._on_all(lambda engine: engine.transport.ask(route, fields))
            if faults:
                raise SyncError(f"{route}: {_format(faults)}")
            return next(iter(answers.values()))

    def reset(self) -> None:
        """Bring the base weights back on every engine.

        Raises:
            SyncError: an engine is not at them, and which. It is brought to them as soon as it can be.
        """
        with self._lock:
            self._live.forget()
            self.heal()

    def heal(self) -> None:
        """Look at every engine, and bring each one that is not well, or not on the live version, back to it.

        Raises:
            SyncError: some could not be brought back, and which. The router has not got them.
        """
        with self._lock:
            _, faults = self._on_all(self._recover)
            if faults:
                raise SyncError(f"not on version {versions_in_words(self._live.versions)}: {_format(faults)}")

    def serve_nothing(self) -> None:
        """Take every engine from the router."""
        for url in list(self._served):
            self._remove_from_router(url)

    def close(self) -> None:
        """End the threads. Engines are their owner's."""
        self._pool.shutdown()

    def _recover(self, engine: Engine) -> None:
        """Bring one engine to the live version, if it is not there; only then is it healthy and the router has it."""
        ill = self._suspects.get(engine.name) or engine.fault()
        other = None
        if ill is None:
            try:
                other = self._live.difference(engine.probe.ask(STATUS_ROUTE))
            except SyncError as error:
                ill = str(error)
        if reason := ill or other:
            logger.warning("%s: %s; it is %s", engine.name, reason, "started" if ill else "brought back")
            self._remove_from_router(engine.url)
            seconds = dict(engine.restart()) if ill else {}
            begun = time.perf_counter()
            self._live.bring_to(engine.transport)
            seconds["adapter"] = time.perf_counter() - begun
            if (other := self._live.difference(engine.probe.ask(STATUS_ROUTE))) is not None:
                raise SyncError(f"after it was given the last live adapter, {other}")
            self._suspects.pop(engine.name, None)
            stages = ", ".join(f"{stage} {took:.2f} s" for stage, took in seconds.items())
            logger.info("%s is healthy, %s: %s", engine.name, versions_in_words(self._live.versions), stages)
        self._add_to_router(engine.url)

    @contextmanager
    def _without_router(self, hold: bool) -> Iterator[None]:
        """Keep all engines from the router meanwhile, if ``hold`` says so."""
        if not hold:
            yield
            return
        held = list(self._served)
        for url in held:
            self._remove_from_router(url)
        try:
            yield
        finally:
            for engine in self._engines:
                if engine.url in held and engine.name not in self._suspects:
                    self._add_to_router(engine.url)

    def _remove_from_router(self, url: str) -> None:
        if self._router is not None and url in self._served:
            self._router.remove(url)
        self._served.discard(url)

    def _add_to_router(self, url: str) -> None:
        if self._router is not None and url not in self._served:
            self._router.add(url)
        self._served.add(url)

    def _on_all(
        self, act: Callable[[Engine], Result], only: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Result], dict[str, SyncError]]:
        """Act on all engines at once, or on those named; return results and failures by engine."""
        chosen = [engine for engine in self._engines if only is None or engine.name in only]
        futures = {engine.name: self._pool.submit(act, engine) for engine in chosen}
        wait(futures.values())
        results: dict[str, Result] = {}
        faults: dict[str, SyncError] = {}
        for name, future in futures.items():
            try:
                results[name] = future.result()
            except SyncError as error:
                faults[name] = error
        return results, faults

    def _left_behind(self, faults: Mapping[str, SyncError], what: str) -> SyncError:
        """Return the failure of an update. An engine that did not only refuse is started again by the next look."""
        for name, error in faults.items():
            if error.answered is None or error.answered >= 500:
                self._suspects[name] = str(error)
        return SyncError(
            f"{', '.join(faults)} {what} the update, so that no engine has it: all others serve "
            f"{versions_in_words(self._live.versions)} as before. {_format(faults)}"
        )


def check_policy(policy: str, router: Router | None) -> None:
    """
    Raises:
        LoraMergeError: there is no such policy, or it needs a router.
    """
    if policy not in get_args(Policy):
        raise LoraMergeError(f"policy {policy!r} is none of {', '.join(get_args(Policy))}")
    if policy != "immediate" and router is None:
        raise LoraMergeError(f"policy {policy!r} needs a router, which holds generations back")


def _format(faults: Mapping[str, SyncError]) -> str:
    return "; ".join(f"{name}: {error}" for name, error in faults.items())
