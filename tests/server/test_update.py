"""A single update on the real engine: merged byte for byte, seen in the image, reported, and taken back."""

from __future__ import annotations

import os

import torch

from sgld_lora_merge import pack
from support import lora


def test_an_update_is_merged_byte_for_byte_and_changes_the_image(zimage):
    before = zimage.server.image()
    adapter = zimage.adapter()
    answer = zimage.update(adapter, weight_version="7").json()
    assert answer["success"] is True
    assert answer["state"] == "live"
    assert answer["layers"] == len(adapter)
    assert answer["merge_precision"] == "fp32"
    assert answer["base_store"] == "host"
    assert answer["payload_opened"] == [True]
    assert answer["modules"]["transformer"]["layers"] == len(adapter)
    assert 0 < answer["rounding_loss"] < 0.1
    assert set(answer["timings_ms"]) == {"deserialize", "validate", "merge", "total"}
    zimage.holds(zimage.expect(adapter))
    assert zimage.server.image() != before


def test_reset_gives_the_first_image_and_every_byte_back(zimage):
    checksum, before = zimage.checksum(), zimage.server.image()
    zimage.update(zimage.adapter(), weight_version="7")
    answer = zimage.server.post("/lora_merge/reset").json()
    assert answer["success"] is True
    assert answer["weight_version"] is None
    assert zimage.checksum() == checksum
    assert zimage.server.image() == before
    assert zimage.status()["modules"]["transformer"]["state"] == "base"


def test_reset_of_a_module_that_does_not_exist_names_it(zimage):
    answer = zimage.server.post("/lora_merge/reset", {"target_modules": ["transformer_2"]})
    assert answer.status_code == 400
    assert "transformer_2" in answer.json()["message"]


def test_m3_fp16_mode_equals_the_trainers_eager_merge(sd3):
    for alpha, scale in ((6.0, 1.5), (8, 2.0), (2.8284, 0.7071)):
        adapter = sd3.adapter(seed=int(alpha))
        answer = sd3.update(adapter, lora_alpha=alpha).json()
        assert answer["success"] is True, answer
        assert answer["merge_precision"] == "fp16"
        sd3.holds(sd3.expect(adapter, scale))


def test_an_answer_says_that_float32_pairs_were_rounded_to_the_weights_dtype(sd3):
    """And they are those bytes, which our train-side merge gives too; a staged answer knows nothing of it yet."""
    masters = sd3.adapter(seed=3, dtype=torch.float32)
    told = "in transformer A or B was first rounded to the weights' dtype"
    staged = sd3.update(masters, update_id="masters", commit=False).json()
    assert (staged["state"], staged["pairs_rounded"]) == ("staged", None)
    answer = sd3.server.post("/lora_merge/commit", {"update_id": "masters"}).json()
    assert (answer["pairs_rounded"], answer["modules"]["transformer"]["pairs_rounded"]) == (True, True)
    assert told in answer["message"]
    sd3.holds(sd3.expect(masters))
    answer = sd3.update(sd3.adapter(seed=3)).json()
    assert (answer["pairs_rounded"], told in answer["message"]) == (False, False)


def test_s1_alpha_may_be_a_float_and_null_means_rank(zimage):
    adapter = zimage.adapter()
    for alpha, scale in ((0.5, 0.125), (12.5, 3.125), (None, 1.0)):
        assert zimage.update(adapter, lora_alpha=alpha, lora_rank=None).status_code == 200
        zimage.holds(zimage.expect(adapter, scale))


def test_s2_layer_scaling_is_the_whole_scale_of_a_layer(zimage):
    adapter = zimage.adapter()
    scales = dict.fromkeys(adapter, 1.5) | {"layers.0.attention.to_q": 4.0, "layers.1.feed_forward.w2": 0.7071}
    special = {layer: scale for layer, scale in scales.items() if scale != 1.5}
    assert zimage.update(adapter, layer_scaling={"transformer": special}).status_code == 200
    zimage.holds(zimage.expect(adapter, scales))


def test_n7_a_layers_own_alpha_is_its_scale(zimage):
    """As original checkpoints name things: a prefix, down and up, an alpha for each layer."""
    adapter = zimage.adapter()
    tensors = []
    for layer, (a, b) in adapter.items():
        prefix = f"diffusion_model.{layer}"
        tensors += [
            (f"{prefix}.lora_down.weight", a),
            (f"{prefix}.lora_up.weight", b),
            (f"{prefix}.alpha", torch.tensor(3.0)),
        ]
    assert zimage.update(tensors).status_code == 200
    zimage.holds(zimage.expect(adapter, 0.75))


def test_ranks_may_differ_where_no_rank_is_given(zimage):
    adapter = zimage.adapter() | {
        layer: pair for layer, pair in zimage.adapter(rank=2, seed=3).items() if "attention" in layer
    }
    answer = zimage.update(adapter, lora_alpha=4, lora_rank=None)
    assert answer.status_code == 200, answer.text
    zimage.holds(zimage.expect(adapter, {layer: 4 / a.shape[0] for layer, (a, _) in adapter.items()}))
    assert zimage.status()["modules"]["transformer"]["rank"] == [2, 4]


