"""Every kind of bad input of the contract: refused by name, not a byte changed, generation as before."""

from __future__ import annotations

import base64
import json
import os
import pickle
import time

import pytest
import torch

from sgld_lora_merge.wire.bucket import flatten
from sgld_lora_merge.wire.payload import encode
from support import floods, lora

LAYER = "layers.0.attention.to_q"


def one(adapter, layer=LAYER):
    return {layer: adapter[layer]}


def renamed(adapter, suffix):
    """The first layer's tensors, and one more of another kind."""
    return [*lora.named(one(adapter)), (f"{LAYER}.{suffix}", torch.ones(4))]


def bucket_with(adapter, **changes):
    """A bucket whose first entry says something that is not so."""
    flat, entries = flatten(lora.named(one(adapter)))
    for name, value in changes.items():
        setattr(entries[0], name, value)
    return [encode({"transformer": {"flattened_tensor": flat, "metadata": entries}})]


def bad_b(adapter, b):
    return [(f"{LAYER}.lora_A", adapter[LAYER][0]), (f"{LAYER}.lora_B", b)]


class Reaches:
    """A pickle that calls something when it is read."""

    def __init__(self, call, *arguments):
        self.reduced = (call, arguments)

    def __reduce__(self):
        return self.reduced


def hostile(call, *arguments):
    return [base64.b64encode(pickle.dumps(Reaches(call, *arguments))).decode()]


