"""tp 2 over gloo: shards rank by rank, and ranks that fail alone."""

from __future__ import annotations

import json
import time

import httpx
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from sgld_lora_merge import pack
from sgld_lora_merge.cli import app
from support import lora


def shards(engine, adapter, scale=1.5):
    """Checksums by rank of every parameter that the adapter touches, computed from slices of A and B."""
    ranks = []
    for rank in range(2):
        weights = {}
        for layer, weight in engine.targets.items():
            row_parallel = layer.endswith(("to_out.0", "w2"))
            out, inner = (
                (weight.shape[0], weight.shape[1] // 2) if row_parallel else (weight.shape[0] // 2, weight.shape[1])
            )
            rows = slice(None) if row_parallel else slice(rank * out, (rank + 1) * out)
            cols = slice(rank * inner, (rank + 1) * inner) if row_parallel else slice(None)
            shard = weight[rows, cols]
            if layer in adapter:
                a, b = adapter[layer]
                shard = lora.merge_fp32(shard, a[:, cols], b[rows], scale)
            weights[layer] = shard
        ranks.append(lora.checksums(engine.to_engine(weights)))
    return ranks


def live(engine):
    return [
        {name: weight["sha256"] for name, weight in rank.items()}
        for rank in engine.testhook("weights", module="transformer")
    ]


def holds(engine, adapter):
    for rank, (expected, found) in enumerate(zip(shards(engine, adapter), live(engine), strict=True)):
        wrong = [name for name, checksum in expected.items() if found[name] != checksum]
        assert not wrong, f"rank {rank}: {wrong}"


def two_payloads(engine, adapter, second=None):
    """A body with one payload for each rank; the second one may be something else."""
    body = engine.fields(adapter)
    payload, buffers = pack({"transformer": lora.named(adapter)})
    engine.sent += buffers
    return body | {"serialized_named_tensors": [*body["serialized_named_tensors"], second or payload]}


def test_f1_every_rank_holds_its_own_shard_of_every_section(tp2):
    """Fused qkv and w13 by rows, to_out and w2 by columns; one CPU payload for both ranks."""
    before = tp2.server.image()
    adapter = tp2.adapter()
    answer = tp2.update(adapter, weight_version="1").json()
    assert answer["success"] is True, answer
    assert answer["payload_opened"] == [True, True]
    assert answer["layers"] == len(adapter)
    holds(tp2, adapter)
    assert tp2.server.image() != before


def test_the_rounding_loss_is_that_of_the_whole_weights(tp2, zimage):
    adapter = tp2.adapter()
    one, two = zimage.update(adapter).json(), tp2.update(adapter).json()
    assert two["rounding_loss"] == pytest.approx(one["rounding_loss"], rel=1e-3)


def test_one_payload_for_each_rank(tp2):
    adapter = tp2.adapter()
    assert tp2.send(two_payloads(tp2, adapter)).status_code == 200
    holds(tp2, adapter)


def test_the_command_line_sees_whole_layers_and_hands_over_to_every_rank(tp2, tmp_path):
    adapter = tp2.adapter()
    save_file(dict(lora.named(adapter)), tmp_path / "adapter.safetensors")
    words = ["push", str(tp2.server.client.base_url), tmp_path / "adapter.safetensors", "--alpha", "6"]
    words += ["--ipc", "--verify", "--base", tp2.checkpoint]
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["payload_opened"] == [True, True]
    holds(tp2, adapter)


def test_sections_and_reset(tp2):
    everything = tp2.adapter(seed=1)
    no_k = {layer: pair for layer, pair in tp2.adapter(seed=2).items() if not layer.endswith("to_k")}
    base = live(tp2)
    tp2.update(everything)
    tp2.update(no_k)
    holds(tp2, everything | no_k)
    tp2.update(no_k, update_id="no k")
    holds(tp2, no_k)
    tp2.reset()
    assert live(tp2) == base


def test_fault_06_garbage_for_rank_1_is_an_error_and_no_rank_changes(tp2):
    tp2.update(tp2.adapter(seed=1), weight_version="good")
    before, image = live(tp2), tp2.server.image()
    started = time.monotonic()
    answer = tp2.send(two_payloads(tp2, tp2.adapter(seed=2), second="Z2FyYmFnZQ=="))
    assert time.monotonic() - started < 10
    assert answer.status_code == 400
    assert "rank 1: the payload is not a readable pickle" in answer.json()["message"]
    assert "weight_version 'good'" in answer.json()["message"]
    assert answer.json()["payload_opened"] == [True, False]
    assert (live(tp2), tp2.server.image()) == (before, image)


def one_bit(tensor):
    changed = tensor.clone()
    changed.view(torch.int32)[0, 0] ^= 1
    return changed


def lacks(adapter):
    return {layer: pair for layer, pair in adapter.items() if not layer.endswith("to_k")}


def other_value(adapter):
    layer, (a, b) = next(iter(adapter.items()))
    return adapter | {layer: (a, one_bit(b))}


DIFFERENT = {
    "a layer less": (lacks, "rank 0 was sent a pair for 'layers.0.attention.to_k', rank 1 was not"),
    "one bit of one B": (other_value, "rank 1 was sent another lora_B for"),
    "another dtype": (
        lambda adapter: {layer: (a.float(), b.float()) for layer, (a, b) in adapter.items()},
        "rank 1 was sent another lora_A and lora_B for",
    ),
    "another alpha": (
        lambda adapter: [*lora.named(adapter), ("layers.0.attention.to_k.alpha", torch.tensor(8.0))],
        "rank 1 was sent another scale for 'layers.0.attention.to_k' than rank 0: 2.0 instead of 1.5",
    ),
}


@pytest.mark.parametrize("staged", [False, True], ids=["live", "staged"])
@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_were_sent_different_updates_refuse_them(tp2, case, staged, request):
    change, told = DIFFERENT[case]
    adapter = tp2.adapter(seed=2)
    tp2.update(tp2.adapter(seed=1), weight_version="good")
    before, image = live(tp2), tp2.server.image()
    other = change(adapter)
    payload, buffers = pack({"transformer": lora.named(other) if isinstance(other, dict) else other})
    body = two_payloads(tp2, adapter, second=payload)
    if staged:
        body |= {"update_id": request.node.name, "bucket_index": 0, "num_buckets": 2}
    answer = tp2.send(body)
    assert buffers
    assert answer.status_code == 400
    assert "the ranks were sent different updates" in answer.json()["message"]
    assert told in answer.json()["message"]
    assert (live(tp2), tp2.server.image()) == (before, image)
    assert tp2.status()["modules"]["transformer"]["weight_version"] == "good"


def test_the_same_update_in_two_packings_is_one_update(tp2):
    """With text for a layout on one rank, and in another order on the other."""
    adapter = tp2.adapter()
    payload, buffers = pack({"transformer": lora.named(adapter)[::-1]}, compact=True)
    assert tp2.send(two_payloads(tp2, adapter, second=payload)).status_code == 200
    assert buffers
    holds(tp2, adapter)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", ["verify", "compare"])
def test_a_rank_that_raises_while_it_verifies_is_an_answer_and_the_engine_goes_on(tp2, rank, stage):
    adapter = tp2.adapter(seed=1)
    tp2.update(adapter)
    merged = lora.merged(tp2.targets, adapter, 1.5, tp2.merge)
    layers = {layer: {"sha256": lora.sha256(weight)} for layer, weight in merged.items()}
    layers |= {layer: {"samples": [[0, 0, float(merged[layer][0, 0]), 1.0]]} for layer in list(layers)[:2]}
    if (stage, rank) == ("compare", 1):
        pytest.skip("the first rank compares")
    tp2.testhook("fail", rank=rank, stage=stage)
    started = time.monotonic()
    answer = tp2.server.post("/lora_merge/verify", {"modules": {"transformer": layers}})
    assert time.monotonic() - started < 20
    assert answer.status_code == 500
    assert f"injected at {stage}" in answer.json()["message"]
    again = tp2.server.post("/lora_merge/verify", {"modules": {"transformer": layers}})
    assert again.json()["success"] is True, again.text
    assert tp2.server.client.get("/health").status_code == 200


def test_what_is_wrong_on_every_rank_is_said_once(tp2):
    message = tp2.update(tp2.adapter(), lora_rank=5).json()["message"]
    assert message.count("'layers.0.attention.to_k' has rank 4") == 1
    assert "rank 1:" not in message


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", ["before_plan", "plan", "commit"])
def test_fault_07_a_rank_that_raises_is_an_error_and_no_rank_changes(tp2, rank, stage):
    tp2.update(tp2.adapter(seed=1), weight_version="good")
    before, image = live(tp2), tp2.server.image()
    tp2.testhook("fail", rank=rank, stage=stage)
    answer = tp2.update(tp2.adapter(seed=2), weight_version="bad")
    assert answer.status_code == 500
    assert f"rank {rank}: RuntimeError: injected at {stage}" in answer.json()["message"]
    assert (live(tp2), tp2.server.image()) == (before, image)
    assert tp2.status()["modules"]["transformer"]["weight_version"] == "good"
    assert tp2.update(tp2.adapter(seed=3)).status_code == 200
    holds(tp2, tp2.adapter(seed=3))


def test_an_overflow_on_one_rank_is_undone_on_both(tp2):
    """Only rows of rank 1's shard overflow; rank 0 has nothing to complain of."""
    tp2.update(tp2.adapter(seed=1))
    before = live(tp2)
    a, b = torch.ones(4, 64), torch.zeros(64, 4)
    b[40] = 3e38
    answer = tp2.update({"layers.0.attention.to_q": (a, b)})
    assert answer.status_code == 400
    assert "rank 1: transformer: 64 elements of the merged weight are not finite" in answer.json()["message"]
    assert live(tp2) == before


def test_a_full_update_with_garbage_for_one_rank_answers_and_changes_no_rank(tp2):
    """sglang's own path: it opens the payload on every rank before any rank writes; it neither hangs nor says 200."""
    tp2.update(tp2.adapter(seed=1), weight_version="good")
    before = live(tp2)
    weights = [(f"{layer}.weight", weight + 1) for layer, weight in tp2.targets.items()]
    body = tp2.fields(weights, weight_update_mode=None, lora_alpha=None, lora_rank=None)
    body["serialized_named_tensors"] = [*body["serialized_named_tensors"], "Z2FyYmFnZQ=="]
    answer = tp2.send(body)
    assert answer.status_code == 400
    assert "rank 1: the payload is not a readable pickle" in answer.json()["message"]
    assert answer.json()["payload_opened"] == [True, False]
    assert live(tp2) == before


def test_a_full_update_over_two_ranks(tp2):
    """M7 with shards: the new base is the base on both ranks."""
    moved = {layer: (weight.float() + 0.25).to(weight.dtype) for layer, weight in tp2.targets.items()}

    def push(weights):
        tensors = [(f"{layer}.weight", weight) for layer, weight in weights.items()]
        answer = tp2.update(tensors, weight_update_mode=None, lora_alpha=None, lora_rank=None)
        assert answer.status_code == 200, answer.text

    base = live(tp2)
    tp2.update(tp2.adapter(seed=1))
    try:
        push(moved)
        assert live(tp2) != base
        assert tp2.status()["modules"]["transformer"]["state"] == "base"
    finally:
        push(tp2.targets)
    assert live(tp2) == base


@pytest.mark.slow  # it needs an engine of its own
def test_weights_that_could_not_be_restored_stop_the_engine(serve_zimage):
    """The last resort: 503 from the update, from generation and from health, with a sentence that says to restart."""
    with serve_zimage("--num-gpus", "2", "--tp-size", "2", OMP_NUM_THREADS="1") as engine:
        engine.testhook("fail", rank=1, stage="revert")
        answer = engine.update(engine.adapter())
        assert answer.status_code == 503
        assert "rank 1: RuntimeError: injected at revert" in answer.json()["message"]
        assert "restart the engine" in answer.json()["message"]
        health = engine.server.client.get("/health")
        assert health.status_code == 503
        assert "restart the engine" in health.text
        with pytest.raises(httpx.HTTPStatusError, match="503"):
            engine.server.image()
        again = engine.update(engine.adapter())
        assert again.status_code == 503
        assert again.json()["success"] is False
        assert engine.status()["modules"]["transformer"]["state"] == "failed"
