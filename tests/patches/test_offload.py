"""Weights that sglang keeps on the host, as far as a CPU can hold them; tests/gpu/test_states_gpu.py has the rest."""

import pytest
import torch
from torch import nn

pytest.importorskip("sglang.multimodal_gen.runtime.managers.memory_managers.layerwise_offload")

from server_patches.offload import HostWeights
from sgld_lora_merge.merge.spans import Span

WEIGHTS = {"x": torch.zeros(6, 3), "y": torch.zeros(2, 5, dtype=torch.bfloat16)}


def test_of_a_weight_only_the_rows_that_were_merged_are_written_and_its_memory_is_not_the_one_before():
    weights = {name: weight.clone() for name, weight in WEIGHTS.items()}
    host = HostWeights(nn.Module(), weights.__getitem__, weights, torch.device("cpu"))
    with host.opened("x", [Span(0, 2), Span(5, 6)]) as x:
        assert (x.shape, x.dtype) == (weights["x"].shape, weights["x"].dtype)
        x.fill_(torch.nan)
        x[0:2], x[5] = 1, 2
    with host.opened("y", [Span(0, 2)]) as y:
        y.fill_(3)
    host.finish()
    assert x.data_ptr() != y.data_ptr()
    assert weights["x"][:, 0].tolist() == [1, 1, 0, 0, 0, 2]
    assert torch.equal(weights["y"], torch.full((2, 5), 3, dtype=torch.bfloat16))


def test_a_merge_that_fails_leaves_its_weight():
    weights = {name: weight.clone() for name, weight in WEIGHTS.items()}
    host = HostWeights(nn.Module(), weights.__getitem__, weights, torch.device("cpu"))

    def merge():
        with host.opened("x", [Span(0, 6)]) as x:
            x.fill_(1)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        merge()
    host.finish()
    assert torch.equal(weights["x"], WEIGHTS["x"])
