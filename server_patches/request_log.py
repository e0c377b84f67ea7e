"""Write one line of JSON for every request about weights, whether it succeeded or not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

NAME_CHARACTERS, MESSAGE_CHARACTERS = 200, 4000  # of a text in a line; what is longer is cut
_FROM_ANSWER = ("state", "layers", "rounding_loss", "timings_ms")


@dataclass
class LogEntry:
    """What the log says of one request besides its answer; the request's code fills it in.

    Attributes:
        event: "update", "upload", "commit", "abort", "reset", "rollback" or "verify"; of a request that the guard
            refused the name of the endpoint, or "refused" where the path was refused.
        update_id: of the update that it belongs to.
        weight_version: that it would make live.
        nbytes: of its body.
        repeated: the same body came before; its answer was given again and nothing was done.
        reason: the word under which its failure is counted.
    """

    event: str
    update_id: str | None = None
    weight_version: str | None = None
    nbytes: int = 0
    repeated: bool = False
    reason: str | None = None

    def count(self, nbytes: int) -> None:
        """Record how many bytes of the body have come."""
        self.nbytes = nbytes


def line(entry: LogEntry, status: int, answer: dict[str, Any]) -> str:
    """Return the line for an entry and its answer; a field without a value is null."""
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
    """Cut a caller's text; JSON escapes what would end a line or move a cursor."""
    return text if text is None or len(text) <= limit else f"{text[: limit - 3]}..."
