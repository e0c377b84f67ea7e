"""A bar for whoever waits at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(title: str, steps: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """What it gives is called after each step. There is a bar if somebody can see it: on a terminal.

    Args:
        steps: how many there are; one alone needs no bar.
        shown: whether this rank is the one that tells.
    """
    if not (shown and steps > 1 and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=steps)
        yield lambda: bar.advance(task)