# what is sent, made from a good adapter; the status; what the message must name
CASES = {
    "unknown layer": (lambda a: {"update": a | {"layers.9.attention.to_q": a[LAYER]}}, 400, "layers.9.attention.to_q"),
    "N1 no layer known": (lambda a: {"update": {"blocks.0.q": a[LAYER]}}, 400, "blocks.0.q"),
    "not a linear layer": (lambda a: {"update": {"layers.0.attention_norm1": a[LAYER]}}, 400, "not a linear layer"),
    "A without B": (lambda a: {"update": lora.named(a)[:-1]}, 400, "no lora_B"),
    "B without A": (lambda a: {"update": lora.named(a)[1:]}, 400, "no lora_A"),
    "A does not fit": (
        lambda a: {"update": {LAYER: (torch.ones(4, 63), a[LAYER][1])}}, 400, "63 columns, the layer takes 64"),
    "B does not fit": (lambda a: {"update": bad_b(a, torch.ones(65, 4))}, 400, "65 rows, the layer gives 64"),
    "B has three dimensions": (lambda a: {"update": bad_b(a, torch.ones(1, 64, 4))}, 400, "does not fit lora_A"),
    "ranks of A and B differ": (lambda a: {"update": bad_b(a, torch.ones(64, 3))}, 400, "rank 4"),
    "wrong lora_rank": (lambda a: {"update": a, "lora_rank": 8}, 400, "the request says lora_rank 8"),
    "duplicate name": (lambda a: {"update": [*lora.named(a), *lora.named(one(a))]}, 400, "are the same lora_A"),
    "N4 two adapters on one layer": (
        lambda a: {"update": [(f"{LAYER}.lora_{s}.{n}.weight", t) for n in ("default", "old")
                              for s, t in zip("AB", a[LAYER], strict=True)]}, 400, "lora_A.old"),
    "NaN": (lambda a: {"update": bad_b(a, torch.full((64, 4), float("nan")))}, 400, "NaN or infinite"),
    "infinity": (lambda a: {"update": bad_b(a, torch.full((64, 4), float("inf")))}, 400, "NaN or infinite"),
    "overflow of the result": (
        lambda a: {"update": {LAYER: (torch.full((4, 64), 3e38), torch.full((64, 4), 3e38))}}, 400, "not finite"),
    "unsupported dtype": (lambda a: {"update": bad_b(a, torch.ones(64, 4, dtype=torch.int8))}, 400, "torch.int8"),
    "S4 DoRA": (lambda a: {"update": renamed(a, "lora_magnitude_vector")}, 400, "DoRA"),
    "bias": (lambda a: {"update": renamed(a, "lora_B.bias")}, 400, "bias"),
    ".diff": (lambda a: {"update": renamed(a, "diff")}, 400, "full difference"),
    "alpha of four numbers": (lambda a: {"update": renamed(a, "alpha")}, 400, "an alpha is one number"),
    "N6 kohya": (
        lambda a: {"update": {"lora_unet_joint_blocks_0_context_block_attn_proj": a[LAYER]}}, 400, "kohya"),
    "not a LoRA name": (lambda a: {"update": renamed(a, "weight")}, 400, "is not named"),
    "empty tensor": (lambda a: {"payload": bucket_with(a, shape=(0, 64), end_idx=0, numel=0)}, 400, "is empty"),
    "empty payload": (lambda a: {"payload": [encode({"transformer": []})], "load_format": None}, 400, "no lora_A"),
    "no payload": (lambda a: {"payload": []}, 400, "serialized_named_tensors is empty"),
    "payload missing": (lambda a: {"payload": None}, 400, "serialized_named_tensors is required"),
    "two payloads for one worker": (lambda a: {"payload": ["", ""]}, 400, "2 payloads"),
    "not base64": (lambda a: {"payload": ["%%%"]}, 400, "not base64"),
    "not a pickle": (lambda a: {"payload": [base64.b64encode(b"hello").decode()]}, 400, "not a readable pickle"),
    "truncated pickle": (lambda a: {"payload": [base64.b64encode(b"\x80\x02}q").decode()]}, 400, "readable pickle"),
    "I4 os.system": (lambda a: {"payload": hostile(os.system, "touch /tmp/canary")}, 400, "posix.system"),
    "I4 getattr": (lambda a: {"payload": hostile(getattr, "text", "upper")}, 400, "getattr"),
    "I4 torch.load": (lambda a: {"payload": hostile(torch.load, "x")}, 400, "torch.serialization.load"),
    "metadata out of range": (
        lambda a: {"payload": bucket_with(a, start_idx=10**6, end_idx=10**6 + 512)}, 400, "outside"),
    "metadata of another shape": (lambda a: {"payload": bucket_with(a, shape=(4, 65))}, 400, "takes 520 bytes"),
    "metadata without a dtype": (lambda a: {"payload": bucket_with(a, dtype="float12")}, 400, "float12"),
    "fault 2: bucket without load_format": (lambda a: {"update": a, "load_format": None}, 400, "flattened_bucket"),
    "list with load_format": (lambda a: {"payload": [encode({"transformer": lora.named(a)})]}, 400, "flattened_tensor"),
    "unknown load_format": (lambda a: {"update": a, "load_format": "sharded"}, 400, "'sharded'"),
    "fault 9: unknown mode": (lambda a: {"update": a, "weight_update_mode": "lora_mergee"}, 400, "'lora_mergee'"),
    "unknown module": (lambda a: {"update": a, "target_modules": ["transformer_2"]}, 400, "transformer_2"),
    "no module": (lambda a: {"update": a, "target_modules": []}, 400, "target_modules is empty"),
    "a module twice": (lambda a: {"update": a, "target_modules": ["transformer"] * 2}, 400, "twice"),
    "uuids do not match": (lambda a: {"update": a, "payload_gpu_uuids": ["a", "b"]}, 400, "one entry per payload"),
    "alpha NaN": (lambda a: {"update": a, "lora_alpha": float("nan")}, 400, "lora_alpha is nan"),
    "alpha beyond float32": (lambda a: {"update": a, "lora_alpha": 1e300}, 400, "not a finite float32"),
    "rank 0": (lambda a: {"update": a, "lora_rank": 0}, 400, "lora_rank is 0"),
    "fault 2: alpha as a string": (lambda a: {"update": a, "lora_alpha": "16"}, 422, "lora_alpha"),
    "rank as a bool": (lambda a: {"update": a, "lora_rank": True}, 422, "lora_rank"),
    "modules as a string": (lambda a: {"update": a, "target_modules": "transformer"}, 422, "target_modules"),
    "scaling of an unknown layer": (
        lambda a: {"update": a, "layer_scaling": {"transformer": {"layers.7.x": 2.0}}}, 400, "layers.7.x"),
    "scaling of another module": (lambda a: {"update": a, "layer_scaling": {"vae": {}}}, 400, "layer_scaling"),
    "scaling NaN": (
        lambda a: {"update": a, "layer_scaling": {"transformer": {LAYER: float("nan")}}}, 400, "layer_scaling of"),
    "bucket_index alone": (lambda a: {"update": a, "update_id": "x", "bucket_index": 0}, 400, "go together"),
    "buckets without update_id": (
        lambda a: {"update": a, "bucket_index": 0, "num_buckets": 1}, 400, "need an update_id"),
    "bucket_index out of range": (
        lambda a: {"update": a, "update_id": "x", "bucket_index": 1, "num_buckets": 1}, 400, "outside 0 to 0"),
    "commit false without update_id": (lambda a: {"update": a, "commit": False}, 400, "needs an update_id"),
    "a name of 144 kB": (
        lambda a: {"payload": [encode({"transformer": [("a" + ".lora_A.x" * 16_000 + "\n", torch.ones(4, 4))]})],
                   "load_format": None}, 400, "at most 512 are read"),
    "numbers for payloads": (lambda a: {"update": a, "serialized_named_tensors": [1] * 250_000}, 400,
                             "has 250000 payloads, at most 1024 are allowed"),
    "a long version": (lambda a: {"update": a, "weight_version": "7" * 200_000}, 400, "has 200000 characters"),
    "a version of two lines": (lambda a: {"update": a, "weight_version": "7\nforged"}, 400, "cannot be printed"),
    "update_id for full weights": (
        lambda a: {"update": a, "weight_update_mode": None, "update_id": "x"}, 400, "update_id belongs to"),
}  # fmt: skip


