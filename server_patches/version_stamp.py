"""The stamp that a worker puts on each output: which weights made it. The HTTP process reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ATTRIBUTE = "sgld_weight_versions"  # on the output that a worker sends back, and in an item of a store


def stamp(output: Any, versions: Mapping[str, str]) -> None:
    """Stamp an output with the versions that it was made with; an earlier stamp stays."""
    if not hasattr(output, ATTRIBUTE):
        setattr(output, ATTRIBUTE, dict(versions))


def label_of(version: str | None, counts: Mapping[str, int]) -> str | None:
    """Return a module's version for an answer; ``mixed; 1=11, 2=4`` for a mixture, None where nothing is live.

    Args:
        counts: version -> how many live layers have it.
    """
    if len(counts) < 2:
        return version
    return "mixed; " + ", ".join(f"{name}={count}" for name, count in counts.items())


def version_text(versions: Mapping[str, str]) -> str:
    """Return the version that all modules share, else ``module=version`` for each module."""
    values = set(versions.values())
    return values.pop() if len(values) == 1 else ", ".join(f"{name}={v}" for name, v in sorted(versions.items()))
