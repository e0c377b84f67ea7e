"""The files of an adapter: one, shards with an index, or a pickle, which is not read."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from sgld_lora_merge.adapter.formats import load_pairs
from sgld_lora_merge.errors import LoraMergeError

FIRST, SECOND = (f"adapter_model-0000{number}-of-00002.safetensors" for number in (1, 2))
INDEX = "adapter_model.safetensors.index.json"
TENSORS = {
    f"base_model.model.{layer}.lora_{side}.weight": torch.randn(shape)
    for layer in "xy"
    for side, shape in (("A", (2, 6)), ("B", (4, 2)))
}
X_A, X_B, Y_A, Y_B = TENSORS


def saved(folder, shards, *, places=None, index=INDEX):
    """A folder with a config, shards of these tensors each, and an index of them or of other places."""
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6}))
    for shard, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, folder / shard)
    if places is None:
        places = {name: shard for shard, names in shards.items() for name in names}
    if index is not None:
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.mark.parametrize("index", [INDEX, "model.safetensors.index.json"])
def test_shards_are_one_adapter(tmp_path, index):
    """A pair may be in two of them."""
    pairs = load_pairs(saved(tmp_path, {FIRST: [X_A, Y_B], SECOND: [X_B, Y_A]}, index=index))
    assert [(pair.layer, pair.scale) for pair in pairs] == [("x", 3.0), ("y", 3.0)]
    assert torch.equal(pairs[0].a, TENSORS[X_A])
    assert torch.equal(pairs[0].b, TENSORS[X_B])
    with pytest.raises(LoraMergeError, match=f"{FIRST} is one of 2 shards of an adapter: name their folder"):
        load_pairs(tmp_path / FIRST)


def test_shards_of_huggingface_hub_are_read(tmp_path):
    from huggingface_hub import save_torch_state_dict

    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6}))
    pattern = "adapter_model{suffix}.safetensors"
    save_torch_state_dict(dict(TENSORS), tmp_path, filename_pattern=pattern, max_shard_size=100)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert [pair.layer for pair in load_pairs(tmp_path)] == ["x", "y"]


def test_a_shard_that_is_missing_is_named(tmp_path):
    saved(tmp_path, {FIRST: [X_A, X_B], SECOND: [Y_A, Y_B]})
    (tmp_path / SECOND).unlink()
    with pytest.raises(LoraMergeError, match=f"lacks {SECOND}, of which its index says tensors"):
        load_pairs(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {X_A: FIRST, X_B: FIRST}}))
    with pytest.raises(LoraMergeError, match=f"names 1 shards, and {FIRST} is one of 2: the others are not in it"):
        load_pairs(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(LoraMergeError, match=f"has {FIRST} and no {INDEX}"):
        load_pairs(tmp_path)


def test_a_tensor_in_two_shards_or_in_none_is_named(tmp_path):
    places = {X_A: FIRST, X_B: FIRST, Y_A: SECOND, Y_B: SECOND}
    saved(tmp_path, {FIRST: [X_A, X_B], SECOND: [X_A, Y_A, Y_B]}, places=places)
    with pytest.raises(LoraMergeError, match=f"{SECOND} has {X_A}, which the index puts elsewhere or nowhere"):
        load_pairs(tmp_path)
    saved(tmp_path, {FIRST: [X_A, X_B], SECOND: [Y_A]}, places=places)
    with pytest.raises(LoraMergeError, match=f"{SECOND} lacks {Y_B}, which the index puts there"):
        load_pairs(tmp_path)


@pytest.mark.parametrize("places", [[], {}, {X_A: 3}, {X_A: "../" + FIRST}, {X_A: "adapter.safetensors"}], ids=str)
def test_an_index_that_names_no_shards_beside_it_is_refused(tmp_path, places):
    saved(tmp_path, {FIRST: [X_A, X_B]}, places=places)
    with pytest.raises(LoraMergeError, match="has no weight_map of tensors to shards in its folder"):
        load_pairs(tmp_path)


def test_a_pickle_is_not_read_and_the_line_that_is_told_converts_it(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6}))
    torch.save(TENSORS, tmp_path / "adapter_model.bin")
    for path in (tmp_path, tmp_path / "adapter_model.bin"):
        with pytest.raises(
            LoraMergeError, match=r"adapter_model[.]bin is a pickle, and pickles are not read"
        ) as caught:
            load_pairs(path)
    line = str(caught.value).partition("in Python: ")[2]
    subprocess.run([sys.executable, "-W", "ignore", "-c", line], cwd=tmp_path, check=True)
    assert [(pair.layer, pair.scale) for pair in load_pairs(tmp_path)] == [("x", 3.0), ("y", 3.0)]
