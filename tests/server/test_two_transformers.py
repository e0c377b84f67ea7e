"""Wan2.2's layout: two transformers in one pipeline, updated by one request, in one version, or not at all."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save, save_file
from typer.testing import CliRunner

from sgld_lora_merge import pack
from sgld_lora_merge.adapter.families import load_families
from sgld_lora_merge.cli import app
from support import checkpoints, lora, server
from tests.server.conftest import TESTHOOK

HIGH, LOW = MODULES = ("transformer", "transformer_2")
PREFIXES = {HIGH: "high_noise.", LOW: "low_noise."}
LAYER = "blocks.0.attn1.to_q"

Adapters = dict[str, lora.Adapter]


@dataclass
class Wan:
    """A running engine with two transformers, and what their weights must be."""

    server: server.Server
    checkpoint: Path

    @cached_property
    def targets(self) -> dict[str, lora.Weights]:
        return {m: lora.layers(lora.base_weights(self.checkpoint, m), lora.WAN_SUFFIXES) for m in MODULES}

    def adapters(self, seed: int = 1) -> Adapters:
        """One for each transformer, and no two alike."""
        return {m: lora.random_adapter(self.targets[m], seed=10 * seed + i) for i, m in enumerate(MODULES)}

    def update(self, tensors: dict[str, Any], **fields: Any) -> httpx.Response:
        """Send adapters, or lists of named tensors, by module."""
        named = {m: lora.named(each) if isinstance(each, dict) else each for m, each in tensors.items()}
        payload, self.sent = pack(named)
        body = {
            "serialized_named_tensors": [payload], "load_format": "flattened_bucket", "target_modules": list(named),
            "weight_update_mode": "lora_merge", "lora_alpha": 6, "lora_rank": 4,
        } | fields  # fmt: skip
        return self.server.post("/update_weights_from_tensor", body)

    def upload(self, tensors: list[tuple[str, torch.Tensor]], metadata: Any = None, **query: Any) -> httpx.Response:
        content = save({name: tensor.contiguous() for name, tensor in tensors}, metadata)
        return self.server.client.post("/lora_merge/upload", content=content, params={"lora_alpha": 6} | query)

    def reset(self, *modules: str) -> None:
        answer = self.server.post("/lora_merge/reset", {"target_modules": list(modules)} if modules else None)
        assert answer.status_code == 200, answer.text

    def expected(self, module: str, adapter: lora.Adapter, scale: Any = 1.5) -> lora.Weights:
        return lora.merged(self.targets[module], adapter, scale, lora.merge_fp32)

    def holds(self, adapters: Adapters, scale: Any = 1.5) -> None:
        """The stock checker agrees about every target of both transformers."""
        for module in MODULES:
            weights = lora.engine_wan(self.expected(module, adapters.get(module, {}), scale))
            body = {"target_module": module, "expected_named_tensors_sha256": lora.checksums(weights)}
            answer = self.server.post("/update_weights_from_tensor_checker", body)
            assert answer.status_code == 200, f"{module}: {answer.text}"

    def checksums(self) -> dict[str, str]:
        """The engine's own, over every parameter of each transformer."""
        answer = self.server.post("/get_weights_checksum", {"module_names": list(MODULES)}).json()
        return {module: answer[module] for module in MODULES}

    def weights(self, module: str) -> dict[str, Any]:
        """Checksum, shape and data_ptr of every parameter."""
        return self.server.post("/testhook", {"action": "weights", "module": module}).json()["ranks"][0]

    def status(self) -> dict[str, Any]:
        return self.server.client.get("/lora_merge/status").json()["modules"]


@pytest.fixture(scope="module")
def wan_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wan]:
    family = load_families()["wan2_2"]
    checkpoint = checkpoints.wan2_2(tmp_path_factory.mktemp("wan2_2"))
    folder = tmp_path_factory.mktemp("wan2_2_server")
    model_id = family.model_id.rpartition("/")[2]
    with server.running(checkpoint, model_id, folder, env={"PYTHONPATH": str(TESTHOOK)}) as running:
        for module in MODULES:
            assert f"Loaded {module}: {family.engine_class} (sgl-diffusion version)" in running.log.read_text()
        yield Wan(running, checkpoint)


