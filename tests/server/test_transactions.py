"""Updates of several buckets: staged in any order, live at once, or not at all."""

from __future__ import annotations

import threading

import pytest

from support import server


def parts(adapter, count=3):
    """An adapter in buckets, whole layers each."""
    layers = sorted(adapter)
    return [{layer: adapter[layer] for layer in layers[i::count]} for i in range(count)]


def bucket(engine, part, index, count=3, update_id="u", **fields):
    return engine.update(part, update_id=update_id, bucket_index=index, num_buckets=count, **fields)


@pytest.fixture
def name(request):
    """Ids are never used twice."""
    return request.node.name


def known(engine, name):
    return next(update for update in engine.status()["updates"] if update["update_id"] == name)


def test_three_buckets_in_order_2_0_1_go_live_with_the_last(zimage, name):
    zimage.update(zimage.adapter(seed=1), weight_version="old")
    before = zimage.checksum()
    adapter = zimage.adapter(seed=2)
    sent = parts(adapter)
    for index in (2, 0):
        answer = bucket(zimage, sent[index], index, update_id=name, weight_version="new").json()
        assert (answer["state"], answer["layers"], answer["weight_version"]) == ("staged", len(sent[index]), "old")
        assert (answer["merge_mode"], answer["rounding_loss"], answer["payload_opened"]) == (None, None, [True])
        assert zimage.checksum() == before
    assert zimage.status()["modules"]["transformer"]["state"] == "staging"
    assert zimage.status()["staged_bytes"] > 0
    assert known(zimage, name)["buckets"] == [0, 2]
    answer = bucket(zimage, sent[1], 1, update_id=name, weight_version="new").json()
    assert (answer["state"], answer["layers"], answer["weight_version"]) == ("live", len(adapter), "new")
    zimage.holds(zimage.expect(adapter))
    assert known(zimage, name)["state"] == "live"
    assert zimage.status()["staged_bytes"] == 0


def test_the_sender_may_reuse_its_memory_after_each_answer(zimage, name):
    adapter = zimage.adapter(seed=2)
    for index, part in enumerate(parts(adapter)):
        assert bucket(zimage, part, index, update_id=name).status_code == 200
        for buffer in zimage.sent:
            buffer.fill_(255)
    zimage.holds(zimage.expect(adapter))


def test_layers_that_no_bucket_names_go_back_to_base(zimage, name):
    zimage.update(zimage.adapter(seed=1))
    some = {layer: pair for layer, pair in zimage.adapter(seed=2).items() if "layers.1" in layer}
    for index, part in enumerate(parts(some)):
        bucket(zimage, part, index, update_id=name)
    zimage.holds(zimage.expect(some))


def test_every_image_is_the_old_or_the_new_policys(zimage, name):
    """Generation goes on all the time while the buckets arrive."""
    old, new = zimage.adapter(seed=1), zimage.adapter(seed=2)
    zimage.update(new)
    new_image = zimage.server.image()
    zimage.update(old)
    old_image = zimage.server.image()
    images, stop = [], threading.Event()

    def generate():
        while not stop.is_set():
            images.append(zimage.server.image())

    generator = threading.Thread(target=generate)
    generator.start()
    try:
        sent = parts(new)
        for index in (2, 0, 1):
            assert bucket(zimage, sent[index], index, update_id=name).status_code == 200
        seen = len(images)
        while len(images) < seen + 2:
            pass
    finally:
        stop.set()
        generator.join()
    assert set(images) <= {old_image, new_image}
    assert images[-1] == new_image


def test_a_repeated_bucket_is_answered_as_before_and_not_opened_again(zimage, name):
    part = parts(zimage.adapter())[0]
    body = zimage.fields(part, update_id=name, bucket_index=0, num_buckets=3)
    first = zimage.send(body)
    assert zimage.send(body).json() == first.json()
    assert known(zimage, name)["buckets"] == [0]


def test_a_bucket_with_other_bytes_or_terms_is_a_conflict(zimage, name):
    sent = parts(zimage.adapter())
    bucket(zimage, sent[0], 0, update_id=name)
    for answer in (
        bucket(zimage, sent[1], 0, update_id=name),
        bucket(zimage, sent[1], 1, count=4, update_id=name),
        bucket(zimage, sent[1], 1, update_id=name, lora_alpha=7),
    ):
        assert answer.status_code == 409
        assert answer.json()["payload_opened"] == [False]


def test_a_refused_bucket_may_be_sent_again(zimage, name):
    adapter = zimage.adapter()
    sent = parts(adapter)
    bucket(zimage, sent[0], 0, update_id=name)
    assert bucket(zimage, {"layers.9.x": adapter["layers.0.attention.to_q"]}, 1, update_id=name).status_code == 400
    for index in (1, 2):
        assert bucket(zimage, sent[index], index, update_id=name).status_code == 200
    zimage.holds(zimage.expect(adapter))


def test_a_layer_in_two_buckets_is_refused_when_the_second_arrives(zimage, name):
    sent = parts(zimage.adapter())
    bucket(zimage, sent[0], 0, update_id=name)
    answer = bucket(zimage, sent[0], 1, update_id=name)
    assert answer.status_code == 400
    assert "land on the same rows" in answer.json()["message"]


def test_a_new_update_abandons_an_unfinished_one_and_says_so(zimage, name):
    adapter = zimage.adapter()
    bucket(zimage, parts(adapter)[0], 0, update_id=name)
    answer = zimage.update(adapter, update_id=f"{name} next").json()
    assert f"update '{name}' is abandoned with 1 of 3 buckets" in answer["message"]
    late = bucket(zimage, parts(adapter)[1], 1, update_id=name)
    assert late.status_code == 409
    assert "was abandoned" in late.json()["message"]
    zimage.holds(zimage.expect(adapter))


