"""dp 2: two replicas of one engine change together or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from sgld_lora_merge import pack
from support import lora, server
from tests.server.conftest import TESTHOOK, Engine

ATTEMPTS = 4  # generations in a row land on one replica after the other


@pytest.fixture(scope="module")
def dp2_session(zimage_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dp2_server")
    env = {"PYTHONPATH": str(TESTHOOK), "OMP_NUM_THREADS": "1"}
    arguments = ("--num-gpus", "2", "--dp-size", "2")
    with server.running(zimage_checkpoint, "Z-Image", folder, arguments=arguments, env=env) as running:
        yield Engine(running, zimage_checkpoint, lora.ZIMAGE_SUFFIXES, lora.engine_zimage, lora.merge_fp32)


@pytest.fixture
def dp2(dp2_session):
    dp2_session.reset()
    return dp2_session


def live(engine):
    """Checksums of every parameter, by replica."""
    replicas = engine.testhook("weights", module="transformer")
    assert len(replicas) == 2
    return [{name: weight["sha256"] for name, weight in replica.items()} for replica in replicas]


def holds(engine, adapter, scale=1.5):
    expected = engine.expect(adapter, scale)
    for number, found in enumerate(live(engine)):
        wrong = [name for name, checksum in expected.items() if found[name] != checksum]
        assert not wrong, f"replica {number}: {wrong}"


def images(engine):
    return {engine.server.image() for _ in range(ATTEMPTS)}


def version(engine):
    status = engine.status()
    assert status["success"] is True, status
    return status["modules"]["transformer"]["weight_version"]


def with_second_payload(engine, adapter, second):
    """A body with one payload for each replica."""
    body = engine.fields(adapter)
    return body | {"serialized_named_tensors": [*body["serialized_named_tensors"], second]}


@pytest.fixture
def unchanged(dp2):
    """What a refused request must leave: weights, history and images of both replicas."""
    dp2.update(dp2.adapter(seed=8), weight_version="before")
    dp2.update(dp2.adapter(seed=9), weight_version="good")
    before, shown = live(dp2), images(dp2)
    assert len(shown) == 1
    yield dp2
    assert live(dp2) == before
    assert images(dp2) == shown
    assert version(dp2) == "good"
    assert dp2.server.post("/lora_merge/rollback").status_code == 200
    holds(dp2, dp2.adapter(seed=8))
    assert version(dp2) == "before"


def test_an_update_is_live_on_both_replicas(dp2):
    """One CPU payload for both; generations land on both."""
    base = images(dp2)
    adapter = dp2.adapter()
    answer = dp2.update(adapter, weight_version="1").json()
    assert answer["success"] is True, answer
    assert answer["payload_opened"] == [True, True]
    assert answer["layers"] == len(adapter)
    assert answer["timings_ms"]["deserialize"] > 0
    assert answer["timings_ms"]["merge"] > 0
    holds(dp2, adapter)
    after = images(dp2)
    assert len(after) == len(base) == 1
    assert after != base
    assert version(dp2) == "1"


def test_one_payload_for_each_worker_of_the_engine(dp2):
    """As sglang's own path reads them: by rank over all replicas. How each was packed does not matter."""
    adapter = dp2.adapter(seed=1)
    payload, buffers = pack({"transformer": lora.named(adapter)[::-1]})
    answer = dp2.send(with_second_payload(dp2, adapter, payload))
    assert (answer.status_code, answer.json()["payload_opened"]) == (200, [True, True])
    del buffers
    holds(dp2, adapter)


def test_replicas_that_were_sent_different_updates_refuse_them(unchanged):
    """Or one version would name two policies, and an image be the one's or the other's."""
    payload, _buffers = pack({"transformer": lora.named(unchanged.adapter(seed=2))})
    answer = unchanged.send(with_second_payload(unchanged, unchanged.adapter(seed=1), payload))
    assert answer.status_code == 400
    assert "the replicas were sent different updates" in answer.json()["message"]


def test_garbage_for_one_replica_changes_none(unchanged):
    answer = unchanged.send(with_second_payload(unchanged, unchanged.adapter(), "Z2FyYmFnZQ=="))
    assert answer.status_code == 400
    message = answer.json()["message"]
    assert "replica 1: the payload is not a readable pickle" in message
    assert "replica 0" not in message
    assert "weight_version 'good'" in message
    assert answer.json()["payload_opened"] == [True, False]


