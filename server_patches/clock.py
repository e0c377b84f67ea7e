"""What is known of one request while a rank works on it: where its time goes, and what it was sent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sgld_lora_merge.merge.fingerprint import SentUpdates


class Clock:
    """Milliseconds by stage.

    Attributes:
        opened: whether the payload was opened on the way.
        sent: what this rank was sent, which the others must have been sent too; None for requests without pairs. It may
            refer to the sender's memory.
        digest: of that, for other replicas; set where there are some.
    """

    def __init__(self) -> None:
        self.opened = False
        self.sent: SentUpdates | None = None
        self.digest = ""
        self._started = time.perf_counter()
        self._stages: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._stages[name] = self._stages.get(name, 0.0) + (time.perf_counter() - started) * 1e3

    def milliseconds(self) -> dict[str, float]:
        stages = {"deserialize": 0.0, "validate": 0.0, "merge": 0.0, **self._stages}
        return {**stages, "total": (time.perf_counter() - self._started) * 1e3}
