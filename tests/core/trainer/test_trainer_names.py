"""Keys of PEFT models, whatever wraps them."""

from __future__ import annotations

import pytest
import torch

from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.trainer.names import PeftLoRAKeyMapper, collect_lora_layer_groups

A, B = torch.zeros(2, 4), torch.zeros(8, 2)
LAYER = "transformer_blocks.0.attn.to_q"


@pytest.mark.parametrize(
    "key",
    [
        f"base_model.model.{LAYER}.lora_A.default.weight",
        f"module.base_model.model._orig_mod.{LAYER}.lora_A.default.weight",
        "base_model.model.transformer_blocks.0._fsdp_wrapped_module._checkpoint_wrapped_module.attn.to_q.lora_A.default"
        ".weight",
        f"{LAYER}.lora_A.default._orig_mod.weight",
        f"{LAYER}.lora_A.weight",
    ],
)
def test_n5_wrappers_and_adapter_segments_are_stripped_wherever_they_stand(key):
    mapper = PeftLoRAKeyMapper()
    assert mapper.is_lora_key(key)
    assert mapper.to_sgld_name(key) == f"{LAYER}.lora_A"
    assert mapper.layer_prefix(key) == LAYER


def test_n4_only_the_chosen_adapter_is_read():
    state = {f"{LAYER}.lora_{side}.{name}.weight": tensor + index
             for index, name in enumerate(("default", "old", "my.style"))
             for side, tensor in (("A", A), ("B", B))}  # fmt: skip
    for index, name in enumerate(("default", "old", "my.style")):
        groups, unmapped = collect_lora_layer_groups(state, PeftLoRAKeyMapper(name))
        assert unmapped == []
        assert list(groups) == [LAYER]
        assert torch.equal(groups[LAYER].b, B + index)


def test_base_weights_are_no_lora_keys():
    mapper = PeftLoRAKeyMapper()
    for key in (f"base_model.model.{LAYER}.base_layer.weight", "proj.bias", "norm.weight"):
        assert not mapper.is_lora_key(key)
        assert mapper.to_sgld_name(key) is None
        assert mapper.layer_prefix(key) is None


def test_s4_what_must_not_be_dropped_is_refused_by_name_all_of_it():
    refused = [
        f"{LAYER}.lora_magnitude_vector.default.weight",
        f"{LAYER}.lora_magnitude_vector",
        f"{LAYER}.lora_B.default.bias",
        "embed.lora_embedding_A.default",
        "norm.modules_to_save.default.weight",
    ]
    with pytest.raises(RequestError) as caught:
        collect_lora_layer_groups(dict.fromkeys(refused, A), PeftLoRAKeyMapper())
    assert len(caught.value.faults) == len(refused)
    assert all(repr(key) in fault for key, fault in zip(refused, caught.value.faults, strict=True))


def test_refused_kinds_of_another_adapter_are_not_ours():
    state = {f"{LAYER}.lora_magnitude_vector.old.weight": A, "norm.modules_to_save.old.weight": A}
    assert collect_lora_layer_groups(state, PeftLoRAKeyMapper()) == ({}, [])


def test_n4_two_keys_of_one_name_are_refused_and_so_is_half_a_pair():
    state = {"one.lora_A.weight": A, "two.lora_B.weight": B, "x.lora_A.default.weight": A, "x.lora_A.weight": A,
             "x.lora_B.weight": B}  # fmt: skip
    with pytest.raises(RequestError) as caught:
        collect_lora_layer_groups(state, PeftLoRAKeyMapper())
    assert list(caught.value.faults) == [
        "'x.lora_A.weight' and 'x.lora_A.default.weight' are both 'x.lora_A'",
        "'one' has no lora_B",
        "'two' has no lora_A",
    ]


def test_keys_of_an_unknown_kind_are_returned():
    state = {f"{LAYER}.lora_C.default.weight": A, f"{LAYER}.lora_A.weight": A, f"{LAYER}.lora_B.weight": B}
    groups, unmapped = collect_lora_layer_groups(state, PeftLoRAKeyMapper())
    assert list(groups) == [LAYER]
    assert unmapped == [f"{LAYER}.lora_C.default.weight"]


def test_layers_are_sorted_and_a_peft_model_is_read_as_it_is():

    peft = pytest.importorskip("peft")
    model = torch.nn.ModuleDict({"b": torch.nn.Linear(4, 8), "a": torch.nn.Conv2d(4, 8, 3), "c": torch.nn.Linear(4, 4)})
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["a", "b"]))
    groups, unmapped = collect_lora_layer_groups(wrapped.state_dict(), PeftLoRAKeyMapper())
    assert unmapped == []
    assert {layer: (pair.a.shape, pair.b.shape) for layer, pair in groups.items()} == {
        "a": ((2, 4, 3, 3), (8, 2, 1, 1)), "b": ((2, 4), (8, 2)),
    }  # fmt: skip
    assert list(groups) == ["a", "b"]


def test_dora_of_peft_itself_is_refused():

    peft = pytest.importorskip("peft")
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 8)})
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["a"], use_dora=True))
    with pytest.raises(RequestError, match=r"lora_magnitude_vector.*DoRA"):
        collect_lora_layer_groups(wrapped.state_dict(), PeftLoRAKeyMapper())