def test_what_is_wrong_on_both_replicas_is_said_once(unchanged):
    answer = unchanged.update(unchanged.adapter(), lora_rank=5)
    assert answer.status_code == 400
    assert answer.json()["message"].count("'layers.0.attention.to_k' has rank 4") == 1
    assert "replica" not in answer.json()["message"]


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("stage", ["before_plan", "plan", "commit"])
def test_a_replica_that_raises_is_an_error_and_none_changes(unchanged, replica, stage):
    unchanged.testhook("fail", rank=replica, stage=stage)
    answer = unchanged.update(unchanged.adapter(), weight_version="bad")
    assert answer.status_code == 500
    assert f"replica {replica}: RuntimeError: injected at {stage}" in answer.json()["message"]


def test_an_overflow_is_undone_on_both(unchanged):
    """Replicas are sent the same update, so it is one of both; a fault of one alone is the commit's, above."""
    answer = unchanged.update({"layers.0.attention.to_q": overflowing()})
    assert answer.status_code == 400
    assert "transformer: 64 elements of the merged weight are not finite" in answer.json()["message"]


def test_an_overflow_on_both_replicas_is_said_once(unchanged):
    answer = unchanged.update({"layers.0.attention.to_q": overflowing()})
    assert answer.status_code == 400
    assert answer.json()["message"].count("64 elements of the merged weight are not finite") == 1


def overflowing():
    a, b = torch.ones(4, 64), torch.zeros(64, 4)
    b[40] = 3e38
    return a, b


@pytest.mark.parametrize("operation", ["reset", "rollback"])
def test_a_reset_or_rollback_that_one_replica_cannot_do_is_undone_on_both(unchanged, operation):
    unchanged.testhook("fail", rank=1, stage="commit")
    answer = unchanged.server.post(f"/lora_merge/{operation}")
    assert answer.status_code == 500
    assert "replica 1: RuntimeError: injected at commit" in answer.json()["message"]


def test_reset_and_rollback_reach_both_replicas(dp2):
    base = live(dp2)
    dp2.update(dp2.adapter(seed=1), weight_version="1")
    dp2.update(dp2.adapter(seed=2), weight_version="2")
    assert dp2.server.post("/lora_merge/rollback").json()["weight_version"] == "1"
    holds(dp2, dp2.adapter(seed=1))
    assert dp2.server.post("/lora_merge/rollback").status_code == 409
    dp2.reset()
    assert live(dp2) == base
    assert version(dp2) is None


def test_buckets_go_live_on_both_replicas_at_once_beside_generations(dp2):
    """Every image is that of the version before or of the version after, on either replica."""
    dp2.update(dp2.adapter(seed=1), weight_version="1")
    (old,) = images(dp2)
    adapter = dp2.adapter(seed=2)
    halves = [dict(list(adapter.items())[:7]), dict(list(adapter.items())[7:])]
    with ThreadPoolExecutor(2) as pool:
        meanwhile = [pool.submit(dp2.server.image) for _ in range(2 * ATTEMPTS)]
        first = dp2.update(halves[1], update_id="dp", bucket_index=1, num_buckets=2, weight_version="2").json()
        assert (first["state"], first["weight_version"], first["payload_opened"]) == ("staged", "1", [True, True])
        last = dp2.update(halves[0], update_id="dp", bucket_index=0, num_buckets=2, weight_version="2").json()
        assert (last["state"], last["weight_version"]) == ("live", "2")
    holds(dp2, adapter)
    (new,) = images(dp2)
    assert {image.result() for image in meanwhile} <= {old, new}


def test_a_bucket_that_one_replica_refuses_is_staged_on_neither(dp2):
    adapter = dp2.adapter()
    body = with_second_payload(dp2, adapter, "Z2FyYmFnZQ==") | {"update_id": "half", "commit": False}
    assert dp2.send(body).status_code == 400
    assert dp2.status()["staged_bytes"] == 0
    assert dp2.update(adapter, update_id="half", commit=False).json()["state"] == "staged"
    assert dp2.server.post("/lora_merge/abort", {"update_id": "half"}).status_code == 200


def test_commit_and_abort_reach_both_replicas(dp2):
    dp2.update(dp2.adapter(seed=1), weight_version="1")
    dp2.update(dp2.adapter(seed=2), update_id="aborted", commit=False)
    assert dp2.status()["staged_bytes"] > 0
    assert dp2.server.post("/lora_merge/abort", {"update_id": "aborted"}).status_code == 200
    assert dp2.status()["staged_bytes"] == 0
    dp2.update(dp2.adapter(seed=3), update_id="committed", commit=False, weight_version="3")
    holds(dp2, dp2.adapter(seed=1))
    assert dp2.server.post("/lora_merge/commit", {"update_id": "committed"}).json()["weight_version"] == "3"
    holds(dp2, dp2.adapter(seed=3))


