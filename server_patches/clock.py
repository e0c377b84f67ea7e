"""Where the time of one request goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Milliseconds by stage, and whether the payload was opened on the way."""

    def __init__(self) -> None:
        self.opened = False
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
