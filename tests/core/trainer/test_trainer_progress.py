"""The bar of a long sync, and where there is none."""

from __future__ import annotations

import io
import sys

import pytest

from sgld_lora_merge.trainer.sync import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def written(monkeypatch, stderr, steps, *, shown=True):
    """What a sync of so many steps writes; pytest has a stderr of its own for each phase, so no fixture sets it."""
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with progress("LoRA IPC weight sync v1", steps, shown=shown) as step:
        for _ in range(steps):
            step()
    return stderr.getvalue()


def test_several_steps_on_a_terminal_have_a_bar(monkeypatch):
    bar = written(monkeypatch, Terminal(), 3)
    assert "LoRA IPC weight sync v1" in bar
    assert "100%" in bar


@pytest.mark.parametrize(("steps", "shown"), [(1, True), (3, False)], ids=["one step", "another rank"])
def test_one_step_and_other_ranks_have_none(monkeypatch, steps, shown):
    assert written(monkeypatch, Terminal(), steps, shown=shown) == ""


def test_a_file_has_none(monkeypatch):
    assert written(monkeypatch, io.StringIO(), 3) == ""