@pytest.fixture
def wan(wan_session: Wan) -> Wan:
    wan_session.reset()
    return wan_session


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Ids are never used twice."""
    return request.node.name


def prefixed(adapters: Adapters, *modules: str) -> list[tuple[str, torch.Tensor]]:
    """One list, as PEFT names the tensors of a model that holds both transformers."""
    return [
        (f"base_model.model.{PREFIXES[module]}{name}.default.weight", tensor)
        for module in modules or MODULES
        for name, tensor in lora.named(adapters[module])
    ]


def test_one_request_updates_both(wan):
    adapters = wan.adapters()
    answer = wan.update(adapters, weight_version="7")
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert (told["layers"], told["weight_version"], set(told["modules"])) == (40, "7", set(MODULES))
    wan.holds(adapters)
    for module in MODULES:
        status = wan.status()[module]
        assert (status["state"], status["weight_version"], status["layers"]) == ("merged", "7", 20)


def test_the_projections_that_share_one_buffer_are_written_where_they_are(wan):
    """q, k, v of a block are rows of one buffer in sglang 0.5.23, which computes all three from it at once."""
    before = wan.weights(HIGH)
    wan.update({HIGH: wan.adapters()[HIGH]})
    after = wan.weights(HIGH)
    assert {n: each["data_ptr"] for n, each in after.items()} == {n: each["data_ptr"] for n, each in before.items()}
    q, k, v = (after[f"blocks.0.to_{each}.weight"] for each in "qkv")
    nbytes = 64 * 64 * 2
    if not server.before_0_5_23():  # the others keep them apart
        assert (k["data_ptr"] - q["data_ptr"], v["data_ptr"] - k["data_ptr"]) == (nbytes, nbytes)
    changed = {name for name in after if after[name]["sha256"] != before[name]["sha256"]}
    assert changed == set(lora.engine_wan(wan.targets[HIGH]))


def test_q_and_v_of_the_shared_buffer_leave_k_alone(wan):
    some = {layer: pair for layer, pair in wan.adapters()[HIGH].items() if layer.endswith((".to_q", ".to_v"))}
    assert wan.update({HIGH: some}).status_code == 200
    wan.holds({HIGH: some})


def test_a_bad_module_keeps_both_unchanged(wan):
    wan.update(wan.adapters(1), weight_version="good")
    before = wan.checksums()
    bad = wan.adapters(2)
    a, b = bad[LOW][LAYER]
    for broken in ((a * torch.nan, b), (a[:, :-1], b)):
        answer = wan.update(bad | {LOW: bad[LOW] | {LAYER: broken}})
        assert answer.status_code == 400
        assert answer.json()["message"].startswith(f"{LOW}: ")
        assert LAYER in answer.json()["message"]
        assert wan.checksums() == before
    assert wan.status()[HIGH]["weight_version"] == "good"


def test_a_module_that_overflows_takes_the_other_one_back(wan):
    wan.update(wan.adapters(1))
    before = wan.checksums()
    bad = wan.adapters(2)
    bad[LOW][LAYER] = tuple(each.float() * 1e20 for each in bad[LOW][LAYER])
    answer = wan.update(bad)
    assert answer.status_code == 400
    assert f"{LOW}: " in answer.json()["message"]
    assert wan.checksums() == before


def test_an_update_of_one_leaves_the_other(wan):
    first, second = wan.adapters(1), wan.adapters(2)
    wan.update(first, weight_version="1")
    wan.update({LOW: second[LOW]}, weight_version="2", update_id="only the low noise")
    wan.holds({HIGH: first[HIGH], LOW: second[LOW]})
    assert [wan.status()[module]["weight_version"] for module in MODULES] == ["1", "2"]


def test_a_reset_of_one_leaves_the_other(wan):
    adapters = wan.adapters()
    wan.update(adapters, weight_version="1")
    wan.reset(LOW)
    wan.holds({HIGH: adapters[HIGH]})
    assert [wan.status()[module]["state"] for module in MODULES] == ["merged", "base"]


def test_a_rollback_takes_both_back(wan):
    first, second = wan.adapters(1), wan.adapters(2)
    wan.update(first, weight_version="1")
    wan.update(second, weight_version="2")
    assert wan.server.post("/lora_merge/rollback").status_code == 200
    wan.holds(first)
    assert [wan.status()[module]["weight_version"] for module in MODULES] == ["1", "1"]


def test_buckets_of_both_go_live_at_once(wan, name):
    wan.update(wan.adapters(1), weight_version="old")
    before = wan.checksums()
    new = wan.adapters(2)
    half = {m: {layer: pair for layer, pair in each.items() if "blocks.0" in layer} for m, each in new.items()}
    rest = {m: {layer: pair for layer, pair in each.items() if "blocks.1" in layer} for m, each in new.items()}
    place = {"update_id": name, "num_buckets": 3, "weight_version": "new"}
    for index, tensors in ((2, {LOW: half[LOW]}), (0, rest)):
        answer = wan.update(tensors, bucket_index=index, **place)
        assert answer.json()["state"] == "staged", answer.text
        assert wan.checksums() == before
    assert wan.status()[LOW]["state"] == "staging"
    answer = wan.update({HIGH: half[HIGH]}, bucket_index=1, **place)
    assert (answer.json()["state"], answer.json()["layers"]) == ("live", 40)
    wan.holds(new)
    assert [wan.status()[module]["weight_version"] for module in MODULES] == ["new", "new"]


def test_both_transformers_make_the_video(wan):
    base = wan.server.video()
    assert wan.server.video() == base
    videos = {base}
    for module in MODULES:
        wan.reset()
        wan.update({module: wan.adapters()[module]})
        videos.add(wan.server.video())
    assert len(videos) == 3
    wan.reset()
    assert wan.server.video() == base


def test_the_first_step_is_the_high_noise_transformers(wan):
    adapters = wan.adapters()
    base = wan.server.video(steps=1)
    assert wan.upload(prefixed(adapters, LOW)).status_code == 200
    assert wan.server.video(steps=1) == base
    assert wan.upload(prefixed(adapters, HIGH)).status_code == 200
    assert wan.server.video(steps=1) != base


def test_every_video_is_the_old_or_the_new_policys(wan, name):
    """Generation goes on all the time; a video of one new and one old transformer would be a third one."""
    old, new = wan.adapters(1), wan.adapters(2)
    wan.update(new)
    new_video = wan.server.video()
    wan.update(old)
    old_video = wan.server.video()
    videos, stop = [], threading.Event()

    def generate():
        while not stop.is_set():
            videos.append(wan.server.video())

    generator = threading.Thread(target=generate)
    generator.start()
    try:
        for index, module in enumerate(MODULES):
            answer = wan.update({module: new[module]}, update_id=name, bucket_index=index, num_buckets=2)
            assert answer.status_code == 200, answer.text
        seen = len(videos)
        while generator.is_alive() and len(videos) < seen + 2:
            time.sleep(0.1)
    finally:
        stop.set()
        generator.join()
    assert set(videos) <= {old_video, new_video}
    assert videos[-1] == new_video


def test_verify_compares_both_in_the_senders_names(wan):
    adapters = wan.adapters()
    wan.update(adapters)
    layers = {
        m: {layer: {"sha256": lora.sha256(weight)} for layer, weight in wan.expected(m, adapters[m]).items()}
        for m in MODULES
    }
    answer = wan.server.post("/lora_merge/verify", {"modules": layers}).json()
    assert (answer["success"], answer["checked"]) == (True, 40)
    mixed = {f"low_noise.{layer}": each for layer, each in layers[LOW].items()}
    mixed["low_noise.blocks.1.ffn.net.2"] = layers[HIGH]["blocks.1.ffn.net.2"]
    answer = wan.server.post("/lora_merge/verify", {"modules": {HIGH: mixed, LOW: {}}}).json()
    assert (answer["checked"], answer["mismatched"]) == (20, [f"{LOW}.blocks.1.ffn.net.2"])


def test_prefixes_route_one_list_to_both(wan):
    adapters = wan.adapters()
    answer = wan.update({HIGH: prefixed(adapters)}, target_modules=list(MODULES))
    assert answer.status_code == 200, answer.text
    assert {m: each["layers"] for m, each in answer.json()["modules"].items()} == {HIGH: 20, LOW: 20}
    wan.holds(adapters)


def test_a_layers_own_scale_follows_its_prefix(wan):
    adapters = wan.adapters()
    scaling = {HIGH: {f"low_noise.{LAYER}": 4.0, f"high_noise.{LAYER}": 4.0}}
    answer = wan.update({HIGH: prefixed(adapters)}, target_modules=list(MODULES), layer_scaling=scaling)
    assert answer.status_code == 200, answer.text
    wan.holds(adapters, dict.fromkeys(adapters[HIGH], 1.5) | {LAYER: 4.0})


def test_a_module_that_the_request_does_not_name_is_refused_by_name(wan):
    before = wan.checksums()
    answer = wan.update({HIGH: prefixed(wan.adapters())})
    assert answer.status_code == 400
    assert f"belongs to module {LOW!r}" in answer.json()["message"]
    assert wan.checksums() == before


def test_a_module_for_which_no_name_comes_is_refused_by_name(wan):
    before = wan.checksums()
    answer = wan.update({HIGH: prefixed(wan.adapters(), HIGH)}, target_modules=list(MODULES))
    assert answer.status_code == 400
    assert f"{LOW}: the payload holds no lora_A" in answer.json()["message"]
    assert wan.checksums() == before


def test_an_uploaded_file_with_prefixes_is_both_whole_adapters(wan):
    wan.update(wan.adapters(1))
    some = {m: {n: p for n, p in each.items() if "blocks.1" in n} for m, each in wan.adapters(2).items()}
    answer = wan.upload(prefixed(some), {"layer_scaling": json.dumps({"low_noise.blocks.1.ffn.net.2": 1.5})})
    assert answer.status_code == 200, answer.text
    wan.holds(some)


def test_an_uploaded_file_changes_no_module_that_it_does_not_name(wan):
    first, second = wan.adapters(1), wan.adapters(2)
    wan.update(first)
    assert wan.upload(prefixed(second, LOW)).status_code == 200
    wan.holds({HIGH: first[HIGH], LOW: second[LOW]})
    assert wan.upload(lora.named(second[LOW]), target_module=LOW).status_code == 200
    assert wan.upload(lora.named(second[HIGH])).status_code == 200
    wan.holds(second)


def test_a_scale_in_a_file_without_its_layer_is_refused_by_name(wan):
    before = wan.checksums()
    answer = wan.upload(prefixed(wan.adapters(), LOW), {"layer_scaling": json.dumps({LAYER: 4.0})})
    assert answer.status_code == 400
    assert f"{HIGH}: layer_scaling names layers that have no pair: {LAYER}" in answer.json()["message"]
    assert wan.checksums() == before


def test_an_upload_for_one_module_refuses_the_others_prefix(wan):
    before = wan.checksums()
    answer = wan.upload(prefixed(wan.adapters()), target_module=HIGH)
    assert answer.status_code == 400
    assert f"belongs to module {LOW!r}" in answer.json()["message"]
    assert wan.checksums() == before


@pytest.mark.parametrize("way", [(), ("--ipc",)])
def test_the_command_line_pushes_one_adapter_of_both(wan, tmp_path, way):
    adapters = wan.adapters()
    file = tmp_path / "both.safetensors"
    save_file(dict(prefixed(adapters)), file)
    words = ["push", str(wan.server.client.base_url), file, "--alpha", "6", "--verify", "--base", wan.checkpoint, *way]
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["verified"] == "all 40 layers are what they should be"
    wan.holds(adapters)
