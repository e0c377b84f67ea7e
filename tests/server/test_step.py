"""A trainer that sends one request per bucket and no ``update_id``, as Miles-diffusion and UniRL do."""

from __future__ import annotations

import pytest
import torch

from sgld_lora_merge import payload_fingerprint
from tests.server.test_transactions import parts
from tests.server.test_versions import generate


def module(engine):
    return engine.status()["modules"]["transformer"]


def push(engine, adapter, version, buckets=6):
    """Every answer, bucket by bucket."""
    for part in parts(adapter, buckets):
        yield engine.update(part, weight_version=version).json()


def test_labels_are_true_after_every_bucket_and_a_rollback_goes_back_a_version(zimage):
    first, second = zimage.adapter(seed=1), zimage.adapter(seed=2)
    *_, last = push(zimage, first, "1")
    assert (last["weight_version"], module(zimage)["weight_version"], generate(zimage)) == ("1", "1", "1")
    image, layers, new = zimage.server.image(), len(first), 0
    for part, answer in zip(parts(second, 6), push(zimage, second, "2"), strict=True):
        new += len(part)
        old = layers - new
        if old:
            versions = {"1": old, "2": new}
            assert (answer["weight_version"], answer["modules"]["transformer"]["versions"]) == (None, versions)
            assert (module(zimage)["weight_version"], module(zimage)["versions"]) == (None, versions)
            assert generate(zimage) == f"mixed; 1={old}, 2={new}"
            kept = f"{layers - len(part)} layers that the request does not name stay live in transformer"
            assert kept in answer["message"]
    assert (answer["weight_version"], module(zimage)["versions"], generate(zimage)) == ("2", {"2": layers}, "2")
    back = zimage.server.post("/lora_merge/rollback").json()
    assert (back["weight_version"], back["message"]) == ("1", "weight_version '1' is live again in transformer")
    zimage.holds(zimage.expect(first))
    assert zimage.server.image() == image
    assert zimage.server.post("/lora_merge/rollback").status_code == 409


def test_a_trainer_that_dies_half_way_leaves_a_mixture_under_no_version_and_a_rollback_undoes_it(zimage):
    first = zimage.adapter(seed=1)
    list(push(zimage, first, "1"))
    sent = push(zimage, zimage.adapter(seed=2), "2")
    for _ in range(3):
        next(sent)
    assert module(zimage)["weight_version"] is None
    refused = zimage.update(zimage.adapter(seed=3), lora_rank=9).json()["message"]
    assert "the engine serves transformer at mixed weight_versions '1' (" in refused
    assert zimage.server.client.get("/model_info").json()["weight_version"].startswith("mixed; 1=")
    zimage.server.post("/lora_merge/rollback")
    zimage.holds(zimage.expect(first))
    assert module(zimage)["weight_version"] == "1"


def test_a_smaller_run_is_told_what_else_is_live(zimage):
    old = zimage.adapter(seed=1)
    list(push(zimage, old, "50"))
    few = dict(list(zimage.adapter(seed=2).items())[:4])
    answer = zimage.update(few, weight_version="1").json()
    others = len(old) - 4
    assert answer["modules"]["transformer"]["kept"] == others
    told = f"{others} layers that the request does not name stay live in transformer, now at mixed weight_versions"
    assert told in answer["message"]
    assert module(zimage)["versions"] == {"1": 4, "50": others}
    answer = zimage.update(few, weight_version="1", update_id="whole, after a smaller run").json()
    assert answer["modules"]["transformer"]["kept"] == 0
    assert module(zimage)["versions"] == {"1": 4}


def test_a_full_update_that_fails_half_way_ends_what_was_live_also_in_the_books(zimage):
    """Its ``update_id`` is not answered as if it were live still."""
    body = zimage.fields(zimage.adapter(seed=1), update_id="before a failed full update", weight_version="1")
    assert zimage.send(body).status_code == 200
    bad = [("layers.1.feed_forward.w2.weight", torch.ones(3, 3))]
    assert zimage.update(bad, weight_update_mode=None, lora_alpha=None, lora_rank=None).status_code == 400
    assert zimage.status()["updates"][-1]["state"] == "reset"
    again = zimage.send(body)
    assert again.status_code == 409
    assert "sglang has put other weights into its modules" in again.json()["message"]


@pytest.mark.parametrize("compact", [False, True])
def test_the_senders_fingerprint_is_compared_with_the_bytes_that_were_opened(zimage, compact):
    zimage.update(zimage.adapter(seed=1), weight_version="good")
    before, adapter = zimage.checksum(), zimage.adapter(seed=2)
    body = zimage.fields(adapter, compact=compact)
    right = payload_fingerprint({"transformer": zimage.sent[0]})
    zimage.sent[0][5] += 1  # a sender that goes on writing
    answer = zimage.send(body | {"payload_fingerprint": [right]})
    assert answer.status_code == 400
    assert f"payload_fingerprint is '{right}', the bytes that were opened have 'sm64:" in answer.json()["message"]
    assert zimage.checksum() == before
    body = zimage.fields(adapter, compact=compact)
    assert zimage.send(body | {"payload_fingerprint": [right]}).status_code == 200
    zimage.holds(zimage.expect(adapter))


def test_a_fingerprint_is_one_for_each_payload_and_of_a_bucket(zimage):
    body = zimage.fields(zimage.adapter())
    for fields, told in (
        ({"payload_fingerprint": ["x", "y"]}, "needs one entry per payload: 2 for 1"),
        ({"payload_fingerprint": ["x"], "load_format": None}, 'it needs load_format "flattened_bucket"'),
    ):
        answer = zimage.send(body | fields)
        assert (answer.status_code, told in answer.json()["message"]) == (400, True), answer.text


def test_buckets_that_overlap_are_refused(zimage):
    from sgld_lora_merge.wire.bucket import flatten
    from sgld_lora_merge.wire.payload import encode
    from support import lora

    before = zimage.checksum()
    flat, entries = flatten(lora.named(zimage.adapter()))
    entries[1].start_idx -= 16
    entries[1].end_idx -= 16
    payload = encode({"transformer": {"flattened_tensor": flat, "metadata": entries}})
    answer = zimage.send(zimage.fields(zimage.adapter(), serialized_named_tensors=[payload]))
    assert answer.status_code == 400
    assert "overlaps" in answer.json()["message"]
    assert zimage.checksum() == before
