"""Packing of layers into buckets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgld_lora_merge.trainer.buckets import flattened_nbytes, plan_buckets
from sgld_lora_merge.wire.bucket import flatten


def test_the_count_is_what_a_flattened_bucket_has():
    tensors = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2), torch.zeros(33, dtype=torch.uint8)]
    flat, _ = flatten((str(i), tensor) for i, tensor in enumerate(tensors))
    assert flattened_nbytes(tensors) == flat.numel()


def test_b1_a_buffer_of_one_pair_keeps_pairs_whole():
    assert plan_buckets({"a.x": 32, "b.x": 32, "c.x": 32}, 32) == [["a.x"], ["b.x"], ["c.x"]]


def test_projections_of_one_parent_stay_together_whatever_stands_between_them():
    sizes = {"0.attn.to_k": 16, "0.attn.to_out.0": 16, "0.attn.to_q": 16, "0.attn.to_v": 16, "1.attn.to_q": 16}
    assert plan_buckets(sizes, 64) == [
        ["0.attn.to_k", "0.attn.to_q", "0.attn.to_v", "0.attn.to_out.0"],
        ["1.attn.to_q"],
    ]


def test_the_bucket_ends_before_the_group_that_would_exceed_it_and_a_larger_group_is_alone():
    assert plan_buckets({"a.x": 16, "b.x": 100, "c.x": 16, "d.x": 16}, 40) == [["a.x"], ["b.x"], ["c.x", "d.x"]]


@pytest.mark.parametrize("size", [0, -1])
def test_a_buffer_of_nothing_is_refused(size):
    with pytest.raises(ValueError, match=str(size)):
        plan_buckets({"a": 1}, size)


@given(st.dictionaries(st.text("ab.", min_size=1, max_size=6), st.integers(1, 100), max_size=20), st.integers(1, 200))
def test_b4_every_layer_once_no_bucket_empty_and_none_too_large_but_for_a_single_group(sizes, cap):
    buckets = plan_buckets(sizes, cap)
    assert sorted(layer for bucket in buckets for layer in bucket) == sorted(sizes)
    for bucket in buckets:
        parents = {layer.rpartition(".")[0] for layer in bucket}
        assert parents
        assert sum(sizes[layer] for layer in bucket) <= cap or len(parents) == 1
