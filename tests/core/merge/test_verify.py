"""Whole layers from the pieces of ranks, and single elements within some ulps."""

from __future__ import annotations

import math

import pytest
import torch

from sgld_lora_merge.merge.spans import Span
from sgld_lora_merge.merge.targets import Landing, Target
from sgld_lora_merge.merge.verify import Piece, assemble, sampled, sha256, within


def piece(whole, rows, cols):
    """Rows and columns of a whole weight as one rank holds them."""
    taken = torch.cat([whole[span.start : span.stop] for span in rows])
    taken = torch.cat([taken[:, span.start : span.stop] for span in cols], dim=1)
    return Piece(Target("w", 0, Span(0, taken.shape[0]), rows, cols), taken)


WHOLE = torch.arange(48.0).view(6, 8).bfloat16()
LANDING = Landing((), 6, 8)
ROWS, COLS = (Span(0, 6),), (Span(0, 8),)


@pytest.mark.parametrize(
    "pieces",
    [
        [(ROWS, COLS)],
        [((Span(0, 3),), COLS), ((Span(3, 6),), COLS)],
        [(ROWS, (Span(0, 2), Span(4, 6))), (ROWS, (Span(2, 4), Span(6, 8)))],
        [((Span(3, 6), Span(0, 3)), COLS)],
        [(ROWS, COLS), (ROWS, COLS)],
    ],
    ids=["one rank", "rows", "two segments of columns", "halves swapped", "replicated"],
)
def test_a_layer_is_put_together_from_its_pieces(pieces):
    assert torch.equal(assemble(LANDING, [piece(WHOLE, *each) for each in pieces]), WHOLE)


def test_a_convolution_is_put_together_in_the_shape_of_its_weight():
    weight = WHOLE.view(6, 2, 2, 2)
    whole = assemble(Landing((), 6, 8, (2, 2)), [piece(WHOLE, ROWS, COLS)])
    assert torch.equal(whole, weight)
    assert sha256(whole) == sha256(weight)


def test_a_hole_is_seen_in_the_checksum():
    assert sha256(assemble(LANDING, [piece(WHOLE, (Span(0, 5),), COLS)])) != sha256(WHOLE)


def test_the_checksum_knows_dtype_and_shape():
    assert len({sha256(t) for t in (WHOLE, WHOLE.half(), WHOLE.view(8, 6), WHOLE + 1)}) == 4
    assert sha256(WHOLE.t().contiguous().t()) == sha256(WHOLE)


def test_samples_are_found_where_their_piece_is():
    samples = [(0, 0, 0.0, 0.0), (5, 7, 0.0, 0.0), (9, 0, 0.0, 0.0)]
    low, high = piece(WHOLE, (Span(0, 3),), COLS), piece(WHOLE, (Span(3, 6),), COLS)
    assert sampled([low], samples) == {0: 0.0}
    assert sampled([high], samples) == {1: 47.0}


@pytest.mark.parametrize(
    ("dtype", "ulp_of_one"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10), (torch.float32, 2**-23)]
)
def test_ulps_are_those_of_the_dtype_at_the_live_value(dtype, ulp_of_one):
    assert within(1.0, 1.0 + ulp_of_one, 1, dtype)
    assert not within(1.0, 1.0 + 1.01 * ulp_of_one, 1, dtype)
    assert within(-4.0, -4.0 - 4 * ulp_of_one, 1, dtype)
    assert within(1.0, 1.0, 0, dtype)
    assert not within(1.0, 1.0 + ulp_of_one, 0, dtype)


def test_a_value_of_zero_has_the_smallest_ulp():
    assert within(0.0, 2.0**-24, 1, torch.float16)
    assert not within(0.0, 2.0**-23, 1, torch.float16)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_never_right(value):
    assert not within(value, value, 1, torch.float32)
    assert not within(1.0, value, 1, torch.float32)
