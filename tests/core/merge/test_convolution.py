"""Pairs of convolutions, held against PEFT's own merge."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sgld_lora_merge.adapter.pairing import pair_up
from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.merge.engine import MergeEngine, ModuleUpdate
from sgld_lora_merge.merge.module_view import LinearModule
from sgld_lora_merge.merge.targets import CannotLand

CONVOLUTIONS = {
    "Conv1d": lambda: nn.Conv1d(3, 8, 3, padding=1),
    "Conv2d": lambda: nn.Conv2d(3, 8, (3, 2), stride=2),
    "Conv2d of a patch embedding": lambda: nn.Conv2d(4, 8, 2, stride=2, bias=False),
    "Conv2d 1x1": lambda: nn.Conv2d(3, 8, 1),
    "Conv3d": lambda: nn.Conv3d(4, 8, (1, 2, 2), stride=(1, 2, 2)),
}


def engine_of(module, precision=Precision.FP32):
    view = LinearModule(module)
    return MergeEngine(lambda: {"m": view}, precision)


def go_live(engine, pairs):
    plan = engine.plan([ModuleUpdate("m", pairs)])
    engine.commit(plan)
    engine.settle(plan, "1")


def faults_of(module, pair):
    with pytest.raises(RequestError) as error:
        engine_of(module).plan([ModuleUpdate("m", [pair])])
    return error.value.faults


@pytest.mark.parametrize("make", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("precision", Precision)
def test_an_adapter_of_a_convolution_gives_what_peft_merges(make, precision):
    import peft

    torch.manual_seed(0)
    model = nn.ModuleDict({"proj": make(), "other": nn.Linear(2, 2)})
    base = model["proj"].weight.detach().clone()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, target_modules=["proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    named = [(name, parameter.detach()) for name, parameter in adapted.named_parameters() if "lora_" in name]
    expected = base + adapted.base_model.model["proj"].get_delta_weight("default").detach()
    ours = nn.ModuleDict({"proj": make()})
    ours["proj"].weight.data.copy_(base)
    address = ours["proj"].weight.data_ptr()
    engine = engine_of(ours, precision)

    pairing = pair_up(named, alpha=6)
    go_live(engine, pairing.pairs)

    assert pairing.faults == ()
    torch.testing.assert_close(ours["proj"].weight.data, expected)
    assert not torch.equal(ours["proj"].weight.data, base)
    assert ours["proj"].weight.data_ptr() == address
    engine.commit(engine.plan_reset())
    assert torch.equal(ours["proj"].weight.data, base)


@pytest.mark.parametrize("layer", [nn.Linear(6, 4), nn.Conv2d(6, 4, 1), nn.Conv1d(6, 4, 1)], ids=repr)
@pytest.mark.parametrize("kernel", [(), (1,), (1, 1)], ids=str)
def test_a_kernel_of_ones_is_a_linear_layer(layer, kernel):
    model = nn.ModuleDict({"x": layer})
    before = layer.weight.detach().clone()
    a, b = torch.ones(1, 6), torch.ones(4, 1)
    go_live(engine_of(model), [Pair("x", a, b, 2.0, kernel=kernel)])
    torch.testing.assert_close(layer.weight.data, before + 2.0)
    layer.weight.data.copy_(before)


@pytest.mark.parametrize(
    ("layer", "kernel", "told"),
    [
        (nn.Linear(36, 4), (3, 3), "the pair is a convolution's with kernel (3, 3), the layer is a linear layer's"),
        (nn.Conv2d(4, 4, 3), (), "the pair is a linear layer's, the layer is a convolution's with kernel (3, 3)"),
        (nn.Conv2d(6, 4, (3, 2)), (2, 3), "with kernel (2, 3), the layer is a convolution's with kernel (3, 2)"),
        (nn.Conv3d(9, 4, (1, 2, 2)), (2, 2), "with kernel (2, 2), the layer is a convolution's with kernel (1, 2, 2)"),
    ],
    ids=repr,
)
def test_a_pair_of_another_kernel_is_refused_where_its_columns_would_fit(layer, kernel, told):
    (fault,) = faults_of(
        nn.ModuleDict({"x": layer}), Pair("x", torch.ones(1, 36), torch.ones(4, 1), 1.0, kernel=kernel)
    )
    assert told in fault


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (nn.Conv2d(4, 4, 3, groups=2), "Conv2d of 2 groups, for which PEFT defines no merge"),
        (nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last), "Conv2d whose weight is not contiguous"),
        (nn.ConvTranspose2d(4, 4, 3), "ConvTranspose2d, not a linear layer or a convolution"),
        (nn.Embedding(4, 4), "Embedding, not a linear layer or a convolution"),
    ],
    ids=repr,
)
def test_layers_for_which_no_merge_is_defined_are_refused_by_type(layer, told):
    with pytest.raises(CannotLand, match=told):
        LinearModule(nn.ModuleDict({"x": layer})).land("x")
