"""The line of JSON that a request leaves in the log."""

from __future__ import annotations

import json

from server_patches.request_log import LogEntry, line


def test_a_success_is_told_with_what_it_did():
    answer = {"state": "live", "weight_version": "7", "layers": 2, "rounding_loss": 0.01, "message": "2 layers",
              "modules": {"transformer": {}}, "timings_ms": {"total": 1.0}}  # fmt: skip
    written = json.loads(line(LogEntry("update", update_id="u", weight_version="7", nbytes=5), 200, answer))
    assert written == {
        "event": "update", "status": 200, "reason": None, "update_id": "u", "weight_version": "7", "state": "live",
        "layers": 2, "rounding_loss": 0.01, "timings_ms": {"total": 1.0}, "modules": ["transformer"], "bytes": 5,
        "repeated": False, "message": None,
    }  # fmt: skip


def test_a_failure_is_told_with_its_reason_and_the_version_that_it_would_have_made():
    entry = LogEntry("update", weight_version="8", reason="request")
    written = json.loads(line(entry, 400, {"success": False, "message": "no\nlayer"}))
    assert (written["status"], written["reason"], written["weight_version"], written["message"]) == (
        400,
        "request",
        "8",
        "no\nlayer",
    )


def test_it_is_one_line():
    assert "\n" not in line(LogEntry("update"), 400, {"message": "one\ntwo"})


def test_long_texts_of_a_caller_are_cut():
    entry = LogEntry("update", update_id="u" * 10**6, weight_version="v" * 10**6, reason="request")
    written = line(entry, 400, {"message": "m\n" * 10**6})
    assert len(written) < 10_000
    assert json.loads(written)["update_id"] == "u" * 197 + "..."


def test_what_a_caller_writes_ends_no_line_and_moves_no_cursor():
    written = line(
        LogEntry("update", update_id="a\n\x1b[2Jforged", weight_version="\r\u2028x"), 400, {"message": "\x9b\n"}
    )
    assert written.isascii()
    assert written.isprintable()
