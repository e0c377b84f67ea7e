"""What PEFT's own configurations do to an adapter, and what of it pairs cannot carry."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.trainer.model import read_adapter, read_layers
from sgld_lora_merge.trainer.names import PeftLoRAKeyMapper

peft = pytest.importorskip("peft")
MAPPER = PeftLoRAKeyMapper()


def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(16, 24), "b": nn.Linear(16, 24), "e": nn.Embedding(10, 16)})


def wrapped(**config):
    fields = {"r": 2, "lora_alpha": 3, "target_modules": ["a", "b"], **config}
    return peft.get_peft_model(model(), peft.LoraConfig(**fields))


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"use_rslora": True}, {"a": 3 / 2**0.5, "b": 3 / 2**0.5}),
        ({"rank_pattern": {"a": 4}}, {"a": 0.75, "b": 1.5}),
        ({"alpha_pattern": {"b": 16}}, {"a": 1.5, "b": 8.0}),
        ({"use_rslora": True, "rank_pattern": {"a": 4}, "alpha_pattern": {"a": 16}}, {"a": 8.0, "b": 3 / 2**0.5}),
    ],
)
def test_s2_s3_scales_are_those_that_peft_computes_with(config, scales):
    adapter = read_adapter(wrapped(**config), MAPPER)
    assert adapter.scales == pytest.approx(scales)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"use_dora": True}, ["a' of adapter 'default' is Dora, of which A and B are not all", "b' of adapter"]),
        ({"bias": "lora_only"}, ["trains biases (bias='lora_only')"]),
        ({"bias": "all"}, ["trains biases (bias='all')"]),
        ({"lora_bias": True}, ["'a.lora_B.default.bias' is a bias", "'b.lora_B.default.bias' is a bias"]),
        ({"target_modules": ["a", "e"]}, ["lora_embedding_A.default", "lora_embedding_B.default"]),
        ({"trainable_token_indices": {"e": [1]}}, ["trains tokens of an embedding (trainable_token_indices)"]),
        ({"modules_to_save": ["b"], "target_modules": ["a"]}, ["b.modules_to_save.default.weight", "trained whole"]),
    ],
    ids=["dora", "bias of layers", "all biases", "bias of B", "embedding", "tokens", "whole module"],
)
def test_s4_what_a_pair_cannot_carry_is_refused_by_name(config, told):
    with pytest.raises(RequestError) as caught:
        read_adapter(wrapped(**config), MAPPER)
    assert all(sentence in str(caught.value) for sentence in told), str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("alora_invocation_tokens", [1]), ("layer_replication", [[0, 1]]), ("use_qalora", True), ("use_next", True)],
)
def test_s4_a_variant_that_only_the_config_says_is_refused_by_its_field(field, value):
    changed = wrapped()
    setattr(changed.peft_config["default"], field, value)
    with pytest.raises(RequestError, match=f"more than A and B: {field}="):
        read_adapter(changed, MAPPER)


def test_what_another_adapter_does_is_not_this_ones():
    both = wrapped()
    both.add_adapter("old", peft.LoraConfig(r=2, target_modules=["a"], use_dora=True, init_lora_weights="pissa"))
    assert sorted(read_adapter(both, MAPPER).pairs) == ["a", "b"]


def test_an_adapter_that_is_merged_into_the_trainers_weights_is_refused_until_it_is_taken_out():
    """Its pairs are right, but its base is not, and merging it once more would count it twice."""
    merged = wrapped()
    merged.merge_adapter()
    with pytest.raises(RequestError, match="'default' is merged into the trainer's own weights"):
        read_adapter(merged, MAPPER)
    merged.unmerge_adapter()
    assert read_layers(merged, read_adapter(merged, MAPPER))["a"].pair is not None


@pytest.mark.parametrize("init", [True, False, "gaussian", "Gaussian", "orthogonal"])
def test_most_inits_leave_the_base_as_it_is(init):
    trained = wrapped(init_lora_weights=init)
    assert torch.equal(trained.base_model.model["a"].base_layer.weight, model()["a"].weight)
    assert read_adapter(trained, MAPPER).moved_by is None


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_an_init_that_changes_the_base_is_told_apart(init):
    trained = wrapped(init_lora_weights=init)
    assert not torch.equal(trained.base_model.model["a"].base_layer.weight, model()["a"].weight)
    assert read_adapter(trained, MAPPER).moved_by == init


@pytest.mark.parametrize("init", ["loftq", "corda", "lora_ga", "an init of the future"])
def test_an_init_that_needs_more_than_a_model_is_told_apart_by_its_name(init):
    trained = wrapped()
    trained.peft_config["default"].init_lora_weights = init
    assert read_adapter(trained, MAPPER).moved_by == init
