"""The environment variable that selects the arithmetic, and the scale of a pair."""

import math
import re

import pytest

from sgld_lora_merge.adapter.precision import (
    PRECISION_VARIABLE,
    Precision,
    checked_scale,
    precision_from_environment,
    scale_of,
)
from sgld_lora_merge.errors import LoraMergeError, RequestError


def test_the_variable_is_the_one_of_the_contract():
    assert PRECISION_VARIABLE == "SGLANG_DIFFUSION_LORA_MERGE_FP32"


def test_unset_is_fp32():
    assert precision_from_environment({}) is Precision.FP32


@pytest.mark.parametrize(("value", "precision"), [("1", "fp32"), ("", "fp32"), ("0", "fp16")])
def test_values_of_the_variable(value, precision):
    assert precision_from_environment({PRECISION_VARIABLE: value}) == precision


def test_the_process_environment_is_read_by_default(monkeypatch):
    monkeypatch.setenv(PRECISION_VARIABLE, "0")

    assert precision_from_environment() is Precision.FP16


@pytest.mark.parametrize("value", ["true", "fp16", "2", " 1", "1 ", "00", "yes", "False", "-1"])
def test_any_other_value_is_an_error_that_names_variable_and_value(value):
    with pytest.raises(LoraMergeError) as error:
        precision_from_environment({PRECISION_VARIABLE: value})

    assert PRECISION_VARIABLE in str(error.value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("alpha", "rank", "scale"),
    [
        (8, 64, 0.125),
        (0.5, 16, 0.03125),
        (12.5, 1, 12.5),
        (12.5, 16, 0.78125),
        (16, 16, 1.0),
        (-4, 8, -0.5),
        (0, 4, 0.0),
    ],
)
def test_scale_is_alpha_over_rank(alpha, rank, scale):
    """Case S1: an integer alpha is not floored, a fractional one not truncated."""
    assert scale_of(alpha, rank) == scale


@pytest.mark.parametrize("rank", [1, 3, 64])
def test_no_alpha_means_alpha_equal_to_rank(rank):
    assert scale_of(None, rank) == 1.0


@pytest.mark.parametrize("rank", [1, 3, 64])
def test_the_word_rank_means_alpha_equal_to_rank(rank):
    assert scale_of("rank", rank) == 1.0


@pytest.mark.parametrize("alpha", [math.nan, math.inf, -math.inf, 1e39, -1e39])
def test_a_scale_beyond_float32_is_refused_by_value(alpha):
    with pytest.raises(RequestError, match=re.escape(f"lora_alpha {alpha} over rank 1 ")):
        scale_of(alpha, 1)


def test_a_large_alpha_over_a_large_rank_is_a_scale_all_the_same():
    assert scale_of(1e39, 16) == 1e39 / 16


def test_the_error_of_a_scale_names_its_origin():
    with pytest.raises(RequestError, match=r"layer_scaling of 'to_q' gives the scale inf"):
        checked_scale(math.inf, "layer_scaling of 'to_q'")
