"""Whatever changes the base between updates of ours: W0 is what it should be."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import lora, server


def moved(targets, by=0.25):
    """Another base: every target weight shifted."""
    return {layer: (weight.float() + by).to(weight.dtype) for layer, weight in targets.items()}


def full_update(engine, weights, **fields):
    tensors = [(f"{layer}.weight", weight) for layer, weight in weights.items()]
    return engine.update(tensors, weight_update_mode=None, lora_alpha=None, lora_rank=None, **fields)


def base_of(engine):
    """What the status calls the base."""
    return engine.status()["modules"]["transformer"]["base"]


def says_its_base(answer, base):
    """Whether the answer to an update, or to a commit, has the base as a field and at the end of its message."""
    told = f"; transformer's base weights are {base}, not those that the engine started with"
    return answer["modules"]["transformer"]["base"] == base and answer["message"].endswith(told)


def test_fault_08_a_full_update_after_a_lora_update_reaches_every_layer(zimage):
    """M7: LoRA, full weights, LoRA again: the new base is the base, and reset gives it back."""
    try:
        zimage.update(zimage.adapter(seed=1))
        new_base = moved(zimage.targets)
        answer = full_update(zimage, new_base, weight_version="full-2")
        assert answer.status_code == 200, answer.text
        zimage.holds(lora.checksums(zimage.to_engine(new_base)))
        module = zimage.status()["modules"]["transformer"]
        assert (module["state"], module["weight_version"], module["base_store_bytes"]) == ("base", "full-2", 0)
        adapter = zimage.adapter(seed=2)
        assert says_its_base(zimage.update(adapter).json(), "full weights, version 'full-2'")
        zimage.holds(lora.checksums(zimage.to_engine(lora.merged(new_base, adapter, 1.5, zimage.merge))))
        zimage.update(zimage.adapter(seed=3), update_id="on another base", commit=False)
        committed = zimage.server.post("/lora_merge/commit", {"update_id": "on another base"}).json()
        assert says_its_base(committed, "full weights, version 'full-2'")
        assert zimage.server.post("/lora_merge/rollback").status_code == 200
        zimage.reset()
        zimage.holds(lora.checksums(zimage.to_engine(new_base)))
        assert base_of(zimage) == "full weights, version 'full-2'"
    finally:
        full_update(zimage, zimage.targets)


def test_a_partial_full_update_leaves_the_base_in_the_layers_it_does_not_name(zimage):
    try:
        zimage.update(zimage.adapter(seed=1))
        some = {layer: weight for layer, weight in moved(zimage.targets).items() if "layers.1" in layer}
        assert full_update(zimage, some).status_code == 200
        assert base_of(zimage) == "full weights"
        zimage.holds(lora.checksums(zimage.to_engine(zimage.targets | some)))
    finally:
        full_update(zimage, zimage.targets)


def test_a_full_update_that_fails_leaves_the_base_where_it_did_not_write(zimage):
    """A bad shape in sglang's own path: no adapter is left behind, and the answer tells."""
    full_update(zimage, zimage.targets, weight_version="whole")
    zimage.update(zimage.adapter(seed=1))
    answer = zimage.update(
        [("layers.1.feed_forward.w2.weight", torch.ones(3, 3))],
        weight_update_mode=None,
        lora_alpha=None,
        lora_rank=None,
        weight_version="half",
    )
    assert answer.status_code == 400
    assert "Failed to update module 'transformer'" in answer.json()["message"]
    zimage.holds(lora.checksums(zimage.to_engine(zimage.targets)))
    assert zimage.status()["modules"]["transformer"]["state"] == "base"
    assert base_of(zimage) == "full weights"
    assert says_its_base(zimage.update(zimage.adapter(seed=1)).json(), "full weights")


def test_an_update_from_disk_is_the_new_base(zimage, tmp_path):
    adapter = zimage.adapter(seed=1)
    named = zimage.fields(adapter, weight_version="1", update_id="before the new base")
    assert zimage.send(named).status_code == 200
    other = tmp_path / "other"
    shutil.copytree(zimage.checkpoint, other)
    file = other / "transformer" / "diffusion_pytorch_model.safetensors"
    new_base = moved(zimage.targets)
    save_file(load_file(file) | {f"{layer}.weight": weight for layer, weight in new_base.items()}, file)
    body = {"model_path": str(other), "target_modules": ["transformer"]}
    try:
        assert zimage.server.post("/update_weights_from_disk", body).status_code == 200
        zimage.holds(lora.checksums(zimage.to_engine(new_base)))
        assert zimage.status()["modules"]["transformer"]["state"] == "base"
        assert zimage.status()["updates"][-1]["state"] == "reset"
        again = zimage.send(named)
        assert again.status_code == 409
        assert "sglang has put other weights into its modules" in again.json()["message"]
        assert says_its_base(zimage.update(adapter).json(), "loaded from disk")
        zimage.holds(lora.checksums(zimage.to_engine(lora.merged(new_base, adapter, 1.5, zimage.merge))))
    finally:
        body["model_path"] = str(zimage.checkpoint)
        assert zimage.server.post("/update_weights_from_disk", body).status_code == 200
    zimage.holds(lora.checksums(zimage.to_engine(zimage.targets)))


def test_conditioning_caches_follow_an_update(zimage):
    """The same prompt before and after: the second image is the new policy's, and the third the old one's again."""
    first = zimage.server.image("a dog")
    zimage.update(zimage.adapter(seed=5))
    second = zimage.server.image("a dog")
    zimage.reset()
    assert first != second
    assert zimage.server.image("a dog") == first


