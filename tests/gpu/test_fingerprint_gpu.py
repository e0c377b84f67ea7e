"""Fingerprints on a GPU are those of the CPU, and their kernel runs."""

from __future__ import annotations

import pytest
import torch

from sgld_lora_merge import pair_up
from sgld_lora_merge.merge import kernels
from sgld_lora_merge.merge.fingerprint import SentUpdates, differences, fingerprint_of
from sgld_lora_merge.merge.kernels import reference, word_tiles
from sgld_lora_merge.merge.plan import ModuleUpdate


@pytest.mark.parametrize("nbytes", [0, 1, 8, 12, 2**14 + 3, 2**26 + 8, 2**28 + 5])
def test_the_fingerprint_is_that_of_the_cpu(nbytes):
    assert kernels._code_for(torch.device("cuda", 0)) is not reference
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    assert fingerprint_of(data) == fingerprint_of(data.cpu())


def test_words_beyond_the_first_two_billion_have_places_of_their_own():
    data = torch.randint(-(2**63), 2**63 - 1, (1000,), dtype=torch.int64, device="cuda")
    start = 2**31 - 500
    assert word_tiles.word_sum(data, start).item() == kernels.word_sum(data.cpu(), start).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_updates_of_ranks_differ_by_one_bit(dtype):
    named = [(f"{i}.lora_{side}", torch.randn(16, 64, device="cuda").to(dtype)) for i in range(50) for side in "A"]
    named += [(f"{i}.lora_B", torch.randn(64, 16, device="cuda").to(dtype)) for i in range(50)]
    other = [(name, tensor.clone()) for name, tensor in named]
    one, two = (SentUpdates([ModuleUpdate("m", pair_up(each).pairs, whole=True)]) for each in (named, other))
    assert one.digest == two.digest
    other[70][1].view(torch.uint8)[0, 0] ^= 1
    changed = SentUpdates([ModuleUpdate("m", pair_up(other).pairs, whole=True)])
    assert changed.digest != one.digest
    (fault,) = differences([one.prints, changed.prints])
    assert "another lora_B for '20'" in fault
