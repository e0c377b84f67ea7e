"""What an adapter is, and what rounding would take of it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.cli import app
from sgld_lora_merge.cli.base import BaseWeights
from sgld_lora_merge.cli.inspection import report
from sgld_lora_merge.errors import LoraMergeError
from tests.core.adapter import pipeline_file

GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(8, 6, generator=GENERATOR)


def pair(layer="blocks.0.to_q", rank=2, scale=3.0, size=1e-3):
    a, b = (torch.randn(shape, generator=GENERATOR) * size for shape in ((rank, 6), (8, rank)))
    return Pair(layer, a, b.bfloat16(), scale)


def update(pair):
    return pair.scale * (pair.b.double() @ pair.a.double())


def test_the_norm_is_that_of_the_whole_update():
    each = pair()
    (layer,) = report([each], None, None, None).layers
    assert layer.norm == pytest.approx(float(torch.linalg.vector_norm(update(each))))
    assert (layer.shape, layer.rank, layer.scale, layer.dtype) == ((8, 6), 2, 3.0, "float32, bfloat16")
    assert layer.rounding_loss is layer.relative is None


@pytest.mark.parametrize("layer", ["blocks.0.to_q", "lora_unet_blocks_0_to_q"])
def test_with_base_weights_it_says_what_rounding_would_take(tmp_path, layer):
    (tmp_path / "transformer").mkdir()
    save_file({"blocks.0.to_q.weight": WEIGHT, "other": WEIGHT.clone()}, tmp_path / "transformer" / "model.safetensors")
    each = pair(layer)
    found = report([each], None, BaseWeights(tmp_path, "transformer"), torch.bfloat16)
    base = WEIGHT.bfloat16().double()
    lost = (base + update(each)).bfloat16().double() - (base + update(each))
    expected = float(lost.norm() / update(each).norm())
    assert 0.01 < expected < 10
    assert found.rounding_loss == found.layers[0].rounding_loss == pytest.approx(expected)
    assert found.layers[0].relative == pytest.approx(float(update(each).norm() / base.norm()), rel=1e-3)


def test_layers_and_target_modules_that_do_not_meet_are_named():
    pairs = [pair("blocks.0.to_q"), pair("proj"), pair("lora_unet_blocks_0_ff_net_2")]
    found = report(pairs, ["to_q", "ff.net.2", "to_k", "roj"], None, None)
    assert found.target_modules == {"to_q": 1, "proj": 1, "ff_net_2": 1}
    assert found.beyond == ("proj",)
    assert found.missing == ("to_k", "roj")


def test_base_weights_that_do_not_fit_are_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"x.weight": WEIGHT.T.contiguous()}, file)
    with pytest.raises(LoraMergeError, match=r"'x' is \[6, 8\] in the base weights, \[8, 6\] in the adapter"):
        report([pair("x")], None, BaseWeights(file, "transformer"), None)
    with pytest.raises(LoraMergeError, match=r"has no y[.]weight; base weights must have the adapter's layer names"):
        report([pair("y")], None, BaseWeights(file, "transformer"), None)


def test_a_path_without_base_weights_is_refused(tmp_path):
    with pytest.raises(LoraMergeError, match="has no safetensors file with base weights"):
        BaseWeights(tmp_path, "transformer")
    for path in (tmp_path / "gone.safetensors", tmp_path / "text"):
        (tmp_path / "text").write_text("no")
        with pytest.raises(LoraMergeError, match="is not a safetensors file"):
            BaseWeights(path, "transformer")


@pytest.mark.parametrize(
    ("configs", "front"),
    [
        ({"transformer": {"r": 4, "lora_alpha": 8}, "text_encoder": {"r": 4, "lora_alpha": 16}}, "{}."),
        ({"transformer": {"r": 4, "lora_alpha": 8}}, ""),
    ],
    ids=["two components", "one"],
)
def test_each_component_is_shown_with_its_own_scale(tmp_path, configs, front):
    trained = pipeline_file.models(**configs)
    expected = {}
    for component, model in trained.items():
        expected |= pipeline_file.scales(model, front.format(component))
    assert set(expected.values()) == {config["lora_alpha"] / 4 for config in configs.values()}
    done = CliRunner().invoke(app, ["inspect", str(pipeline_file.saved(tmp_path, trained)), "--json"])
    assert {layer["layer"]: layer["scale"] for layer in json.loads(done.output)["layers"]} == expected
