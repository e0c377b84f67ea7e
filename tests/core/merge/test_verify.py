"""Whole layers from the pieces of ranks, and single elements within some ulps."""

from __future__ import annotations

import math

import pytest
import torch

from sgld_lora_merge.merge import weight_sums
from sgld_lora_merge.merge.kernels import word_sum
from sgld_lora_merge.merge.spans import Span
from sgld_lora_merge.merge.targets import Landing, Target
from sgld_lora_merge.merge.verify import Piece, assemble, block_sums, sampled, sha256, ulp, ulps, within
from sgld_lora_merge.merge.weight_sums import WeightSum, read_sums, read_weight_sum, total_of


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
    assert sampled([([low], samples), ([], []), ([high], samples)]) == [{0: 0.0}, {}, {1: 47.0}]
    assert sampled([([low, high], samples)]) == [{0: 0.0, 1: 47.0}]


@pytest.mark.parametrize(
    ("dtype", "ulp_of_one"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10), (torch.float32, 2**-23)]
)
def test_ulps_are_those_of_the_dtype_at_the_live_value(dtype, ulp_of_one):
    assert within(1.0, 1.0 + ulp_of_one, 1, dtype)
    assert not within(1.0, 1.0 + 1.01 * ulp_of_one, 1, dtype)
    assert within(-4.0, -4.0 - 4 * ulp_of_one, 1, dtype)
    assert within(1.0, 1.0, 0, dtype)
    assert not within(1.0, 1.0 + ulp_of_one, 0, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ulps_of_many_values_are_those_of_each(dtype):
    values = torch.tensor([0.0, 1.0, -1.5, 2.0**-30, 1e-40, 65504.0, -0.1], dtype=torch.float64)
    assert ulps(values, dtype).tolist() == [ulp(value, dtype) for value in values.tolist()]


def test_a_value_of_zero_has_the_smallest_ulp():
    assert within(0.0, 2.0**-24, 1, torch.float16)
    assert not within(0.0, 2.0**-23, 1, torch.float16)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_never_right(value):
    assert not within(value, value, 1, torch.float32)
    assert not within(1.0, value, 1, torch.float32)


PARTED = {
    "one rank": [(ROWS, COLS)],
    "rows": [((Span(0, 3),), COLS), ((Span(3, 6),), COLS)],
    "columns that are no whole words": [(ROWS, (Span(0, 3),)), (ROWS, (Span(3, 8),))],
    "two segments of columns": [(ROWS, (Span(0, 2), Span(4, 6))), (ROWS, (Span(2, 4), Span(6, 8)))],
    "halves swapped": [((Span(3, 6), Span(0, 3)), COLS)],
    "replicated": [(ROWS, COLS), (ROWS, COLS)],
}


def sum_of(pieces, dtype):
    parts = [block_sums(piece(whole, *each), 8, dtype) for whole, each in pieces]
    return total_of([dict(zip(part, read_sums(list(part.values())), strict=True)) for part in parts], 6, 8)


@pytest.mark.parametrize("chunk", [1, 2**22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", PARTED.values(), ids=PARTED)
def test_the_sum_of_a_weight_is_the_same_however_it_is_cut(monkeypatch, parts, dtype, chunk):
    monkeypatch.setattr(weight_sums, "CHUNK", chunk)
    whole = WHOLE.to(dtype)
    words = whole.view(torch.int32 if dtype is torch.float32 else torch.int16).to(torch.int64).flatten()
    assert sum_of([(whole, each) for each in parts], dtype) == int(word_sum(words)) % 2**64


def test_the_sum_of_a_weight_changes_with_any_bit_and_any_exchange():
    other = WHOLE.clone()
    other.view(torch.int16)[4, 5] ^= 1
    swapped = WHOLE[torch.tensor([1, 0, 2, 3, 4, 5])]
    sums = {sum_of([(each, (ROWS, COLS))], torch.bfloat16) for each in (WHOLE, other, swapped)}
    assert len(sums) == 3


def test_parts_that_differ_or_leave_a_hole_have_no_sum():
    assert sum_of([(WHOLE, (ROWS, COLS)), (WHOLE + 1, (ROWS, COLS))], torch.bfloat16) is None
    assert sum_of([(WHOLE, ((Span(0, 5),), COLS))], torch.bfloat16) is None


def test_the_sum_of_a_weight_as_text():
    one = WeightSum("bfloat16", 6, 8, -1)
    assert str(one) == "el64:bfloat16:6x8:ffffffffffffffff"
    assert read_weight_sum(str(one)) == WeightSum("bfloat16", 6, 8, 2**64 - 1)
    for wrong in ("sm64:8:0000000000000000", "el64:int8:6x8:0000000000000000", "el64:float16:6x8:0"):
        with pytest.raises(ValueError, match="no sum of a weight"):
            read_weight_sum(wrong)
