"""Every state that sglang can be in on a CPU, each with an update, a generation, the checker and a reset.

The states that need CUDA (asleep, parked on the host, streamed layer by layer) are in tests/gpu/test_states_gpu.py.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from support import lora, server

ONE, TWO = ("--num-gpus", "1"), ("--num-gpus", "2")


@dataclass(frozen=True)
class State:
    """How an engine gets into a state, and what is different in it.

    Attributes:
        sglang_adapter: sglang has wrapped the layers for an adapter of its own, at its start or by a route, which was
            then taken out again.
        shared: the fixture of the engine that other tests have in this state too.
    """

    arguments: tuple[str, ...]
    merge_mode: str = "merge"
    sglang_adapter: str = ""
    shared: str = ""


STATES = {
    "plain": State(ONE, shared="zimage_session"),
    "tp 2": State((*TWO, "--tp-size", "2"), shared="tp2_session"),
    "FSDP inference": State((*TWO, "--use-fsdp-inference", "true")),
    "dynamic": State((*ONE, "--lora-merge-mode", "dynamic"), "dynamic"),
    "dynamic, tp 2": State((*TWO, "--tp-size", "2", "--lora-merge-mode", "dynamic"), "dynamic"),
    "after --lora-path": State(ONE, sglang_adapter="start"),
    "after set_lora": State(ONE, sglang_adapter="route"),
}


@pytest.fixture(scope="module")
def sglang_adapter(zimage_checkpoint, tmp_path_factory):
    """An adapter folder as sglang loads it."""
    folder = tmp_path_factory.mktemp("adapter")
    layers = lora.layers(lora.base_weights(zimage_checkpoint), ("to_out.0", "w2"))
    tensors = {f"{name}.weight": tensor for name, tensor in lora.named(lora.random_adapter(layers, seed=99))}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4, "peft_type": "LORA"}))
    return folder


SLOW = ("dynamic, tp 2", "after --lora-path")  # others are like them, but for one thing
CELLS = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW), id=name) for name in STATES]


@pytest.fixture(scope="module", params=CELLS)
def entered(request, serve_zimage, sglang_adapter):
    """The state, and an engine in it."""
    state = STATES[request.param]
    if state.sglang_adapter and server.before_0_5_23():
        pytest.skip("sglang 0.5.21 and 0.5.22 load no adapter of their own on a CPU: torch.cpu.empty_cache")
    if state.shared:
        yield state, request.getfixturevalue(state.shared)
        return
    at_start = ("--lora-path", str(sglang_adapter)) if state.sglang_adapter == "start" else ()
    with serve_zimage(*state.arguments, *at_start, OMP_NUM_THREADS="1") as engine:
        if state.sglang_adapter == "route":
            body = {"lora_nickname": "own", "lora_path": str(sglang_adapter)}
            assert engine.server.post("/v1/set_lora", body).status_code == 200
        if state.sglang_adapter:
            refused = engine.update(engine.adapter())
            assert (refused.status_code, "unmerge_lora_weights" in refused.json()["message"]) == (409, True)
            assert engine.server.post("/v1/unmerge_lora_weights").status_code == 200
        yield state, engine


@pytest.fixture
def state(entered):
    entered[1].reset()
    return entered[0]


@pytest.fixture
def engine(entered):
    return entered[1]


def pixels(image):
    return np.asarray(Image.open(io.BytesIO(image)), dtype=np.float64)


def test_update(state, engine):
    answer = engine.update(engine.adapter(seed=1), weight_version="1").json()
    assert answer["success"] is True, answer
    assert (answer["merge_mode"], answer["layers"]) == (state.merge_mode, len(engine.targets))
    module = engine.status()["modules"]["transformer"]
    assert (module["state"], module["weight_version"]) == ({"merge": "merged"}.get(state.merge_mode, "dynamic"), "1")
    assert (answer["rounding_loss"] is None) == (state.merge_mode == "dynamic")


def test_generate(state, engine, zimage):
    """The image is the one that a plain engine gives; where sums are made in another order, nearly so."""
    base = engine.server.image()
    images = []
    for _ in range(2):
        assert engine.update(engine.adapter(seed=1)).status_code == 200
        images.append(engine.server.image())
    assert images[0] == images[1] != base
    zimage.update(zimage.adapter(seed=1))
    expected, found, before = (pixels(image) for image in (zimage.server.image(), images[0], base))
    assert np.abs(found - expected).mean() < 0.2 * np.abs(found - before).mean()


def test_checker(state, engine):
    adapter = engine.adapter(seed=2)
    assert engine.update(adapter).status_code == 200
    engine.verified(lora.merged(engine.targets, adapter, 1.5, engine.merge))
    half = {layer: pair for layer, pair in engine.adapter(seed=3).items() if "layers.1" in layer}
    assert engine.update(half, update_id="half").status_code == 200
    engine.verified(lora.merged(engine.targets, half, 1.5, engine.merge))


def test_reset(state, engine):
    base = engine.server.image()
    weights = engine.testhook("weights", module="transformer")
    assert engine.update(engine.adapter(seed=4)).status_code == 200
    engine.server.image()
    engine.reset()
    assert engine.testhook("weights", module="transformer") == weights
    assert engine.server.image() == base
    engine.verified(engine.targets)
    back = engine.server.post("/lora_merge/rollback")
    assert back.status_code == 200, back.text
    engine.verified(lora.merged(engine.targets, engine.adapter(seed=4), 1.5, engine.merge))


def test_a_refused_update_changes_nothing(state, engine):
    assert engine.update(engine.adapter(seed=5), weight_version="good").status_code == 200
    weights, image = engine.testhook("weights", module="transformer"), engine.server.image()
    layer, (a, b) = next(iter(engine.adapter(seed=6).items()))
    answer = engine.update([(f"{layer}.lora_A", a), (f"{layer}.lora_B", b), ("layers.0.nothing.lora_A", a)])
    assert answer.status_code == 400
    assert (engine.testhook("weights", module="transformer"), engine.server.image()) == (weights, image)