def test_m2_the_same_update_twice_is_merged_once(zimage):
    adapter = zimage.adapter()
    zimage.update(adapter)
    first = zimage.checksum()
    zimage.update(adapter)
    assert zimage.checksum() == first
    zimage.holds(zimage.expect(adapter))


def test_fault_10_the_version_is_reported_when_it_is_live(zimage):
    zimage.update(zimage.adapter(), weight_version="step-12")
    module = zimage.status()["modules"]["transformer"]
    assert module["weight_version"] == "step-12"
    assert (module["state"], module["layers"], module["rank"], module["scale"]) == ("merged", 14, 4, 1.5)


def test_fault_15_a_whole_update_takes_back_the_layers_it_does_not_name(zimage):
    everything = zimage.adapter(seed=1)
    some = {layer: pair for layer, pair in zimage.adapter(seed=2).items() if "layers.1" in layer}
    zimage.update(everything, update_id="all")
    zimage.update(some)
    zimage.holds(zimage.expect(everything | some))
    zimage.update(some, update_id="some")
    zimage.holds(zimage.expect(some))


def test_fault_01_sections_of_a_fused_layer_are_updated_on_their_own(zimage):
    """F3: q and v without k; k keeps what it has, or goes back to base in a whole update."""
    everything = zimage.adapter(seed=1)
    no_k = {layer: pair for layer, pair in zimage.adapter(seed=2).items() if not layer.endswith("to_k")}
    zimage.update(everything)
    assert zimage.update(no_k).status_code == 200
    zimage.holds(zimage.expect(everything | no_k))
    assert zimage.update(no_k, update_id="no k").status_code == 200
    zimage.holds(zimage.expect(no_k))


def test_the_fused_layer_may_be_named_as_a_whole(zimage):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 64, generator=generator), torch.randn(192, 4, generator=generator)
    name = "layers.0.attention.to_qkv"
    assert zimage.update({name: (a, b)}).status_code == 200
    base = zimage.to_engine(zimage.targets)[f"{name}.weight"]
    zimage.holds({f"{name}.weight": lora.sha256(lora.merge_fp32(base, a, b, 1.5))})


def test_fault_05_peft_names_are_understood(zimage):
    """N5: with PEFT's prefix, an adapter segment, and .weight."""
    adapter = zimage.adapter()
    tensors = [(f"base_model.model.{name}.default.weight", tensor) for name, tensor in lora.named(adapter)]
    assert zimage.update(tensors).status_code == 200
    zimage.holds(zimage.expect(adapter))


def test_fault_14_payload_gpu_uuids_work_on_a_cpu(zimage):
    adapter = zimage.adapter()
    assert zimage.update(adapter, payload_gpu_uuids=["GPU-0"]).status_code == 200
    zimage.holds(zimage.expect(adapter))


def test_fault_12_the_engine_keeps_nothing_of_the_senders_memory(zimage):
    """I5: the sender overwrites its buffer right after the answer."""
    adapter = zimage.adapter()
    zimage.update(adapter)
    image = zimage.server.image()
    for buffer in zimage.sent:
        buffer.zero_()
    assert zimage.server.image() == image
    zimage.holds(zimage.expect(adapter))
    half = {layer: pair for layer, pair in zimage.adapter(seed=2).items() if "layers.0" in layer}
    zimage.update(half)
    zimage.holds(zimage.expect(adapter | half))


def test_fault_13_no_garbage_collection_on_the_update_path(zimage):
    before = zimage.testhook("gc")
    for seed in range(3):
        zimage.update(zimage.adapter(seed=seed))
    assert zimage.testhook("gc") == before


def test_fault_16_no_layer_is_wrapped_and_w0_is_kept_of_targets_only(zimage):
    names = set(zimage.testhook("weights", module="transformer")[0])
    pointers = {n: w["data_ptr"] for n, w in zimage.testhook("weights", module="transformer")[0].items()}
    zimage.update(zimage.adapter())
    after = zimage.testhook("weights", module="transformer")[0]
    assert set(after) == names
    assert {name: weight["data_ptr"] for name, weight in after.items()} == pointers
    stored = zimage.status()["modules"]["transformer"]["base_store_bytes"]
    assert stored == sum(weight.nbytes for weight in zimage.targets.values())


def test_host_memory_is_flat_over_many_updates(zimage):
    """100 updates of a fresh adapter; W0 and two sets of pairs are there after the second."""
    for seed in range(20):
        zimage.update(zimage.adapter(seed=seed))
    before = zimage.server.rss_bytes()
    for seed in range(100):
        assert zimage.update(zimage.adapter(seed=seed)).status_code == 200
    after = zimage.server.rss_bytes()
    grown = {pid: after[pid] - before[pid] for pid in before}
    assert all(growth < 8 * 2**20 for growth in grown.values()), grown


