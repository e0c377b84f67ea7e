"""Where a pair lands."""

import pytest
import torch
from torch import nn

from sgld_lora_merge.merge.module_view import LinearModule
from sgld_lora_merge.merge.spans import Span
from sgld_lora_merge.merge.targets import CannotLand, Target, whole_weight


def small_model():
    return nn.ModuleDict({"proj": nn.Linear(6, 4), "norm": nn.LayerNorm(4), "block": nn.Sequential(nn.Linear(4, 4))})


def test_span_has_a_size_and_can_be_shifted():
    span = Span(2, 5)

    assert span.size == 3
    assert span.shifted(10) == Span(12, 15)


def test_a_target_is_known_by_weight_and_section():
    q = Target("qkv.weight", 0, Span(0, 4), (Span(0, 4),), (Span(0, 6),))
    v = Target("qkv.weight", 2, Span(8, 12), (Span(0, 4),), (Span(0, 6),))

    assert q.key == ("qkv.weight", 0)
    assert q.key != v.key


def test_a_whole_weight_is_all_of_b_and_all_of_a():
    landing = whole_weight("proj.weight", 4, 6)

    (target,) = landing.targets
    assert (landing.out_features, landing.in_features) == (4, 6)
    assert (target.rows, target.b_rows, target.a_cols) == (Span(0, 4), (Span(0, 4),), (Span(0, 6),))
    assert target.copies == 1


def test_linear_layers_land_under_their_own_names():
    view = LinearModule(small_model())

    assert view.land("proj") == whole_weight("proj.weight", 4, 6)
    assert view.land("block.0") == whole_weight("block.0.weight", 4, 4)
    assert view.layers() == ["block.0", "proj"]


def test_an_unknown_layer_does_not_land():
    assert LinearModule(small_model()).land("pro") is None


@pytest.mark.parametrize(("layer", "kind"), [("norm", "LayerNorm"), ("block", "Sequential")])
def test_a_layer_of_another_kind_cannot_land_and_says_what_it_is(layer, kind):
    with pytest.raises(CannotLand, match=kind):
        LinearModule(small_model()).land(layer)


def test_a_bare_linear_layer_lands_under_its_empty_name():
    """The module itself may be the layer; its weight is then ``weight``."""
    linear = nn.Linear(6, 4)
    view = LinearModule(linear)

    landing = view.land("")

    assert landing is not None
    assert view.weight(landing.targets[0].weight).data_ptr() == linear.weight.data_ptr()


@pytest.mark.parametrize("prefix", ["lora_unet_", "lora_transformer_"])
def test_n6_a_flattened_name_lands_where_the_dotted_one_does(prefix):
    view = LinearModule(small_model())

    assert view.land(f"{prefix}proj") == view.land("proj")
    assert view.land(f"{prefix}block_0") == view.land("block.0")
    assert view.land(f"{prefix}block_1") is None
    with pytest.raises(CannotLand, match="LayerNorm"):
        view.land(f"{prefix}norm")


def test_underscores_are_dots_in_kohyas_names_only():
    assert LinearModule(small_model()).land("block_0") is None


def test_a_flattened_name_that_stands_for_two_layers_is_refused_with_both():
    view = LinearModule(nn.ModuleDict({"ff_in": nn.Linear(2, 2), "ff": nn.ModuleDict({"in": nn.Linear(2, 2)})}))

    with pytest.raises(
        CannotLand, match=r"'lora_unet_ff_in' stands for 'ff.in' and for 'ff_in'; send it under a dotted"
    ):
        view.land("lora_unet_ff_in")
    assert view.land("ff_in") == whole_weight("ff_in.weight", 2, 2)


def test_the_weight_of_a_view_is_the_live_one():
    model = small_model()

    LinearModule(model).weight("proj.weight").fill_(3.0)

    assert torch.equal(model["proj"].weight.data, torch.full((4, 6), 3.0))
