"""Faults that trainers reported in public, and where each one is a test: those whose names begin with its number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CASES = {
    "n1": "every key names a module that the model does not have",
    "n2": "three of a block's four projections are known under their names",
    "n3": "layers are renamed, fused and dropped on their way",
    "n4": "two adapters on one layer, two entries of one name",
    "n5": "an adapter's name within the keys",
    "n6": "kohya's flattened names",
    "n7": "prefixes of original checkpoints, an alpha for each layer",
    "n8": "the engine says no, or there is nothing to send",
    "b1": "a buffer of one pair",
    "b2": "strides, transposed matrices, scalars, empty tensors",
    "b3": "three 16-bit numbers before two 32-bit ones",
    "b4": "a buffer of one byte",
    "s2": "rsLoRA",
    "s3": "rank and alpha of their own for some layers",
    "s4": "DoRA",
    "i1": "a hundred updates, and the sender's memory flat",
    "i3": "an allocator with expandable segments",
    "i7": "updates that are refused before their payload is opened",
}
NAMED = re.compile(r"^def test_((?:[a-z]\d_)+)", re.MULTILINE)


@pytest.fixture(scope="module")
def tested() -> set[str]:
    sources = [file.read_text() for file in Path(__file__).parents[2].rglob("test_*.py")]
    return {case for source in sources for cases in NAMED.findall(source) for case in cases.strip("_").split("_")}


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_a_test_that_bears_its_number(case, tested):
    assert case in tested, CASES[case]