@pytest.fixture
def own_adapter(sd3_of_its_own, tmp_path):
    """An adapter folder that sglang itself can load, of one layer."""
    layer, (a, b) = next(iter(sd3_of_its_own.adapter(seed=2).items()))
    save_file({f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4, "peft_type": "LORA"}))
    return tmp_path


def wrapped(checksums):
    """The names that sglang's parameters have once it has wrapped their layers."""
    return {name.replace(".weight", ".base_layer.weight"): checksum for name, checksum in checksums.items()}


@pytest.mark.skipif(
    server.before_0_5_23(),
    reason="sglang 0.5.21 and 0.5.22 load no adapter of their own on a CPU: torch.cpu.empty_cache",
)
def test_an_adapter_of_sglangs_own_before_and_after_ours(sd3_of_its_own, own_adapter):
    """``/v1/set_lora`` starts from W0, not from W', and keeps ours out while it is in force."""
    sd3 = sd3_of_its_own
    base = lora.checksums(sd3.to_engine(sd3.targets))
    answer = sd3.update(sd3.adapter(seed=1), weight_version="ours").json()
    assert answer["modules"]["transformer"]["base"] == "loaded"
    assert answer["message"] == f"{len(sd3.targets)} LoRA layers are live in transformer"

    missing = sd3.server.post("/v1/set_lora", {"lora_nickname": "own", "lora_path": str(own_adapter / "nothing")})
    assert missing.status_code == 500
    assert sd3.status()["modules"]["transformer"]["weight_version"] == "ours"
    sd3.holds(wrapped(sd3.expect(sd3.adapter(seed=1))))

    answer = sd3.server.post("/v1/set_lora", {"lora_nickname": "own", "lora_path": str(own_adapter)})
    assert answer.status_code == 200, answer.text
    assert (sd3.status()["modules"]["transformer"]["state"], base_of(sd3)) == ("base", "loaded")
    assert "an adapter of sglang's own replaces weight_version 'ours'" in sd3.server.log.read_text()
    refused = sd3.update(sd3.adapter(seed=1))
    assert refused.status_code == 409
    assert "set_lora" in refused.json()["message"]

    assert sd3.server.post("/v1/unmerge_lora_weights").status_code == 200
    sd3.holds(wrapped(base))
    adapter = sd3.adapter(seed=3)
    assert sd3.update(adapter).status_code == 200
    sd3.holds(wrapped(sd3.expect(adapter)))
    assert sd3.server.post("/v1/merge_lora_weights").status_code == 200  # sglang's own again: it too starts from W0
    assert sd3.server.post("/v1/unmerge_lora_weights").status_code == 200
    sd3.holds(wrapped(base))


def test_fault_11_sglangs_lora_routes_know_what_is_live(zimage):
    def listed():
        return zimage.server.client.get("/v1/list_loras").json()

    assert listed()["active"] == {}
    zimage.update(zimage.adapter(seed=1), weight_version="7")
    (active,) = listed()["active"]["transformer"]
    assert (active["nickname"], active["merged"], active["weight_version"]) == ("default", True, "7")
    assert listed()["loaded_adapters"] == [{"nickname": "default", "path": None}]

    if not server.before_0_5_23():  # the others need torch.cpu.empty_cache for it
        assert zimage.server.post("/v1/merge_lora_weights").status_code == 200  # nothing of sglang's own: ours stays
    zimage.holds(zimage.expect(zimage.adapter(seed=1)))

    assert zimage.server.post("/v1/unmerge_lora_weights").status_code == 200
    zimage.holds(lora.checksums(zimage.to_engine(zimage.targets)))
    assert listed()["active"] == {}
    assert zimage.status()["modules"]["transformer"]["state"] == "base"
    assert zimage.server.post("/lora_merge/rollback").status_code == 200
    zimage.holds(zimage.expect(zimage.adapter(seed=1)))


def test_an_engine_that_cannot_go_to_sleep_keeps_what_is_live(zimage):
    """Sleep needs CUDA: the release fails here, after W0 went back into the parameters. Asleep: tests/gpu."""
    adapter = zimage.adapter(seed=1)
    zimage.update(adapter, weight_version="7")
    weights, image = zimage.testhook("weights", module="transformer"), zimage.server.image()
    assert zimage.server.post("/release_memory_occupation").status_code == 500
    assert (zimage.testhook("weights", module="transformer"), zimage.server.image()) == (weights, image)
    status = zimage.status()
    assert (status["sleeping"], status["modules"]["transformer"]["weight_version"]) == (False, "7")
    zimage.reset()
    zimage.holds(lora.checksums(zimage.to_engine(zimage.targets)))


def test_buckets_that_were_staged_before_a_sleep_are_gone(zimage):
    """The sender hears of it with its next bucket; the engine does not go live with half an update."""
    adapter = zimage.adapter(seed=1)
    half = {layer: pair for layer, pair in adapter.items() if "layers.0" in layer}
    rest = {layer: pair for layer, pair in adapter.items() if layer not in half}
    place = {"update_id": "sleeper", "num_buckets": 2}
    assert zimage.update(half, bucket_index=0, **place).status_code == 200
    zimage.server.post("/release_memory_occupation")
    answer = zimage.update(rest, bucket_index=1, **place)
    assert answer.status_code == 409
    assert "the engine went to sleep" in answer.json()["message"]
    zimage.holds(lora.checksums(zimage.to_engine(zimage.targets)))
