"""The command line against the real engine."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from sgld_lora_merge.cli import app
from support import lora

GONE = "layers.9.attention.to_q"


@pytest.fixture
def run(zimage):
    """Runs a command on the engine; its last line of output, as JSON, or all of it."""

    def command(name, *arguments, code=0, as_json=True):
        words = [name, str(zimage.server.client.base_url), *map(str, arguments), *(["--json"] if as_json else [])]
        done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
        assert done.exit_code == code, done.output
        return json.loads(done.stdout) if as_json and done.stdout else done.output

    return command


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "step-100"


def saved(folder, adapter, **config):
    """As PEFT saves it."""
    folder.mkdir()
    tensors = {f"base_model.model.{name}.weight": tensor.clone() for name, tensor in lora.named(adapter)}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6, **config}))
    return folder


@pytest.mark.parametrize("way", [(), ("--ipc",)])
def test_a_folder_of_pefts_is_pushed_byte_for_byte(zimage, run, folder, way):
    adapter = zimage.adapter()
    answer = run("push", saved(folder, adapter), *way)
    assert (answer["state"], answer["layers"], answer["weight_version"]) == ("live", 14, "step-100")
    zimage.holds(zimage.expect(adapter))


def test_rslora_and_patterns_reach_the_engine(zimage, run, folder):
    adapter = zimage.adapter()
    run("push", saved(folder, adapter, use_rslora=True, alpha_pattern={"to_k": 2}))
    scales = {layer: 2 / math.sqrt(4) if layer.endswith("to_k") else 6 / math.sqrt(4) for layer in adapter}
    zimage.holds(zimage.expect(adapter, scales))


def test_a_file_with_kohyas_names_is_pushed(zimage, run, tmp_path):
    adapter = zimage.adapter()
    tensors = {}
    for layer, (a, b) in adapter.items():
        name = f"lora_unet_{layer.replace('.', '_')}"
        tensors |= {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b, f"{name}.alpha": torch.tensor(6.0)}
    save_file(tensors, tmp_path / "style.safetensors")
    run(
        "push",
        tmp_path / "style.safetensors",
        "--version",
        "9",
        "--verify",
        "--base",
        zimage.checkpoint / "transformer",
    )
    assert zimage.status()["modules"]["transformer"]["weight_version"] == "9"
    zimage.holds(zimage.expect(adapter))


def test_a_push_is_verified_against_base_weights(zimage, run, folder):
    base = zimage.checkpoint / "transformer"
    answer = run("push", saved(folder, zimage.adapter()), "--verify", "--base", base)
    assert answer["verified"] == "all 14 layers are what they should be"


def test_a_push_on_another_base_is_not_verified(zimage, run, folder, tmp_path):
    weights = lora.base_weights(zimage.checkpoint)
    weights["layers.0.attention.to_k.weight"] += 1
    save_file(weights, tmp_path / "other.safetensors")
    told = run("push", saved(folder, zimage.adapter()), "--verify", "--base", tmp_path / "other.safetensors", code=1)
    assert "1 of 14 layers are not what they should be: transformer.layers.0.attention.to_k" in told


def test_a_sum_of_adapters_is_not_verified(zimage, run, folder):
    zimage.update(zimage.adapter(2), adapter="style")
    base = zimage.checkpoint / "transformer"
    told = run("push", saved(folder, zimage.adapter()), "--verify", "--base", base, code=1)
    assert zimage.status()["modules"]["transformer"]["adapters"].keys() == {"style"}
    assert "transformer holds style too: their sum is not verified from here" in told


def test_a_push_that_cannot_be_verified_is_not_sent(zimage, run, folder, tmp_path):
    save_file({"x.weight": torch.ones(1)}, tmp_path / "other.safetensors")
    told = run("push", saved(folder, zimage.adapter()), "--verify", "--base", tmp_path / "other.safetensors", code=1)
    assert "has no layers.0.attention.to_k.weight" in told
    assert zimage.status()["modules"]["transformer"]["state"] == "base"


def test_a_dry_run_shows_where_every_layer_would_land_and_changes_nothing(zimage, run, folder):
    before = zimage.checksum()
    saved(folder, zimage.adapter(), alpha_pattern={"to_k": 2})
    layers = {each["layer"]: each for each in run("push", folder, "--dry-run")["layers"]}
    assert len(layers) == 14
    assert layers["layers.0.attention.to_k"] == {
        "layer": "layers.0.attention.to_k",
        "rank": 4,
        "scale": 0.5,
        "module": "transformer",
        "name": "layers.0.attention.to_k",
        "target": "layers.0.attention.to_qkv.weight[1]",
        "dtype": "bfloat16",
        "merge_mode": "merge",
        "fault": "",
    }
    assert layers["layers.0.attention.to_q"]["target"] == "layers.0.attention.to_qkv.weight[0]"
    assert layers["layers.0.attention.to_out.0"]["target"] == "layers.0.attention.to_out.0.weight"
    assert zimage.checksum() == before
    shown = run("push", folder, "--dry-run", as_json=False)
    assert "14 of 14 layers would land; nothing was sent" in shown


def test_a_dry_run_names_all_that_does_not_map(zimage, run, folder):
    adapter = zimage.adapter()
    adapter[GONE] = adapter["layers.0.attention.to_q"]
    adapter["layers.0.attention.to_k"] = (torch.ones(4, 64), torch.ones(32, 4))
    adapter["layers.0.attention_norm1"] = adapter["layers.1.attention.to_q"]
    found = run("push", saved(folder, adapter), "--dry-run", code=1)["layers"]
    faults = {each["layer"]: each["fault"] for each in found if each["fault"]}
    assert faults.pop("layers.0.attention_norm1").endswith("Norm, not a linear layer or a convolution")
    assert faults == {
        GONE: "unknown layer",
        "layers.0.attention.to_k": "lora_B @ lora_A is [32, 64], the layer [64, 64]",
    }


def test_a_refused_push_ends_with_the_engines_sentence(zimage, run, folder):
    adapter = zimage.adapter()
    adapter[GONE] = adapter["layers.0.attention.to_q"]
    saved(folder, adapter)
    for way in ((), ("--ipc",)):
        told = run("push", folder, *way, code=1)
        assert told.startswith("sgld-lora-merge: ")
        assert f"unknown layers {GONE}" in told.replace("\n", " ")


def test_the_status_is_a_table_of_modules_and_updates(zimage, run, folder):
    run("push", saved(folder, zimage.adapter()))
    assert run("status")["modules"]["transformer"]["weight_version"] == "step-100"
    shown = run("status", as_json=False)
    assert " merged " in shown
    assert "step-100" in shown
    assert "1.5" in shown


def test_adapters_of_one_module_are_lines_of_the_status(zimage, run, folder):
    saved(folder, zimage.adapter())
    run("push", folder)
    run("push", folder, "--adapter", "style")
    shown = run("status", as_json=False)
    assert "  default" in shown
    assert "  style" in shown
    assert "style" in run("reset", "--adapter", "style", as_json=False)
    assert "style" not in zimage.status()["modules"]["transformer"]["adapters"]


def test_reset_and_rollback(zimage, run, folder):
    before = zimage.checksum()
    run("push", saved(folder, zimage.adapter()))
    merged = zimage.checksum()
    assert run("reset", "--module", "transformer", as_json=False).strip() == "base weights are live in transformer"
    assert zimage.checksum() == before
    assert run("rollback", as_json=False).strip() == "weight_version 'step-100' is live again in transformer"
    assert zimage.checksum() == merged
    assert "409" in run("rollback", code=1)


def test_a_module_that_is_not_there_is_named(run, folder, zimage):
    told = run("push", saved(folder, zimage.adapter()), "--module", "transformer_2", code=1)
    assert "transformer_2" in told.replace("\n", " ")


def test_the_answer_of_a_push_is_told(zimage, run, folder):
    shown = run("push", saved(folder, zimage.adapter()), as_json=False)
    first = shown.splitlines()[0]  # in between it may say that the engine's base is another one since other tests
    assert first.startswith("14 LoRA layers are live in transformer")
    assert first.endswith(", weight_version step-100")
    assert "of the update (fp32)" in shown