def test_a_commit_that_one_replica_cannot_do_may_be_asked_for_again(dp2):
    dp2.update(dp2.adapter(seed=1), weight_version="1")
    dp2.update(dp2.adapter(seed=2), update_id="twice", commit=False)
    dp2.testhook("fail", rank=1, stage="commit")
    assert dp2.server.post("/lora_merge/commit", {"update_id": "twice"}).status_code == 500
    holds(dp2, dp2.adapter(seed=1))
    assert dp2.server.post("/lora_merge/commit", {"update_id": "twice"}).status_code == 200
    holds(dp2, dp2.adapter(seed=2))


def test_verify_compares_every_replica(dp2):
    first = dp2.adapter(seed=1)
    dp2.update(first)
    expected = {
        layer: {"sha256": lora.sha256(weight)}
        for layer, weight in lora.merged(dp2.targets, first, 1.5, dp2.merge).items()
    }
    request = {"modules": {"transformer": expected}}
    assert dp2.server.post("/lora_merge/verify", request).json()["success"] is True
    dp2.testhook("reload", rank=1, module="transformer")
    answer = dp2.server.post("/lora_merge/verify", request).json()
    assert (answer["success"], set(answer["mismatched"])) == (False, {f"transformer.{layer}" for layer in expected})
    assert "replica 1: 14 of 14 layers" in answer["message"]
    assert "replica 0: all 14 layers" in answer["message"]


def test_the_status_says_that_replicas_differ_until_a_reset(dp2):
    dp2.update(dp2.adapter())
    dp2.testhook("reload", rank=1, module="transformer")
    status = dp2.server.client.get("/lora_merge/status")
    assert status.status_code == 503
    assert "transformer on replica 1 has state 'base' instead of 'merged'" in status.json()["message"]
    dp2.reset()
    assert dp2.status()["success"] is True


def test_an_upload_reaches_both_replicas(dp2):
    from safetensors.torch import save

    adapter = dp2.adapter()
    answer = dp2.server.client.post(
        "/lora_merge/upload", content=save(dict(lora.named(adapter))), params={"lora_alpha": 6, "lora_rank": 4}
    )
    assert answer.status_code == 200, answer.text
    holds(dp2, adapter)


def full(engine, weights, **fields):
    tensors = [(f"{layer}.weight", weight) for layer, weight in weights.items()]
    return engine.fields(tensors, weight_update_mode=None, lora_alpha=None, lora_rank=None, **fields)


def test_a_full_update_reaches_both_replicas_or_none(dp2):
    base = live(dp2)
    moved = {layer: (weight.float() + 0.25).to(weight.dtype) for layer, weight in dp2.targets.items()}
    dp2.update(dp2.adapter(seed=1), weight_version="1")
    before = live(dp2)
    try:
        body = full(dp2, moved)
        wrong = body | {"serialized_named_tensors": [*body["serialized_named_tensors"], "Z2FyYmFnZQ=="]}
        answer = dp2.send(wrong)
        assert answer.status_code == 400
        assert "replica 1: the payload is not a readable pickle" in answer.json()["message"]
        assert answer.json()["payload_opened"] == [True, False]
        assert live(dp2) == before
        assert dp2.send(full(dp2, moved, weight_version="full")).status_code == 200
        first, second = live(dp2)
        assert first == second
        assert version(dp2) == "full"
    finally:
        assert dp2.send(full(dp2, dp2.targets)).status_code == 200
    assert live(dp2) == base


def test_replicas_that_could_not_be_brought_together_stop_the_engine(dp2_session):
    """The last resort. Replica 0 has written what replica 1 refused, and cannot take it back."""
    dp2_session.testhook("fail", rank=0, stage="undo")
    dp2_session.testhook("fail", rank=1, stage="commit")
    answer = dp2_session.update(dp2_session.adapter())
    assert answer.status_code == 503
    for part in ("replica 1: RuntimeError: injected at commit", "replica 0:", "injected at undo", "estart the engine"):
        assert part in answer.json()["message"]
    assert answer.json()["payload_opened"] == [True, True]
    assert dp2_session.server.client.get("/health").status_code == 503
    with pytest.raises(httpx.HTTPStatusError, match="503"):
        dp2_session.server.image()
    assert dp2_session.status()["success"] is False