@pytest.fixture(scope="module")
def served(zimage_session):
    """An adapter that is live before any of the bad inputs, its checksum and its image."""
    zimage_session.reset()
    zimage_session.update(zimage_session.adapter(seed=99), weight_version="good")
    return zimage_session.checksum(), zimage_session.server.image()


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_by_name_and_changes_nothing(zimage_session, served, case):
    made, status, named = CASES[case]
    changes = made(zimage_session.adapter())
    body = zimage_session.fields(changes.pop("update", zimage_session.adapter()))
    if "payload" in changes:
        changes["serialized_named_tensors"] = changes.pop("payload")
    body = {name: value for name, value in (body | changes).items() if value is not None}
    answer = zimage_session.server.client.post(
        "/update_weights_from_tensor", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    message = answer.json()["message"]
    assert answer.status_code == status, answer.text
    assert named in message
    assert "Nothing was changed" in message
    assert answer.json()["success"] is False
    assert isinstance(answer.json()["payload_opened"], list)
    assert (zimage_session.checksum(), zimage_session.server.image()) == served


FLOODS = [
    "opcode b']'", "opcode b'\\x94'", "list of b']'", "20,000 items of one name of 100 kB, no tensors", "one list",
    "entries of one long name", "one tensor as many pairs", "layout of []", "a name that asks a pattern much",
]  # fmt: skip


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("nbytes", [500_000, 2**23])
def test_a_flood_is_refused_while_no_process_grows_by_more_than_it_may(zimage_session, served, flood, nbytes):
    data = floods.PICKLES[flood](nbytes)
    body = zimage_session.fields(zimage_session.adapter(), serialized_named_tensors=[base64.b64encode(data).decode()])
    if not flood.startswith(("entries", "layout")):
        del body["load_format"]
    own = zimage_session.server.rss_bytes()
    for pid in own:
        floods.forget_peak(pid)
    started = time.monotonic()
    answer = zimage_session.send(body)
    seconds = time.monotonic() - started
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 4000
    assert seconds < 8, "2 s are promised, on a machine that has nothing else to do"
    grown = {pid: floods.peak(pid) - before for pid, before in own.items()}
    assert max(grown.values()) <= max(2**26, 8 * len(json.dumps(body))), grown
    assert (zimage_session.checksum(), zimage_session.server.image()) == served


def test_all_faults_are_named_at_once(zimage):
    adapter = zimage.adapter()
    tensors = [
        *lora.named({f"blocks.{i}.q": adapter[LAYER] for i in range(12)}),
        (f"{LAYER}.lora_A", adapter[LAYER][0]),
        ("layers.0.feed_forward.w2.lora_A", torch.ones(4, 7)),
        ("layers.0.feed_forward.w2.lora_B", torch.ones(64, 4)),
        ("layers.1.feed_forward.w2.bias", torch.ones(4)),
    ]
    message = zimage.update(tensors).json()["message"]
    for named in (
        "'layers.0.attention.to_q' has lora_A but no lora_B",
        "7 columns",
        "a bias",
        "blocks.0.q",
        "and 2 more",
    ):
        assert named in message


def test_nothing_was_executed_by_hostile_payloads(zimage, tmp_path):
    canary = tmp_path / "canary"
    body = zimage.fields(zimage.adapter())
    for payload in (hostile(os.system, f"touch {canary}"), hostile(eval, f"open({str(canary)!r}, 'w')"),
                    hostile(exec, f"open({str(canary)!r}, 'w')")):  # fmt: skip
        assert zimage.send(body | {"serialized_named_tensors": payload}).status_code == 400
    assert not canary.exists()


def test_i8_a_cross_site_post_is_refused_before_the_unpickler(zimage):
    body = json.dumps(zimage.fields(zimage.adapter()))
    post = zimage.server.client.post
    plain = post("/update_weights_from_tensor", content=body, headers={"content-type": "text/plain"})
    assert plain.status_code == 415
    foreign = {"content-type": "application/json", "origin": "https://example.org"}
    assert post("/update_weights_from_tensor", content=body, headers=foreign).status_code == 403
    assert post("/lora_merge/reset", headers={"origin": "https://example.org"}).status_code == 403
    assert zimage.status()["modules"]["transformer"]["state"] == "base"


def test_not_json_and_not_an_object(zimage):
    post = zimage.server.client.post
    for content in (b"{", b"[1]", b"\xff\xfe"):
        answer = post("/update_weights_from_tensor", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["success"] is False


def test_fault_03_generation_works_after_a_bad_shape_and_a_string_alpha(zimage):
    image = zimage.server.image()
    adapter = zimage.adapter()
    assert zimage.update({LAYER: (torch.ones(4, 63), adapter[LAYER][1])}).status_code == 400
    assert zimage.update(adapter, lora_alpha="16").status_code == 422
    assert zimage.server.image() == image


def test_failures_are_counted_by_reason(zimage):
    before = zimage.status()["totals"]["failures"].get("request", 0)
    zimage.update(zimage.adapter(), lora_rank=9)
    assert zimage.status()["totals"]["failures"]["request"] == before + 1
