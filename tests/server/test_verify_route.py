"""The verify route: fused sections, shards, checksums and samples in the sender's names."""

from __future__ import annotations

import pytest
import torch

from sgld_lora_merge.merge.kernels import word_sum
from support import lora


def verify(engine, layers, module="transformer"):
    return engine.server.post("/lora_merge/verify", {"modules": {module: layers}})


def expected(engine, adapter):
    return lora.merged(engine.targets, adapter, 1.5, engine.merge)


def weight_sum(weight):
    """Computed by the definition: each element a word."""
    total = int(word_sum(weight.view(torch.int16).to(torch.int64).flatten())) % 2**64
    return f"el64:bfloat16:{weight.shape[0]}x{weight.shape[1]}:{total:016x}"


@pytest.fixture(params=["zimage", "tp2"])
def engine(request):
    return request.getfixturevalue(request.param)


def test_i6_every_layer_by_checksum(engine):
    adapter = engine.adapter()
    engine.update(adapter)
    layers = {layer: {"sha256": lora.sha256(weight)} for layer, weight in expected(engine, adapter).items()}
    answer = verify(engine, layers).json()
    assert answer == {"success": True, "message": "all 14 layers are what they should be", "mismatched": [],
                      "checked": 14, "ignored_fields": []}  # fmt: skip


def test_a_layer_that_is_not_what_it_should_be_is_named(engine):
    adapter = engine.adapter()
    engine.update(adapter)
    layers = {layer: {"sha256": lora.sha256(weight)} for layer, weight in expected(engine, adapter).items()}
    layers["layers.0.attention.to_k"]["sha256"] = lora.sha256(torch.zeros(64, 64))
    answer = verify(engine, layers)
    assert answer.status_code == 200
    assert answer.json()["success"] is False
    assert answer.json()["mismatched"] == ["transformer.layers.0.attention.to_k"]


def test_samples_within_their_ulps(engine):
    adapter = engine.adapter()
    engine.update(adapter)
    layers = {}
    for layer, weight in expected(engine, adapter).items():
        picks = [(0, 0), (weight.shape[0] - 1, weight.shape[1] - 1), (weight.shape[0] // 2, 3)]
        layers[layer] = {"samples": [[row, column, float(weight[row, column]), 1] for row, column in picks]}
    assert verify(engine, layers).json()["success"] is True
    layers["layers.1.feed_forward.w2"]["samples"][1][2] += 1.0
    assert verify(engine, layers).json()["mismatched"] == ["transformer.layers.1.feed_forward.w2"]


def test_a_convolution_by_its_checksum_in_the_shape_of_its_checkpoint(sd3):
    """The patch embedding, [64, 16, 2, 2]; sample columns are those of the weight flattened to two dimensions."""
    weight = lora.base_weights(sd3.checkpoint)["pos_embed.proj.weight"]
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).bfloat16() for shape in ((4, 16, 2, 2), (64, 4, 1, 1)))
    answer = sd3.update([("pos_embed.proj.lora_A", a), ("pos_embed.proj.lora_B", b)])
    assert answer.status_code == 200, answer.text
    merged = lora.merge_fp16(weight.flatten(1), a.flatten(1), b.flatten(1), 1.5)
    sd3.holds({"pos_embed.proj.weight": lora.sha256(merged.view_as(weight))})
    for what in ({"sha256": lora.sha256(merged.view_as(weight))}, {"samples": [[63, 37, float(merged[63, 37]), 0]]}):
        assert verify(sd3, {"pos_embed.proj": what}).json()["success"] is True
    assert verify(sd3, {"pos_embed.proj": {"sha256": lora.sha256(merged)}}).json()["success"] is False


def test_samples_outside_a_layer_are_wrong(zimage):
    answer = verify(zimage, {"layers.0.attention.to_q": {"samples": [[64, 0, 0.0, 1e9]]}})
    assert answer.json()["mismatched"] == ["transformer.layers.0.attention.to_q"]


def test_the_base_that_merges_start_from_can_be_verified_while_an_adapter_is_live(engine):
    """Whether the engine's W0 is the trainer's: of layers that are merged into, and of those that are not."""
    half = {layer: pair for layer, pair in engine.adapter().items() if "layers.0" in layer}
    engine.update(half)
    layers = {layer: {"sha256": lora.sha256(weight)} for layer, weight in engine.targets.items()}
    body = {"modules": {"transformer": layers}, "weights": "base"}
    assert engine.server.post("/lora_merge/verify", body).json()["success"] is True
    assert verify(engine, layers).json()["success"] is False
    sums = {layer: {"weight_sum": weight_sum(weight)} for layer, weight in engine.targets.items()}
    assert engine.server.post("/lora_merge/verify", body | {"modules": {"transformer": sums}}).json()["success"] is True
    touched = [f"transformer.{layer}" for layer in sorted(half)]
    assert sorted(verify(engine, sums).json()["mismatched"]) == touched
    sums["layers.0.attention.to_q"]["weight_sum"] = weight_sum(torch.zeros(2, 2))
    answer = engine.server.post("/lora_merge/verify", body | {"modules": {"transformer": sums}})
    assert answer.json()["mismatched"] == ["transformer.layers.0.attention.to_q"]
    refused = verify(engine, {"layers.0.attention.to_q": {"weight_sum": "sm64:1:0"}})
    assert refused.status_code == 400
    assert "no sum of a weight" in refused.json()["message"]


def test_peft_names_are_understood(zimage):
    name = "layers.0.attention.to_q"
    layers = {f"base_model.model.{name}": {"sha256": lora.sha256(zimage.targets[name])}}
    assert verify(zimage, layers).json()["success"] is True


@pytest.mark.parametrize(
    ("modules", "status", "named"),
    [
        ({"transformer": {"layers.9.x": {"sha256": ""}}}, 400, "layers.9.x"),
        ({"transformer_2": {"x": {"sha256": ""}}}, 400, "transformer_2"),
        ({"transformer": {"layers.0.attention_norm1": {"sha256": ""}}}, 400, "not a linear layer"),
        ({"transformer": {"x": {}}}, 400, "needs one of sha256, samples, weight_sum"),
        ({"transformer": {"x": {"sha256": "", "samples": []}}}, 400, "needs one of sha256, samples, weight_sum"),
        ({}, 400, "names no layer"),
        ({"transformer": {"x": {"sha": ""}}}, 422, "sha"),
        ({"transformer": {"x": {"samples": [[0, 0, "1", 1]]}}}, 422, "samples"),
        (None, 400, "modules is required"),
    ],
)
def test_what_cannot_be_verified_is_refused_by_name(zimage, modules, status, named):
    answer = zimage.server.post("/lora_merge/verify", {} if modules is None else {"modules": modules})
    assert answer.status_code == status
    assert named in answer.json()["message"]


def test_metrics_tell_what_happened(zimage):
    zimage.update(zimage.adapter(), weight_version="7")
    zimage.update(zimage.adapter(), lora_rank=9)
    answer = zimage.server.client.get("/lora_merge/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    for line in (
        'sgld_lora_weight_version_info{module="transformer",version="7"} 1.0',
        'sgld_lora_layers{module="transformer"} 14.0',
        "sgld_lora_failed 0.0",
        "sgld_lora_updates_total ",
        'sgld_lora_failures_total{reason="request"} ',
        'sgld_lora_stage_seconds_total{stage="merge"} ',
    ):
        assert line in answer.text
