"""Flattened layer names and their spellings."""

from __future__ import annotations

import pytest

from sgld_lora_merge.adapter.names import MOST_WORDS, segments_of, spellings

NAMES = ["transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.add_q_proj", "transformer_blocks.0.ff.net.0.proj"]


@pytest.mark.parametrize("name", [*NAMES, "x._orig_mod.to_q"])
def test_a_flattened_name_is_spelled_with_the_modules_own_segments(name):
    flattened = "lora_unet_" + name.replace(".", "_")
    assert list(spellings(flattened, segments_of([*NAMES, name]))) == [name]


def test_numbers_need_not_be_known():
    assert list(spellings("lora_transformer_transformer_blocks_17_attn_to_q", segments_of(NAMES))) == [
        "transformer_blocks.17.attn.to_q"
    ]


def test_every_spelling_is_given():
    assert set(spellings("lora_unet_a_b_c", {"a", "b", "c", "a_b", "b_c"})) == {"a.b.c", "a_b.c", "a.b_c"}


@pytest.mark.parametrize("name", ["lora_unet_other_0", "lora_unet_", "a_b", "lora_te1_a_b", "lora_unet_a.b", ""])
def test_other_names_have_none(name):
    assert list(spellings(name, {"a", "b"})) == []


def test_a_name_of_too_many_words_has_none():
    """It would have 2 ** 1000 of them."""
    assert list(spellings("lora_unet_" + "_".join("a" * MOST_WORDS), {"a"}))
    assert list(spellings("lora_unet_" + "_".join("a" * 1000), {"a", "a_a"})) == []
