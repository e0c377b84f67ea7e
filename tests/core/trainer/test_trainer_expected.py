"""What a trainer expects of the engine's weights, against what the merge gives."""

from __future__ import annotations

import pytest
import torch

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.kernels import reference
from sgld_lora_merge.merge.kernels.reference import MergeJob, Term
from sgld_lora_merge.merge.spans import Span
from sgld_lora_merge.merge.verify import sha256, within
from sgld_lora_merge.trainer.expected import SAMPLES, expected_base, expected_merged
from sgld_lora_merge.trainer.names import LayerPair

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def case(dtype):
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(shape, generator=generator) for shape in ((24, 40), (4, 40), (24, 4)))
    return weight.to(dtype), LayerPair(a.bfloat16(), b.bfloat16())


def merged(weight, pair, scale, precision):
    out = torch.empty_like(weight)
    rows, columns = (Span(0, size) for size in weight.shape)
    job = MergeJob(out, weight, (Term(pair.a, pair.b, scale, (rows,), (columns,)),))
    reference.merge([job], precision, reference.scratch_for([job], precision))
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.5, 0.7071])
def test_fp16_mode_is_expected_bit_for_bit(dtype, scale):
    weight, pair = case(dtype)
    live = merged(weight, pair, scale, Precision.FP16)
    assert expected_merged(weight, pair, scale, dtype, Precision.FP16, 1) == {"sha256": sha256(live)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.5, 0.7071])
def test_fp32_mode_is_expected_by_samples_that_the_merge_is_within_and_the_base_is_not(dtype, scale):
    weight, pair = case(dtype)
    live = merged(weight, pair, scale, Precision.FP32)
    samples = expected_merged(weight, pair, scale, dtype, Precision.FP32, 1)["samples"]
    assert len(samples) == SAMPLES
    assert all(within(float(live[row, column]), value, ulps, dtype) for row, column, value, ulps in samples)
    assert not all(within(float(weight[row, column]), value, ulps, dtype) for row, column, value, ulps in samples)
    others = expected_merged(weight, pair, scale, dtype, Precision.FP32, 2)["samples"]
    assert [sample[:2] for sample in others] != [sample[:2] for sample in samples]


def test_the_base_is_expected_in_the_engines_dtype():
    weight, _ = case(torch.float32)
    assert expected_base(weight, torch.bfloat16) == {"sha256": sha256(weight.bfloat16())}


def test_a_convolution_is_expected_in_its_own_shape():
    weight, pair = case(torch.bfloat16)
    kernel = LayerPair(pair.a.view(4, 10, 2, 2), pair.b.view(24, 4, 1, 1))
    told = expected_merged(weight.view(24, 10, 2, 2), kernel, 1.5, torch.bfloat16, Precision.FP16, 1)
    live = merged(weight, pair, 1.5, Precision.FP16).view(24, 10, 2, 2)
    assert told == {"sha256": sha256(live)}
