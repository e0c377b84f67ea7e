"""What a push sends, and what it refuses before it sends anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.cli import pushing
from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.trainer.transport import SyncError

PAIR = Pair("x", torch.ones(2, 6), torch.ones(4, 2), 1.0)
PLACE = pushing.Mapped("x", 2, 1.0, "transformer", "x", "x.weight", "bfloat16", "merge")


def update(module=None):
    return pushing.PushedAdapter([PAIR], module, None, "1")


@pytest.fixture
def base(tmp_path):
    save_file({"x.weight": torch.ones(6, 4)}, tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (pushing.Mapped("x", 2, 1.0, fault="unknown layer"), "'x': unknown layer"),
        (pushing.Mapped("x", 2, 1.0, "transformer", "x", "x.weight", "bfloat16", "dynamic"), "no merged weight"),
        (PLACE, r"'x' is \[6, 4\] in the base weights, \[4, 6\] in the adapter"),
    ],
)
def test_what_cannot_be_verified_has_no_expectation(base, place, told):
    with pytest.raises(LoraMergeError, match=told):
        pushing.expectations(update(), base, [place], Precision.FP32)


def test_a_layer_of_another_module_than_the_one_asked_for_does_not_map():
    class Engine:
        def ask(self, _, fields):
            assert fields == {"modules": {"transformer": ["x"]}}
            place = {"module": "transformer_2", "layer": "x", "weight": "x.weight", "sections": [], "shape": [4, 6]}
            return {"modules": {"transformer": {"x": place | {"dtype": "bfloat16", "merge_mode": "merge"}}}}

    assert pushing.mapping(Engine(), update("transformer"))[0].fault == "it belongs to module 'transformer_2'"
    assert pushing.mapping(Engine(), update())[0].fault == ""


def shared_memory():
    return {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}


def test_memory_that_the_engine_has_not_opened_is_freed():
    class Engine:
        def update(self, _):
            assert shared_memory() - before
            raise SyncError("refused", [False])

    before = shared_memory()
    with pytest.raises(SyncError, match="refused"):
        pushing.hand_over(Engine(), update(), [PLACE])
    assert shared_memory() <= before


def test_a_file_goes_in_pieces_and_again_when_it_is_asked_for_again():
    gone = []
    chunks = pushing.Chunks(bytes(2 * pushing.CHUNK + 1), gone.append)
    for _ in range(2):
        assert [len(chunk) for chunk in chunks] == [pushing.CHUNK, pushing.CHUNK, 1]
    assert gone == [pushing.CHUNK, 2 * pushing.CHUNK, 2 * pushing.CHUNK + 1] * 2
