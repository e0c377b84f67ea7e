"""The HTTP process's own record of what the workers said, so that the status answers at once during a generation."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

KEPT_UPDATES = 1024  # a trainer retries the last update, not one a thousand updates ago
SHOWN_UPDATES = 16


@dataclass
class NamedUpdate:
    """What became of one ``update_id``: the digest of its body and the answer it got, to be given again."""

    digest: str
    status: int
    answer: dict[str, Any]


@dataclass
class Record:
    """What is known of the engine since it started."""

    modules: dict[str, Any] = field(default_factory=dict)
    as_of: float | None = None
    failed: str | None = None
    live_updates: int = 0
    payload_bytes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    named: OrderedDict[str, NamedUpdate] = field(default_factory=OrderedDict)

    def heard(self, output: dict[str, Any]) -> None:
        """Take in a worker's report of its modules' state."""
        self.modules, self.failed, self.as_of = output["snapshot"], output["failed"], time.time()

    def finished(self, update_id: str | None, body: bytes, status: int, answer: dict[str, Any], reason: str) -> None:
        """Count an update; one that is live keeps its answer under its ``update_id``."""
        if status != 200:
            self.failures[reason] += 1
            return
        self.live_updates += 1
        self.payload_bytes += len(body)
        if update_id is not None:
            self.named[update_id] = NamedUpdate(digest(body), status, answer)
            while len(self.named) > KEPT_UPDATES:
                self.named.popitem(last=False)

    def status(self) -> dict[str, Any]:
        """The body of ``GET /lora_merge/status``; times are seconds since the epoch."""
        last = list(self.named.items())[-SHOWN_UPDATES:]
        return {
            "success": self.failed is None,
            "message": self.failed or "ok",
            "modules": self.modules,
            "totals": {"updates": self.live_updates, "failures": dict(self.failures), "bytes": self.payload_bytes},
            "updates": [
                {"update_id": name, "state": "live", "weight_version": update.answer.get("weight_version")}
                for name, update in last
            ],
            "as_of": self.as_of,
        }


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