def test_an_update_without_an_id_leaves_a_staged_one_alone(zimage, name):
    adapter = zimage.adapter(seed=2)
    sent = parts(adapter)
    bucket(zimage, sent[0], 0, update_id=name)
    zimage.update(zimage.adapter(seed=1))
    for index in (1, 2):
        bucket(zimage, sent[index], index, update_id=name)
    zimage.holds(zimage.expect(adapter))


def test_commit_false_waits_for_the_commit(zimage, name):
    adapter = zimage.adapter()
    before = zimage.checksum()
    answer = zimage.update(adapter, update_id=name, commit=False, weight_version="7").json()
    assert (answer["state"], zimage.checksum()) == ("staged", before)
    assert known(zimage, name)["state"] == "staged"
    commit = zimage.server.post("/lora_merge/commit", {"update_id": name})
    assert commit.status_code == 200, commit.text
    assert (commit.json()["state"], commit.json()["weight_version"], commit.json()["layers"]) == ("live", "7", 14)
    zimage.holds(zimage.expect(adapter))
    assert zimage.server.post("/lora_merge/commit", {"update_id": name}).json() == commit.json()


def test_what_is_not_complete_cannot_be_committed(zimage, name):
    bucket(zimage, parts(zimage.adapter())[0], 0, update_id=name)
    answer = zimage.server.post("/lora_merge/commit", {"update_id": name})
    assert answer.status_code == 409
    assert "buckets [0] of 3 have arrived" in answer.json()["message"]
    assert zimage.server.post("/lora_merge/commit", {"update_id": "never seen"}).status_code == 409
    assert zimage.server.post("/lora_merge/commit", {}).status_code == 400


def test_abort_drops_what_is_staged(zimage, name):
    sent = parts(zimage.adapter())
    bucket(zimage, sent[0], 0, update_id=name)
    assert zimage.server.post("/lora_merge/abort", {"update_id": name}).status_code == 200
    assert zimage.status()["staged_bytes"] == 0
    assert bucket(zimage, sent[1], 1, update_id=name).status_code == 409
    assert zimage.server.post("/lora_merge/abort", {"update_id": name}).status_code == 409


def test_rollback_takes_a_whole_transaction_back(zimage, name):
    zimage.update(zimage.adapter(seed=1))
    for index, part in enumerate(parts(zimage.adapter(seed=2))):
        bucket(zimage, part, index, update_id=name)
    assert zimage.server.post("/lora_merge/rollback").status_code == 200
    zimage.holds(zimage.expect(zimage.adapter(seed=1)))


def test_both_modules_of_an_update_go_live_together(sd3, name):
    """``num_buckets`` counts the buckets of all target modules."""
    import torch

    from sgld_lora_merge import pack

    adapter = sd3.adapter()
    layer = "encoder.block.0.layer.0.SelfAttention.o"
    names = sd3.testhook("weights", module="text_encoder_3")[0]
    shape = names[f"{layer}.weight"]["shape"]
    other = [(f"{layer}.lora_A", torch.ones(4, shape[1])), (f"{layer}.lora_B", torch.ones(shape[0], 4))]
    assert bucket(sd3, adapter, 0, count=2, update_id=name).json()["state"] == "staged"
    payload, _buffers = pack({"text_encoder_3": other})
    body = sd3.fields(adapter, update_id=name, bucket_index=1, num_buckets=2)
    answer = sd3.send(body | {"serialized_named_tensors": [payload], "target_modules": ["text_encoder_3"]})
    assert answer.status_code == 200, answer.text
    assert set(answer.json()["modules"]) == {"transformer", "text_encoder_3"}
    sd3.holds(sd3.expect(adapter))
    assert sd3.testhook("weights", module="text_encoder_3")[0] != names


def test_on_tp_2_a_bucket_is_staged_on_every_rank_or_on_none(tp2, name):
    from tests.server.test_tensor_parallel import holds, live, two_payloads

    adapter = tp2.adapter()
    sent = parts(adapter)
    before = live(tp2)
    place = {"update_id": name, "num_buckets": 3}
    refused = tp2.send(two_payloads(tp2, sent[0], second="Z2FyYmFnZQ==") | place | {"bucket_index": 0})
    assert refused.status_code == 400
    for index in (0, 1):
        assert bucket(tp2, sent[index], index, update_id=name).json()["state"] == "staged"
    assert live(tp2) == before
    assert bucket(tp2, sent[2], 2, update_id=name).json()["state"] == "live"
    holds(tp2, adapter)


def test_staged_bytes_and_time_are_bounded(zimage_checkpoint, tmp_path):
    import time

    from support import lora
    from tests.server.conftest import Engine

    env = {"SGLD_LORA_MAX_STAGED_MB": "0.01", "SGLD_LORA_STAGING_TIMEOUT_S": "2"}
    with server.running(zimage_checkpoint, "Z-Image", tmp_path, env=env) as running:
        engine = Engine(running, zimage_checkpoint, lora.ZIMAGE_SUFFIXES, lora.engine_zimage, lora.merge_fp32)
        large = bucket(engine, engine.adapter(rank=16), 0, lora_rank=None)
        assert large.status_code == 413
        assert "SGLD_LORA_MAX_STAGED_MB" in large.json()["message"]
        small = parts(engine.adapter(rank=2), 7)
        assert bucket(engine, small[0], 0, count=7, lora_rank=2).status_code == 200
        deadline = time.monotonic() + 30
        while known(engine, "u")["state"] == "staging" and time.monotonic() < deadline:
            time.sleep(0.1)
        assert known(engine, "u")["reason"] == "nothing came for 2 s"
        assert engine.status()["staged_bytes"] == 0
        assert bucket(engine, small[1], 1, count=7, lora_rank=2).status_code == 409
