"""The context of one request on one rank: its clock, its opened payloads and what was sent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from server_patches.worker_request import MergeReq
from sgld_lora_merge.merge.fingerprint import SentUpdates


class RequestContext:
    """Holds a request, the times of its stages, and which payloads were opened.

    Attributes:
        req: the request.
        opened: whether this rank has opened its payload.
        opened_by_rank: the same for every rank; False for a rank whose result has not been gathered.
        sent: what this rank was sent, which the other ranks must have been sent too; None for requests without pairs.
            It may refer to the sender's memory.
        digest: digest of ``sent``, which other replicas compare; "" where there are none.
    """

    def __init__(self, req: MergeReq, ranks: int) -> None:
        self.req = req
        self.opened = False
        self.opened_by_rank = [False] * ranks
        self.sent: SentUpdates | None = None
        self.digest = ""
        self._started = time.perf_counter()
        self._stages: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time that a block takes to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._stages[name] = self._stages.get(name, 0.0) + (time.perf_counter() - started) * 1e3

    def milliseconds(self) -> dict[str, float]:
        """Return milliseconds by stage, and their total since the request came."""
        stages = {"deserialize": 0.0, "validate": 0.0, "merge": 0.0, **self._stages}
        return {**stages, "total": (time.perf_counter() - self._started) * 1e3}
