"""The states that need CUDA, on the real server: asleep, parked on the host, streamed layer by layer, dynamic.

An update, the checkers, a reset and a rollback in each; no generation, which takes sgl_kernel.
"""

from __future__ import annotations

import pytest
import torch
from test_server_gpu import GpuEngine

from support import lora

pytest.importorskip("sglang")
from support import checkpoints, server

RESIDENT = ("--num-gpus", "1", "--text-encoder-cpu-offload", "false", "--dit-cpu-offload", "false")
STATES = {
    "resident": RESIDENT,
    "parked on the host": (*RESIDENT[:-1], "true"),
    "streamed layer by layer": (*RESIDENT, "--dit-layerwise-offload", "true"),
    "streamed, one layer resident": (
        *RESIDENT,
        "--dit-layerwise-offload",
        "true",
        "--dit-layerwise-resident-layers",
        "1",
    ),
    "dynamic": (*RESIDENT, "--lora-merge-mode", "dynamic"),
    "base weights on the host": RESIDENT,
}


@pytest.fixture(scope="module", params=STATES, ids=str)
def engine(request, tmp_path_factory):
    checkpoint = checkpoints.zimage(tmp_path_factory.mktemp("zimage"))
    folder = tmp_path_factory.mktemp("server")
    store = "host" if request.param == "base weights on the host" else "auto"
    env = {"SGLANG_DIFFUSION_LORA_MERGE_FP32": "1", "SGLD_LORA_BASE_STORE": store}
    with server.running(checkpoint, "Z-Image", folder, arguments=STATES[request.param], env=env) as running:
        engine = GpuEngine(running, checkpoint)
        engine.mode = "dynamic" if request.param == "dynamic" else "merge"
        engine.store = {"resident": "device", "dynamic": None}.get(request.param, "host")
        yield engine


def verified(engine, adapter):
    """Whole layers in the sender's names; in fp32 mode the value does not depend on the device."""
    cpu = {layer: weight.cpu() for layer, weight in engine.targets.items()}
    pairs = {layer: (a.cpu(), b.cpu()) for layer, (a, b) in adapter.items()}
    layers = {
        layer: {"sha256": lora.sha256(weight)}
        for layer, weight in lora.merged(cpu, pairs, 1.5, lora.merge_fp32).items()
    }
    answer = engine.server.post("/lora_merge/verify", {"modules": {"transformer": layers}})
    assert answer.json()["success"] is True, answer.text


def checksum(engine):
    body = {"module_names": ["transformer"]}
    return engine.server.post("/get_weights_checksum", body).json()["transformer"]


def status(engine):
    return engine.server.client.get("/lora_merge/status").json()


def test_update_rollback_and_reset(engine):
    base = checksum(engine)
    first, second = engine.adapter(1), engine.adapter(2)
    for version, adapter in (("1", first), ("2", second)):
        answer = engine.update(adapter, weight_version=version)
        assert answer.status_code == 200, answer.text
        assert answer.json()["merge_mode"] == engine.mode
        verified(engine, adapter)
        assert (checksum(engine) == base) == (engine.mode == "dynamic")
    module = status(engine)["modules"]["transformer"]
    assert module["base_store"] == engine.store
    assert module["base_store_reason"] is None or engine.store is not None
    assert engine.server.post("/lora_merge/rollback").status_code == 200
    verified(engine, first)
    assert engine.server.post("/lora_merge/reset").status_code == 200
    verified(engine, {})
    assert checksum(engine) == base


def test_a_refused_update_changes_nothing(engine):
    assert engine.update(engine.adapter(3)).status_code == 200
    before = checksum(engine)
    assert engine.update(engine.adapter(4), lora_rank=5).status_code == 400
    overflow = dict(engine.adapter(5))
    a, b = overflow["layers.1.feed_forward.w2"]
    overflow["layers.1.feed_forward.w2"] = (torch.ones_like(a), torch.full_like(b, 3e38))
    if engine.mode == "merge":
        assert engine.update(overflow).status_code == 400
    assert checksum(engine) == before
    verified(engine, engine.adapter(3))


def test_asleep_and_awake(engine):
    """Asleep: base weights, no store, no updates. Awake: the weights are byte for byte what they were."""
    adapter = engine.adapter(6)
    assert engine.update(adapter, weight_version="live").status_code == 200
    live = checksum(engine)
    slept = engine.server.post("/release_memory_occupation")
    assert slept.status_code == 200, slept.text
    assert slept.json()["sleeping"] is True
    for route in ("reset", "rollback"):
        assert engine.server.post(f"/lora_merge/{route}").status_code == 409
    refused = engine.update(engine.adapter(7))
    assert refused.status_code == 409
    assert "asleep" in refused.json()["message"]
    asleep = status(engine)
    assert (asleep["sleeping"], asleep["modules"]["transformer"]["base_store_bytes"]) == (True, 0)
    woken = engine.server.post("/resume_memory_occupation")
    assert woken.status_code == 200, woken.text
    assert checksum(engine) == live
    verified(engine, adapter)
    assert status(engine)["modules"]["transformer"]["weight_version"] == "live"
    again = engine.adapter(8)
    assert engine.update(again).status_code == 200
    verified(engine, again)
    assert engine.server.post("/lora_merge/rollback").status_code == 200
    assert checksum(engine) == live
    assert engine.server.post("/lora_merge/reset").status_code == 200
    verified(engine, {})


def test_a_full_update_is_the_new_base(engine):
    """Of layers that are not fused: sglang refuses the others of a module that it streams."""
    assert engine.update(engine.adapter(9)).status_code == 200
    unfused = {layer: weight for layer, weight in engine.targets.items() if layer.endswith(("to_out.0", "w2"))}
    moved = {layer: (weight.float() + 0.25).to(weight.dtype) for layer, weight in unfused.items()}

    def push(weights):
        tensors = [(f"{layer}.weight", weight) for layer, weight in weights.items()]
        return engine.full_update(tensors)

    answer = push(moved)
    assert answer.status_code == 200, answer.text
    targets = engine.targets
    try:
        engine.targets = targets | moved
        verified(engine, {})
        adapter = engine.adapter(10)
        assert engine.update(adapter).status_code == 200
        verified(engine, adapter)
    finally:
        engine.targets = targets
        assert push(unfused).status_code == 200
    verified(engine, {})
