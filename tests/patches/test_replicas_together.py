"""What several replicas say, as one answer; and replicas that do not answer."""

from __future__ import annotations

import asyncio

import pytest

from server_patches.replicas import NoAnswer, Replicas, differing, join_outputs
from server_patches.worker_request import MergeReq

MODULE = {
    "state": "merged", "weight_version": "1", "versions": {"1": 2}, "layers": 2, "rank": 4, "scale": 1.5,
    "merge_precision": "fp32",
}  # fmt: skip


def output(status=200, message="ok", **fields):
    return {
        "status": status, "message": message, "payload_opened": [True], "snapshot": {"transformer": MODULE},
        "failed": None, "staged_bytes": 0, "staged_update": None, "sleeping": False, "digest": "",
    } | fields  # fmt: skip


def test_one_replica_speaks_for_itself():
    assert join_outputs([output(400, "wrong")]) == output(400, "wrong", differing=None)


def test_the_worst_status_is_told_with_every_failure_by_replica():
    answer = join_outputs([output(400, "a"), output(), output(500, "b", reason="engine")])
    assert (answer["status"], answer["reason"], answer["message"]) == (500, "engine", "replica 0: a; replica 2: b")
    assert answer["payload_opened"] == [True, True, True]


def test_the_slowest_replica_gives_the_times():
    answer = join_outputs(
        [output(timings_ms={"merge": 2.0, "total": 3.0}), output(timings_ms={"merge": 1.0, "total": 4.0})]
    )
    assert answer["timings_ms"] == {"merge": 2.0, "total": 4.0}


def test_replicas_in_the_same_state_do_not_differ():
    assert differing([{"transformer": MODULE}, {"transformer": MODULE | {"timings_ms": {"total": 1.0}}}]) is None


def test_replicas_that_differ_are_told_with_what_brings_them_together():
    message = differing([{"transformer": MODULE}, {"transformer": MODULE | {"weight_version": "2"}}])
    assert "transformer on replica 1 has weight_version '2' instead of '1'" in message
    assert "/lora_merge/reset" in message


def asked(silent_at):
    """Two replicas; the second one does not answer these steps. What both were asked."""
    steps = []

    async def ask_one(replica, req):
        step = req.step or req.operation
        steps.append((replica, step))
        if replica == 1 and step in silent_at:
            raise NoAnswer(f"silent at {step}")
        return output()

    return Replicas(ask_one, 2), steps


def test_a_replica_that_does_not_plan_keeps_the_others_from_writing():
    replicas, steps = asked({"prepare"})
    with pytest.raises(NoAnswer, match="silent at prepare"):
        asyncio.run(replicas.ask(MergeReq([])))
    assert steps == [(0, "prepare"), (1, "prepare")]


def test_replicas_that_were_sent_different_updates_write_nothing():
    steps = []

    async def ask_one(replica, req):
        steps.append((replica, req.step or req.operation))
        return output(digest=str(replica) if req.step == "prepare" else "")

    answer = asyncio.run(Replicas(ask_one, 2).ask(MergeReq([])))
    assert (answer["status"], answer["success"], answer["failed"]) == (400, False, None)
    assert answer["message"].startswith("the replicas were sent different updates")
    assert steps == [(0, "prepare"), (1, "prepare"), (0, "undo"), (1, "undo")]


def test_a_replica_that_is_silent_once_is_taken_back_with_the_others():
    replicas, steps = asked({"finish"})
    answer = asyncio.run(replicas.ask(MergeReq([])))
    assert (answer["status"], answer["reason"], answer["failed"]) == (500, "no_answer", None)
    assert steps[-2:] == [(0, "undo"), (1, "undo")]


def test_a_replica_of_which_nothing_is_known_stops_the_engine():
    replicas, _ = asked({"finish", "undo"})
    answer = asyncio.run(replicas.ask(MergeReq([])))
    assert answer["status"] == 503
    assert answer["failed"].startswith("silent at finish; then a replica could not go back: silent at undo")
    assert answer["payload_opened"] == [True, True]
