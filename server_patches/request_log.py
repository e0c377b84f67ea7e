"""One line of JSON in the log for every request about weights, whatever became of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

NAME_CHARACTERS, MESSAGE_CHARACTERS = 200, 4000  # of a text in a line; what is longer is cut
_FROM_ANSWER = ("state", "layers", "rounding_loss", "timings_ms")


@dataclass
class LogEntry:
    """What is known of one request beside its answer; filled in as it becomes known.

    Attributes:
        event: "update", "upload", "commit", "abort", "reset", "rollback" or "verify"; of a request that the guard
            refused the name of the endpoint, or "refused" where the path was refused.
        update_id: of the update that it belongs to.
        weight_version: that it would make live.
        nbytes: of its body.
        repeated: the answer is the one that the same body got before, and nothing was done.
        reason: the word under which its failure is counted.
    """

    event: str
    update_id: str | None = None
    weight_version: str | None = None
    nbytes: int = 0
    repeated: bool = False
    reason: str | None = None

    def count(self, nbytes: int) -> None:
        """So many bytes of the body have come."""
        self.nbytes = nbytes


def line(entry: LogEntry, status: int, answer: dict[str, Any]) -> str:
    """The entry and what was answered; null is what the request or its failure has no value for."""
    return json.dumps(
        {
            "event": entry.event,
            "status": status,
            "reason": entry.reason,
            "update_id": _cut(entry.update_id),
            "weight_version": _cut(answer.get("weight_version", entry.weight_version)),
            **{name: answer.get(name) for name in _FROM_ANSWER},
            "modules": sorted(answer.get("modules", ())),
            "bytes": entry.nbytes,
            "repeated": entry.repeated,
            "message": None if status == 200 else _cut(answer["message"], MESSAGE_CHARACTERS),
        }
    )


def _cut(text: str | None, limit: int = NAME_CHARACTERS) -> str | None:
    """A caller's text, cut; JSON escapes what would end a line or move a cursor."""
    return text if text is None or len(text) <= limit else f"{text[: limit - 3]}..."
