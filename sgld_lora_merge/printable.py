"""Texts of others in messages, log lines and headers: what they hold must not end a line or move a cursor."""

from __future__ import annotations


def printable(text: str, limit: int) -> str:
    """The text with every character escaped that is not printable, newlines and ESC too; cut to ``limit`` characters.

    Takes time for ``limit`` characters, however long the text is.
    """
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit])
    return escaped if len(text) <= limit and len(escaped) <= limit else f"{escaped[: max(0, limit - 3)]}..."
