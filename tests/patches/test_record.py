"""The HTTP process's own record."""

from __future__ import annotations

import time

from server_patches.record import KEPT_UPDATES, Record, digest

OUTPUT = {"snapshot": {"transformer": {"state": "merged"}}, "failed": None}


def test_an_empty_record_says_that_nothing_is_known():
    status = Record().status()
    assert (status["success"], status["modules"], status["as_of"]) == (True, {}, None)


def test_what_the_workers_say_is_shown_with_its_time():
    record = Record()
    record.heard(OUTPUT)
    assert record.status()["modules"] == OUTPUT["snapshot"]
    assert abs(record.status()["as_of"] - time.time()) < 60


def test_updates_and_failures_are_counted():
    record = Record()
    record.finished("a", b"body", 200, {"weight_version": "1"}, "")
    record.finished(None, b"body", 200, {}, "")
    record.finished("b", b"body", 400, {}, "request")
    status = record.status()
    assert status["totals"] == {"updates": 2, "failures": {"request": 1}, "bytes": 8}
    assert status["updates"] == [{"update_id": "a", "state": "live", "weight_version": "1"}]


def test_a_failed_engine_says_so():
    record = Record()
    record.heard(OUTPUT | {"failed": "restart"})
    assert (record.status()["success"], record.status()["message"]) == (False, "restart")


def test_old_answers_are_dropped():
    record = Record()
    for number in range(KEPT_UPDATES + 5):
        record.finished(str(number), b"", 200, {}, "")
    assert len(record.named) == KEPT_UPDATES
    assert "4" not in record.named
    assert record.named["5"].digest == digest(b"")
