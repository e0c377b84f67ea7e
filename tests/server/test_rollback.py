"""One step back: the pairs, scales and version of before, exactly."""

from __future__ import annotations


def rollback(engine):
    return engine.server.post("/lora_merge/rollback")


def version(engine):
    return engine.status()["modules"]["transformer"]["weight_version"]


def test_rollback_brings_the_last_version_back_scales_included(zimage):
    first, second = zimage.adapter(seed=1), zimage.adapter(seed=2, rank=2)
    zimage.update(first, weight_version="1")
    image = zimage.server.image()
    zimage.update(second, weight_version="2", lora_alpha=1, lora_rank=2)
    answer = rollback(zimage)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["weight_version"], answer.json()["layers"]) == ("1", len(first))
    zimage.holds(zimage.expect(first))
    assert (version(zimage), zimage.server.image()) == ("1", image)


def test_a_second_rollback_is_a_conflict(zimage):
    for seed in (1, 2):
        zimage.update(zimage.adapter(seed=seed))
    rollback(zimage)
    answer = rollback(zimage)
    assert answer.status_code == 409
    assert "nothing to roll back" in answer.json()["message"]
    zimage.holds(zimage.expect(zimage.adapter(seed=1)))


def test_rollback_of_the_first_update_is_the_base(zimage):
    base = zimage.checksum()
    zimage.update(zimage.adapter(), weight_version="1")
    assert rollback(zimage).json()["weight_version"] is None
    assert zimage.checksum() == base


def test_rollback_after_a_reset_brings_the_adapter_back(zimage):
    adapter = zimage.adapter()
    zimage.update(adapter, weight_version="1")
    zimage.reset()
    zimage.reset()
    assert rollback(zimage).json()["weight_version"] == "1"
    zimage.holds(zimage.expect(adapter))


def test_a_step_is_one_request_also_where_it_names_some_layers(zimage):
    everything = zimage.adapter(seed=1)
    some = {layer: pair for layer, pair in zimage.adapter(seed=2).items() if "layers.1" in layer}
    zimage.update(everything)
    zimage.update(some)
    rollback(zimage)
    zimage.holds(zimage.expect(everything))


def test_a_refused_update_is_no_step(zimage):
    for seed in (1, 2):
        zimage.update(zimage.adapter(seed=seed))
    assert zimage.update(zimage.adapter(seed=3), lora_rank=9).status_code == 400
    rollback(zimage)
    zimage.holds(zimage.expect(zimage.adapter(seed=1)))


def what_became(engine):
    return {update["update_id"]: update["state"] for update in engine.status()["updates"]}


def test_the_status_tells_what_became_of_updates_that_were_taken_back(zimage):
    body = zimage.fields(zimage.adapter(seed=1), update_id="kept")
    zimage.send(body)
    bad = zimage.fields(zimage.adapter(seed=2), update_id="bad")
    zimage.send(bad)
    assert (what_became(zimage)["kept"], what_became(zimage)["bad"]) == ("replaced", "live")
    rollback(zimage)
    assert (what_became(zimage)["kept"], what_became(zimage)["bad"]) == ("live", "rolled back")
    zimage.reset()
    assert what_became(zimage)["kept"] == "reset"
    rollback(zimage)
    assert what_became(zimage)["kept"] == "live"


def test_a_request_whose_update_was_rolled_back_is_not_answered_as_if_it_were_live(zimage):
    body = zimage.fields(zimage.adapter(seed=1), update_id="taken back")
    zimage.send(body)
    rollback(zimage)
    checksum = zimage.checksum()
    answer = zimage.send(body)
    assert answer.status_code == 409
    assert "was live and is rolled back. Send the update again under another id" in answer.json()["message"]
    assert zimage.checksum() == checksum


def test_rollback_on_every_rank(tp2):
    base = tp2.testhook("weights", module="transformer")
    tp2.update(tp2.adapter(seed=1))
    first = tp2.testhook("weights", module="transformer")
    tp2.update(tp2.adapter(seed=2))
    assert rollback(tp2).status_code == 200
    assert tp2.testhook("weights", module="transformer") == first != base
