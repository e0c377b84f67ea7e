"""Where layers would land, in the names of a sender that may put prefixes in front."""

from __future__ import annotations

import pytest
from torch import nn

from server_patches.resolve import resolve
from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.merge.module_view import LinearModule

ROUTES = {"high.": "transformer", "low.": "transformer_2"}
PLACE = {
    "module": "transformer",
    "layer": "to_q",
    "weight": "to_q.weight",
    "sections": [],
    "shape": [4, 6],
    "dtype": "float32",
    "merge_mode": "merge",
}


def views(*modules):
    return {name: LinearModule(nn.ModuleDict({"to_q": nn.Linear(6, 4), "norm": nn.LayerNorm(4)})) for name in modules}


def test_a_prefix_leads_to_its_module_and_the_answer_keeps_the_senders_name():
    names = ["to_q", "base_model.model.high.to_q", "low.to_q"]
    found = resolve({"transformer": names}, ROUTES, views("transformer", "transformer_2"))["transformer"]
    assert found == dict(zip(names, (PLACE, PLACE, PLACE | {"module": "transformer_2"}), strict=True))


def test_what_has_no_place_has_a_reason():
    found = resolve({"transformer": ["gone", "norm", "low.to_q"]}, ROUTES, views("transformer"))["transformer"]
    assert found == {
        "gone": {"fault": "unknown layer"},
        "norm": {"fault": "it is a LayerNorm, not a linear layer or a convolution"},
        "low.to_q": {"fault": "it belongs to module 'transformer_2', which this engine does not have"},
    }


def test_a_module_that_is_not_there_is_refused():
    with pytest.raises(RequestError, match="no module text_encoder here; there are transformer"):
        resolve({"text_encoder": ["to_q"]}, ROUTES, views("transformer"))
