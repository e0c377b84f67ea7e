"""The HTTP process's record of the workers' state, so that the status answers at once during a generation."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from server_patches.ledger import Ledger

SHOWN_UPDATES = 16


@dataclass
class EngineRecord:
    """What is known of the engine since it started."""

    modules: dict[str, Any] = field(default_factory=dict)
    as_of: float | None = None
    failed: str | None = None
    differing: str | None = None
    staged_bytes: int = 0
    sleeping: bool = False
    live_updates: int = 0
    payload_bytes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    stage_seconds: Counter[str] = field(default_factory=Counter)
    ledger: Ledger = field(default_factory=Ledger)

    def take_in(self, output: dict[str, Any]) -> None:
        """Record the state that a worker has reported."""
        self.modules, self.failed, self.as_of = output["snapshot"], output["failed"], time.time()
        self.staged_bytes, self.sleeping = output["staged_bytes"], output["sleeping"]
        self.differing = output["differing"]

    @property
    def problem(self) -> str | None:
        """Why the engine's answers cannot be trusted; None where they can."""
        return self.failed or self.differing

    def failure(self, reason: str) -> None:
        self.failures[reason] += 1

    def received(self, nbytes: int, *, live: bool, timings_ms: Mapping[str, float] | None = None) -> None:
        """Count the bytes and stages of a request that was accepted, and the update if it is live with it."""
        self.live_updates += live
        self.payload_bytes += nbytes
        for stage, milliseconds in (timings_ms or {}).items():
            self.stage_seconds[stage] += milliseconds / 1e3  # type: ignore[assignment]  # a Counter may hold floats

    def status(self) -> dict[str, Any]:
        """Return the body of ``GET /lora_merge/status``; times are seconds since the epoch."""
        last = list(self.ledger.updates.items())[-SHOWN_UPDATES:]
        return {
            "success": self.problem is None,
            "message": self.problem or "ok",
            "modules": self.modules,
            "totals": {"updates": self.live_updates, "failures": dict(self.failures), "bytes": self.payload_bytes},
            "staged_bytes": self.staged_bytes,
            "sleeping": self.sleeping,
            "updates": [
                {
                    "update_id": name,
                    "state": update.state,
                    "reason": update.reason or None,
                    "weight_version": update.terms.get("weight_version"),
                    "num_buckets": update.count,
                    "buckets": update.buckets,
                }
                for name, update in last
            ],
            "as_of": self.as_of,
        }
