"""Ranges of rows and columns, and their arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Span:
    """A half-open range ``[start, stop)`` of rows or columns."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def shifted(self, offset: int) -> Span:
        return Span(self.start + offset, self.stop + offset)

    def within(self, other: Span) -> Span:
        """Return the part of this range that lies in another; empty, at an end of the other, where nothing does."""
        start = min(max(self.start, other.start), other.stop)
        return Span(start, max(start, min(self.stop, other.stop)))


def take(spans: Sequence[Span], cut: Span) -> tuple[Span, ...]:
    """Return a range of the rows that the spans name one after the other."""
    taken, passed = [], 0
    for span in spans:
        here = cut.shifted(span.start - passed).within(span)
        if here.size:
            taken.append(here)
        passed += span.size
    return tuple(taken) or (Span(0, 0),)


def swap_halves(spans: tuple[Span, ...], total: int) -> tuple[Span, ...]:
    """Return the rows of ``[second half, first half]`` that stand at these rows of the whole."""
    half = total // 2
    swapped = []
    for span in spans:
        for lower, upper, shift in ((0, half, half), (half, total, -half)):
            start, stop = max(span.start, lower), min(span.stop, upper)
            if start < stop:
                swapped.append(Span(start, stop).shifted(shift))
    return tuple(swapped)
