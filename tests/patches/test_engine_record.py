"""The HTTP process's own record."""

from __future__ import annotations

import time

from server_patches.engine_record import EngineRecord
from server_patches.ledger import NamedBucket

OUTPUT = {"snapshot": {"transformer": {"state": "merged"}}, "failed": None, "staged_bytes": 5, "sleeping": False,
          "differing": None}  # fmt: skip


def test_an_empty_record_says_that_nothing_is_known():
    status = EngineRecord().status()
    assert (status["success"], status["modules"], status["as_of"]) == (True, {}, None)


def test_what_the_workers_say_is_shown_with_its_time():
    record = EngineRecord()
    record.take_in(OUTPUT)
    assert (record.status()["modules"], record.status()["staged_bytes"]) == (OUTPUT["snapshot"], 5)
    assert abs(record.status()["as_of"] - time.time()) < 60


def test_updates_and_failures_are_counted():
    record = EngineRecord()
    record.received(4, live=True)
    record.received(4, live=False)
    record.failure("request")
    assert record.status()["totals"] == {"updates": 1, "failures": {"request": 1}, "bytes": 8}


def test_the_last_updates_are_shown_with_what_became_of_them():
    record = EngineRecord()
    record.ledger.accept(NamedBucket("a", 0, 1, "", {"weight_version": "1"}), {})
    record.ledger.accept(NamedBucket("b", 1, 2, "", {"weight_version": "2"}), {})
    record.ledger.abandon("b", "why")
    a, b = record.status()["updates"]
    assert (a["update_id"], a["state"], a["weight_version"], a["reason"]) == ("a", "live", "1", None)
    assert (b["update_id"], b["state"], b["buckets"], b["num_buckets"], b["reason"]) == (
        "b",
        "abandoned",
        [1],
        2,
        "why",
    )


def test_a_failed_engine_says_so():
    record = EngineRecord()
    record.take_in(OUTPUT | {"failed": "restart"})
    assert (record.status()["success"], record.status()["message"]) == (False, "restart")


def test_replicas_that_differ_are_told():
    record = EngineRecord()
    record.take_in(OUTPUT | {"differing": "the replicas differ"})
    assert (record.status()["success"], record.status()["message"]) == (False, "the replicas differ")
