"""Texts of others, made safe for a line of a log."""

from __future__ import annotations

import time

import pytest

from sgld_lora_merge.errors import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("step-7", "step-7"),
        ("für 世界", "für 世界"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x1b[2J\x00\x9b", "\\x1b[2J\\x00\\x9b"),
        ("\u2028\u202e", "\\u2028\\u202e"),
        ("\ud800", "\\ud800"),
        ("", ""),
        ("x" * 80, "x" * 80),
        ("x" * 81, "x" * 77 + "..."),
        ("\n" * 80, "\\n" * 38 + "\\..."),
    ],
)
def test_a_text_is_one_printable_line_of_bounded_length(text, shown):
    assert printable(text, 80) == shown
    assert shown.isprintable()


def test_a_long_text_takes_no_time():
    text = "\n" * 10**8
    begun = time.monotonic()
    assert len(printable(text, 80)) == 80
    assert time.monotonic() - begun < 1
