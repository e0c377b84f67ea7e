"""What a rank keeps of an update that arrives in buckets."""

from __future__ import annotations

import pytest
import torch

from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.merge.staging import StagedPairs, TooMuchStaged


def one(layer):
    """A pair of 16 bytes."""
    return Pair(layer, torch.ones(1, 2), torch.ones(2, 1), 1.0)


def test_staged_pairs_are_copies_by_module():
    x, y, z = one("x"), one("y"), one("z")
    staged = StagedPairs("u", "default", {}, 0).with_bucket({"m": [x]}, 100).with_bucket({"m": [y], "n": [z]}, 100)
    x.a.fill_(7)
    assert {module: [pair.layer for pair in pairs] for module, pairs in staged.pairs.items()} == {
        "m": ["x", "y"],
        "n": ["z"],
    }
    assert torch.equal(staged.pairs["m"][0].a, torch.ones(1, 2))
    assert staged.nbytes == 48
    assert all(update.whole for update in staged.updates())


def test_staged_bytes_have_a_limit_and_a_bucket_beyond_it_leaves_no_trace():
    staged = StagedPairs("u", "default", {}, 0).with_bucket({"m": [one("x")]}, 16)
    with pytest.raises(TooMuchStaged, match="would stage 32 bytes, the limit is 31"):
        staged.with_bucket({"m": [one("y")]}, 31)
    assert staged.nbytes == 16
