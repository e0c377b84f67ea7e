"""What can go wrong, as few classes: each one knows its HTTP status and the word it is counted under."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

SHOWN_FAULTS = 10


def summarise(faults: Sequence[str]) -> str:
    """One line for all faults: the first ten in full, then how many more there are."""
    shown = "; ".join(faults[:SHOWN_FAULTS])
    hidden = len(faults) - SHOWN_FAULTS
    return f"{shown}; and {hidden} more" if hidden > 0 else shown


def name_some(names: Sequence[str]) -> str:
    """The first ten names, then how many more there are."""
    shown = ", ".join(names[:SHOWN_FAULTS])
    hidden = len(names) - SHOWN_FAULTS
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def in_short(value: object) -> str:
    """A plain value in few characters, anything else by its kind: containers may hold each other many times over."""
    plain = value is None or type(value) in (str, bytes, int, float, bool)
    return reprlib.repr(value) if plain else f"a {type(value).__name__}"


class LoraMergeError(Exception):
    """Base of every error of this package; the engine failed, no fault of the request is known."""

    status = 500
    reason = "engine"


class RequestError(LoraMergeError):
    """The request or its tensors are wrong. Carries every fault that was found, not only the first one.

    Attributes:
        faults: one sentence each; every one names the thing that is wrong and its value.
    """

    status = 400
    reason = "request"

    def __init__(self, *faults: str) -> None:
        super().__init__(summarise(faults))
        self.faults = faults


class ConflictError(LoraMergeError):
    """The request is right in itself, but not in the state that the engine is in."""

    status = 409
    reason = "conflict"
