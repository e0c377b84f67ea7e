"""What can go wrong, as few classes: each one knows its HTTP status and the word it is counted under.

Messages are limited here: a sender's names and values are shown with `in_short` and `name_some` alone, so that no
message grows with what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

SHOWN_FAULTS = 10
LONGEST_SHOWN = 80  # characters of a name or a value in a message
LONGEST_FAULT = 2000  # characters of one sentence
MOST_FAULTS = 2**12  # sentences that are kept and counted; an update of all layers of a large model has fewer


def summarise(faults: Sequence[str]) -> str:
    """Return one line for all faults: the first ten in full, then how many more there are."""
    shown = "; ".join(faults[:SHOWN_FAULTS])
    hidden = len(faults) - SHOWN_FAULTS
    return f"{shown}; and {hidden} more" if hidden > 0 else shown


def name_some(names: Sequence[str]) -> str:
    """Return the first ten names, each cut to 80 characters, then how many more there are."""
    shown = ", ".join(cut(name) for name in names[:SHOWN_FAULTS])
    hidden = len(names) - SHOWN_FAULTS
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def cut(text: str, longest: int = LONGEST_SHOWN) -> str:
    """Return the text itself, or its first 80 characters and how many it has."""
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


def in_short(value: object) -> str:
    """Return a plain value in few characters, anything else by its kind: containers may hold each other many times."""
    if isinstance(value, (str, bytes)):
        shown = repr(value[:LONGEST_SHOWN])
        return shown if len(value) <= LONGEST_SHOWN else f"{shown}... (length {len(value)})"
    if type(value) is int and value.bit_length() > 256:  # Python prints no number of more than 4300 digits
        return f"an integer of {value.bit_length()} bits"
    plain = value is None or type(value) in (int, float, bool)
    return repr(value) if plain else f"a {type(value).__name__}"


def shape_in_short(shape: Sequence[int]) -> str:
    """Return a shape in few characters: at most ten of its sizes."""
    if len(shape) <= SHOWN_FAULTS:
        return str(tuple(shape))
    return f"({', '.join(map(str, shape[:SHOWN_FAULTS]))}, ... {len(shape)} sizes)"


def printable(text: str, limit: int) -> str:
    """Return a text of others for messages, logs and headers, in which it must not end a line or move a cursor.

    Every character that is not printable is escaped, newlines and ESC too; the text is cut to ``limit`` characters.

    Takes time for ``limit`` characters, however long the text is.
    """
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit])
    return escaped if len(text) <= limit and len(escaped) <= limit else f"{escaped[: max(0, limit - 3)]}..."


class Faults(list[str]):
    """Sentences of what is wrong with a request. It keeps so many as a large honest request may have, and no more."""

    def __init__(self, faults: Iterable[str] = ()) -> None:
        super().__init__()
        self.extend(faults)

    def append(self, fault: str) -> None:
        if len(self) < MOST_FAULTS:
            super().append(cut(fault, LONGEST_FAULT))

    def extend(self, faults: Iterable[str]) -> None:
        for fault in islice(faults, MOST_FAULTS - len(self)):
            self.append(fault)


class LoraMergeError(Exception):
    """Base of every error of this package; the engine failed, no fault of the request is known."""

    status = 500
    reason = "engine"


class RequestError(LoraMergeError):
    """The request or its tensors are wrong. Carries every fault that was found, not only the first one.

    Attributes:
        faults: one sentence each, at most 4096; every one names the thing that is wrong and its value.
    """

    status = 400
    reason = "request"

    def __init__(self, *faults: str) -> None:
        kept = tuple(cut(fault, LONGEST_FAULT) for fault in faults[:MOST_FAULTS])
        super().__init__(summarise(kept))
        self.faults = kept


class ConflictError(LoraMergeError):
    """The request is right in itself, but not in the state that the engine is in."""

    status = 409
    reason = "conflict"
