"""Mutations of good and hostile inputs: what reads a caller's bytes takes or refuses them, and raises nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.targets import TARGETS, layout

SEEDS = {name: target.seeds() for name, target in TARGETS.items()}
CHANGES = st.lists(st.tuples(st.sampled_from(["set", "insert", "delete"]), st.floats(0, 1), st.binary(max_size=8)))


def changed(seed, changes):
    data = bytearray(seed)
    for kind, place, new in changes:
        at = int(place * len(data))
        end = at + (0 if kind == "insert" else len(new))
        data[at:end] = b"" if kind == "delete" else new
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_what_a_caller_sends_is_read_or_refused(name, data):
    seed = data.draw(st.sampled_from(SEEDS[name]))
    TARGETS[name].read(changed(seed, data.draw(CHANGES)))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)
ROW = st.tuples(
    st.text() | ANYTHING,
    st.sampled_from(["float32", "torch.bfloat16", "uint8", "nn"]) | ANYTHING,
    st.lists(st.integers(0, 8), max_size=4) | ANYTHING,
    st.integers(0, 64) | ANYTHING,
    st.integers(0, 64) | ANYTHING,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(rows=st.lists(ROW, max_size=4))
def test_a_layout_of_any_values_is_read_or_refused(rows):
    import json

    layout(b"\x40\x00" + json.dumps(rows).encode(errors="replace"))
