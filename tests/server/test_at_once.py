"""Requests that come together: each has one outcome, whichever is first."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import pytest

from tests.server.test_transactions import bucket, known, parts

TRAINERS = ("left", "right")


@pytest.fixture
def name(request):
    """Ids are never used twice."""
    return request.node.name


def at_once(*works):
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]


def live_version(engine):
    return engine.status()["modules"]["transformer"]["weight_version"]


def test_two_trainers_at_once_leave_one_whole_policy_and_its_version(zimage):
    """Six updates each; every one is live for a while, and none is a mixture of two."""
    adapters = {trainer: zimage.adapter(seed=seed) for seed, trainer in enumerate(TRAINERS)}
    bodies = [(t, zimage.fields(adapters[t], weight_version=t), zimage.sent) for _ in range(6) for t in TRAINERS]

    def push(trainer):
        return [zimage.send(body).status_code for each, body, _buffers in bodies if each == trainer]

    answers = at_once(*(lambda t=t: push(t) for t in TRAINERS))
    assert answers == [[200] * 6] * 2
    zimage.holds(zimage.expect(adapters[live_version(zimage)]))


def test_the_buckets_of_two_trainers_at_once_make_one_update_and_abandon_the_other(zimage, name):
    adapters = {trainer: zimage.adapter(seed=seed) for seed, trainer in enumerate(TRAINERS)}
    first = {t: bucket(zimage, parts(adapters[t])[0], 0, update_id=f"{name} {t}") for t in TRAINERS}
    assert f"'{name} left' is abandoned" in first["right"].json()["message"]
    rest = {
        trainer: [
            bucket(zimage, parts(adapters[trainer])[index], index, update_id=f"{name} {trainer}") for index in (1, 2)
        ]
        for trainer in TRAINERS
    }
    assert [answer.status_code for answer in rest["left"]] == [409, 409]
    assert [answer.json()["state"] for answer in rest["right"]] == ["staged", "live"]
    zimage.holds(zimage.expect(adapters["right"]))


def test_a_reset_and_an_update_at_once_are_one_after_the_other(zimage):
    adapter = zimage.adapter()
    body = zimage.fields(adapter, weight_version="7")
    reset, update = at_once(lambda: zimage.server.post("/lora_merge/reset"), lambda: zimage.send(body))
    assert (reset.status_code, update.status_code) == (200, 200)
    assert live_version(zimage) in ("7", None)
    zimage.holds(zimage.expect(adapter if live_version(zimage) == "7" else {}))


def test_a_reset_during_an_update_in_buckets_is_live_until_its_last_bucket(zimage, name):
    zimage.update(zimage.adapter(seed=1))
    adapter = zimage.adapter(seed=2)
    sent = parts(adapter)
    bucket(zimage, sent[0], 0, update_id=name)
    zimage.reset()
    zimage.holds(zimage.expect({}))
    for index in (1, 2):
        assert bucket(zimage, sent[index], index, update_id=name).status_code == 200
    zimage.holds(zimage.expect(adapter))


def test_a_rollback_during_staging_is_live_until_the_last_bucket(zimage, name):
    old, new, staged = (zimage.adapter(seed=seed) for seed in (1, 2, 3))
    zimage.update(old, weight_version="old")
    zimage.update(new, weight_version="new")
    sent = parts(staged)
    bucket(zimage, sent[0], 0, update_id=name, weight_version="staged")
    assert zimage.server.post("/lora_merge/rollback").status_code == 200
    zimage.holds(zimage.expect(old))
    assert live_version(zimage) == "old"
    assert known(zimage, name)["state"] == "staging"
    for index in (1, 2):
        assert bucket(zimage, sent[index], index, update_id=name, weight_version="staged").status_code == 200
    zimage.holds(zimage.expect(staged))
    assert zimage.server.post("/lora_merge/rollback").status_code == 200
    zimage.holds(zimage.expect(old))


def test_an_abort_and_the_last_bucket_at_once_leave_the_update_live_or_nothing_of_it(zimage, name):
    adapter = zimage.adapter()
    sent = parts(adapter, 2)
    bucket(zimage, sent[0], 0, count=2, update_id=name)
    body = zimage.fields(sent[1], update_id=name, bucket_index=1, num_buckets=2)
    abort, last = at_once(
        lambda: zimage.server.post("/lora_merge/abort", {"update_id": name}), lambda: zimage.send(body)
    )
    assert sorted((abort.status_code, last.status_code)) == [200, 409]
    assert known(zimage, name)["state"] == ("live" if last.status_code == 200 else "abandoned")
    zimage.holds(zimage.expect(adapter if last.status_code == 200 else {}))


def test_going_to_sleep_during_an_update_in_buckets_abandons_it(zimage, name):
    """sglang cannot sleep without CUDA and says so; the update is abandoned as soon as it is asked to."""
    zimage.update(zimage.adapter(seed=1), weight_version="old")
    sent = parts(zimage.adapter(seed=2))
    bucket(zimage, sent[0], 0, update_id=name)
    assert zimage.server.post("/release_memory_occupation").status_code == 500
    assert known(zimage, name)["state"] == "abandoned"
    assert bucket(zimage, sent[1], 1, update_id=name).status_code == 409
    zimage.holds(zimage.expect(zimage.adapter(seed=1)))
    assert live_version(zimage) == "old"


def test_a_client_that_goes_away_does_not_end_its_update(zimage, name):
    """Or nobody would know what is live."""
    body = zimage.fields(zimage.adapter(), weight_version="7", update_id=name)
    sent = zimage.server.client.build_request("POST", "/update_weights_from_tensor", json=body)
    updates = zimage.status()["totals"]["updates"]
    client = HTTPConnection(sent.url.host, sent.url.port)
    client.request("POST", sent.url.path, sent.content, {"content-type": "application/json"})
    time.sleep(0.2)  # or it may be gone before the engine has read all of it
    client.close()
    assert zimage.send(body).json()["weight_version"] == "7"  # the answer that nobody has read
    assert zimage.status()["totals"]["updates"] == updates + 1
    zimage.holds(zimage.expect(zimage.adapter()))
