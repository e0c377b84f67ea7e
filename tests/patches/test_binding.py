"""Every pair that a trainer makes for a model family lands in the engine's class, at the published size of both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sgld_lora_merge.adapter.families import load_families
from support.server import before_0_5_23, environment

pytest.importorskip("sglang")
if before_0_5_23():
    pytest.skip("the proof is of sglang 0.5.23's classes", allow_module_level=True)

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
UNPROVED = ("cosmos3", "ltx_2_3", "minimax_h3")
BROKEN = """
import peft, torch
from torch.nn import Linear
from sglang.multimodal_gen.runtime.layers.linear import MergedReplicatedLinear
from support.binding import compare

def tree(**layers):
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleDict(layers)
    return model

trainer = tree(to_q=Linear(4, 4), to_k=Linear(4, 4), w1=Linear(4, 4), gone=Linear(4, 4))
engine = tree(to_qkv=MergedReplicatedLinear(4, [4, 4, 4], bias=False), w1=Linear(4, 8), w2=Linear(4, 4))
engine.param_names_mapping = {
    r"^blocks[.]to_q[.](.*)$": (r"blocks.to_qkv.\\1", 0, 3), r"^blocks[.]to_k[.](.*)$": (r"blocks.to_qkv.\\1", 0, 3)
}
engine.lora_param_names_mapping = {r"^blocks[.]to_k[.](.*)$": (r"blocks.w2.\\1", 0, 3)}
config = peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "w1", "gone"])
print("\\n".join(compare(peft.get_peft_model(trainer, config), engine, torch.bfloat16).faults))
"""


def python(*arguments):
    """What a Python of its own prints: sglang's models warn of many things while they are imported."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def proof():
    return json.loads(python("-m", "support.binding").splitlines()[-1])


@pytest.mark.parametrize("name", sorted(set(load_families()) - set(UNPROVED)))
def test_every_pair_lands_where_the_weight_of_its_layer_is_loaded_and_no_row_is_left(proof, name):
    found = proof["families"][name]
    assert found["faults"] == []
    assert found["unproved"] == ""
    assert found["layers"] >= found["targets"] > 50


@pytest.mark.parametrize("name", UNPROVED)
def test_a_family_that_cannot_be_proved_says_why(proof, name):
    """If this fails with a newer diffusers: the family can be proved now; give its sizes to support/binding.py."""
    found = proof["families"][name]
    assert found["faults"] == []
    assert found["unproved"].startswith("diffusers ")


def test_the_page_of_the_families_is_the_proof(proof):
    assert PAGE.read_text() == proof["page"], "run python -m support.binding --write"


def test_what_does_not_bind_is_named():
    faults = python("-c", BROKEN).splitlines()
    assert sorted(line for line in faults if line.startswith(("'", "of "))) == [
        "'blocks.gone' is unknown",
        "'blocks.to_k' lands in 'blocks.w2.weight', its weight is loaded into 'blocks.to_qkv.weight'",
        "'blocks.w1' is (4, 4) in the trainer, (8, 4) in the engine",
        "of the rows of 'blocks.to_qkv.weight', pairs are for [(0, 4)]",
    ]