def test_i1_the_senders_shared_memory_is_released_when_it_lets_go(zimage):
    from pathlib import Path

    def files() -> set[str]:
        return {entry.name for entry in Path("/dev/shm").iterdir() if entry.name.startswith(f"torch_{os.getpid()}_")}

    before = files()
    for seed in range(10):
        zimage.update(zimage.adapter(seed=seed))
    zimage.sent = []
    assert files() <= before


def test_a_list_of_tensors_is_accepted_for_a_single_module(zimage):
    from sgld_lora_merge.wire.payload import encode

    adapter = zimage.adapter()
    for content in (lora.named(adapter), {"transformer": lora.named(adapter)}):
        zimage.reset()
        body = zimage.fields(adapter) | {"serialized_named_tensors": [encode(content)], "load_format": None}
        answer = zimage.send(body)
        assert answer.status_code == 200, answer.text
        zimage.holds(zimage.expect(adapter))


def test_unknown_fields_are_seen(zimage):
    answer = zimage.update(zimage.adapter(), lora_aplha=3).json()
    assert answer["ignored_fields"] == ["lora_aplha"]


def test_allow_partial_reports_what_it_left_out(zimage):
    adapter = zimage.adapter()
    extra = {"layers.9.attention.to_q": adapter["layers.0.attention.to_q"]}
    answer = zimage.update(adapter | extra, allow_partial=True).json()
    assert answer["success"] is True
    assert answer["skipped"] == ["layers.9.attention.to_q"]
    assert answer["layers"] == len(adapter)
    zimage.holds(zimage.expect(adapter))


def test_a_lost_answer_is_given_again_and_the_payload_not_opened_twice(zimage):
    body = zimage.fields(zimage.adapter(), update_id="once", weight_version="1")
    first = zimage.send(body)
    second = zimage.send(body)
    assert first.status_code == 200
    assert second.json() == first.json()
    assert zimage.status()["updates"][-1]["update_id"] == "once"


def test_a_finished_update_id_with_another_body_is_a_conflict(zimage):
    zimage.update(zimage.adapter(seed=1), update_id="twice")
    checksum = zimage.checksum()
    answer = zimage.update(zimage.adapter(seed=2), update_id="twice")
    assert answer.status_code == 409
    assert "'twice'" in answer.json()["message"]
    assert zimage.checksum() == checksum


def test_a_refused_update_id_may_be_sent_again(zimage):
    adapter = zimage.adapter()
    assert zimage.update(adapter, update_id="again", lora_rank=5).status_code == 400
    assert zimage.update(adapter, update_id="again").status_code == 200
    zimage.holds(zimage.expect(adapter))


def test_the_stock_serializer_of_a_trainer_with_sglang_is_read(zimage, tmp_path):
    """What today's trainers send: sglang's own bucket and pickler, from another process."""
    import subprocess
    import sys

    from support.server import environment

    adapter = zimage.adapter()
    torch.save(lora.named(adapter), tmp_path / "adapter.pt")
    script = """
import json, sys, torch
torch.multiprocessing.set_sharing_strategy("file_system")
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
import httpx
bucket = FlattenedTensorBucket(named_tensors=torch.load(sys.argv[1]))
content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
body = {"serialized_named_tensors": [MultiprocessingSerializer.serialize({"transformer": content}, output_str=True)],
        "load_format": "flattened_bucket", "target_modules": ["transformer"], "weight_update_mode": "lora_merge",
        "lora_alpha": 6, "lora_rank": 4}
httpx.post(sys.argv[2] + "/update_weights_from_tensor", json=body, timeout=60).raise_for_status()
"""
    url = str(zimage.server.client.base_url)
    with (tmp_path / "sender.log").open("wb") as log:
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "adapter.pt"), url], check=True, stdout=log,
                       stderr=log, stdin=subprocess.DEVNULL, env=environment())  # fmt: skip
    zimage.holds(zimage.expect(adapter))


def test_two_modules_go_live_together_or_not_at_all(sd3):
    """Any module with linear layers is a target; here the T5 encoder beside the transformer."""
    adapter = sd3.adapter()
    layer = "encoder.block.0.layer.0.SelfAttention.o"
    wrong = {"transformer": lora.named(adapter), "text_encoder_3": [(f"{layer}.lora_A", torch.zeros(4, 8))]}
    checksum = sd3.checksum()
    payload, sd3.sent = pack(wrong)
    answer = sd3.send(sd3.fields(adapter) | {"serialized_named_tensors": [payload], "target_modules": list(wrong)})
    assert answer.status_code == 400
    assert "text_encoder_3" in answer.json()["message"]
    assert sd3.checksum() == checksum


def test_the_apps_schema_describes_our_route_and_not_the_one_behind_it(zimage):
    described = zimage.server.client.get("/openapi.json").json()["paths"]["/update_weights_from_tensor"]["post"]
    body = described["requestBody"]["content"]["application/json"]["schema"]
    assert "layer_scaling" in body["properties"]
    assert {"200", "400", "409", "503"} <= described["responses"].keys()
