"""Whatever is trained and not sent is refused by name, and what is known to be left behind may be."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch import nn

from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.trainer.contents import Pairs
from sgld_lora_merge.trainer.model import read_adapter, read_layers
from sgld_lora_merge.trainer.names import PeftLoRAKeyMapper

peft = pytest.importorskip("peft")
MAPPER = PeftLoRAKeyMapper()


def wrapped(**config):
    torch.manual_seed(0)
    plain = nn.ModuleDict({"a": nn.Linear(16, 24), "b": nn.Linear(24, 8), "norm": nn.LayerNorm(8)})
    return peft.get_peft_model(plain, peft.LoraConfig(**{"r": 2, "lora_alpha": 3, "target_modules": ["a"], **config}))


def read(model, *, adapter="default", allow_unsynced=()):
    return read_adapter(model, PeftLoRAKeyMapper(adapter), allow_unsynced=allow_unsynced)


@pytest.mark.parametrize(
    "name", ["norm.weight", "a.base_layer.bias", "b.weight", "a.base_layer.weight"],
    ids=["a norm", "a bias", "a head", "a target's own weight"],
)  # fmt: skip
def test_a_parameter_that_is_trained_and_not_sent_is_refused_with_the_ways_out(name):
    model = wrapped()
    assert read(model).pairs  # everything else is frozen
    model.get_parameter(f"base_model.model.{name}").requires_grad_(True)
    with pytest.raises(
        RequestError, match=rf"1 parameters are trained and not sent: {name}\. Freeze .*allow_unsynced="
    ):
        read(model)
    assert read(model, allow_unsynced=[name]).pairs
    assert read(model, allow_unsynced=["*.nothing", name[:3] + "*"]).pairs
    assert read_layers(model, read_adapter(model, MAPPER))  # which sends every weight


def test_all_that_is_wrong_is_said_at_once():
    model = wrapped(use_dora=True)
    model.get_parameter("base_model.model.norm.weight").requires_grad_(True)
    with pytest.raises(RequestError, match=r"Dora.*1 parameters are trained and not sent: norm\.weight"):
        read(model)


@pytest.mark.parametrize("sender", [read, lambda model: read_layers(model, read_adapter(model, MAPPER))])
def test_adapters_that_the_forward_adds_are_refused_and_one_active_adapter_is_sent(sender):
    model = wrapped()
    model.add_adapter("style", peft.LoraConfig(r=2, target_modules=["a"]))
    assert sender(model)
    model.base_model.set_adapter(["default", "style"])
    with pytest.raises(RequestError, match=r"adapters style are active beside 'default'.*add_weighted_adapter"):
        sender(model)
    model.base_model.set_adapter("default")
    assert sender(model)


def test_the_way_out_of_several_adapters_is_one_pair_that_is_their_sum():
    model = wrapped(init_lora_weights=False)
    model.add_adapter("style", peft.LoraConfig(r=3, lora_alpha=2, target_modules=["a"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "style"])
    x = torch.randn(4, 16)
    both = model.base_model.model["a"](x)
    model.add_weighted_adapter(["default", "style"], [1.0, 1.0], "sum", combination_type="cat")
    model.set_adapter("sum")
    adapter = read(model, adapter="sum")
    pair, base = adapter.pairs["a"], model.base_model.model["a"].base_layer
    torch.testing.assert_close(base(x) + adapter.scales["a"] * (x @ pair.a.T @ pair.b.T), both)


def test_an_adapter_that_is_trained_beside_the_one_that_is_sent_is_refused_unless_that_is_known():
    """As a trainer that lets an old policy sample while the new one is trained."""
    model = wrapped()
    model.add_adapter("old", peft.LoraConfig(r=2, target_modules=["a"]))
    with pytest.raises(RequestError, match=r"2 parameters are trained and not sent: a\.lora_A\.default\.weight"):
        read(model, adapter="old")
    assert read(model, adapter="old", allow_unsynced=["*.default.weight"]).pairs
    assert read(model).pairs  # what is not active is in no policy


def test_other_values_are_sent_in_the_place_of_the_models_and_none_may_be_missing():
    model = wrapped()
    average = {name: each.detach() + 1 for name, each in model.named_parameters() if "lora_" in name}
    sent, kept = read_adapter(model, MAPPER, average).pairs["a"], read(model).pairs["a"]
    assert torch.equal(sent.a, kept.a + 1)
    assert torch.equal(sent.b, kept.b + 1)
    name = next(iter(average))
    for wrong, told in (
        ({name: average[name]}, "has no value"),
        (average | {"lora.x": torch.ones(1)}, "there is a value of 'lora.x', which the model does not have"),
        (average | {name: average[name][:, 1:]}, r"has shape \(2, 15\), the model's has \(2, 16\)"),
    ):
        with pytest.raises(RequestError, match=told):
            read_adapter(model, MAPPER, wrong)


def test_other_values_of_all_weights_are_sent_too():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].requires_grad_(False)
    average = {"a.weight": torch.ones(4, 4)}
    layers = read_layers(model, values=average)
    assert torch.equal(layers["a"].tensors["weight"], average["a.weight"])
    assert torch.equal(layers["b"].tensors["weight"], model["b"].weight)
    with pytest.raises(RequestError, match=r"'a\.weight' has no value"):
        read_layers(model, values={})


def test_modules_are_looked_at_once_and_again_when_one_came_or_went():
    model = wrapped()
    pairs = Pairs(argparse.Namespace(), MAPPER, ())
    pairs.read(model, None)
    surveyed = pairs._surveys[id(model)]
    model.get_parameter("base_model.model.norm.weight").requires_grad_(True)
    with pytest.raises(RequestError, match=r"norm\.weight"):
        pairs.read(model, None)
    assert pairs._surveys[id(model)] is surveyed
    model.get_parameter("base_model.model.norm.weight").requires_grad_(False)
    model.base_model.model["head"] = nn.Linear(8, 2)
    with pytest.raises(RequestError, match=r"head\.weight, head\.bias"):
        pairs.read(model, None)
