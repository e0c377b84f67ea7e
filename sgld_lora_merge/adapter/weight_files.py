"""Which files hold the tensors of an adapter: one, or the shards of which an index says where each tensor is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sgld_lora_merge.errors import LoraMergeError, cut, name_some, summarise

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
INDEXES = (f"{WEIGHTS}.index.json", "model.safetensors.index.json")  # huggingface_hub's, and transformers'
PICKLE = "adapter_model.bin"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SHARD = re.compile(r".+-\d{5}-of-(\d{5})\.safetensors")


def weight_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files whose tensors together are the adapter, and an index: tensor name -> file name, {} for one file.

    Args:
        path: a folder that PEFT or transformers saved, or a safetensors file.

    Raises:
        LoraMergeError: there is nothing, a pickle, a part of an adapter only, or an index that does not fit.
    """
    if path.is_file():
        if (count := _shards_with(path.name)) > 1:
            raise LoraMergeError(f"{path} is one of {count} shards of an adapter: name their folder")
        return [path], {}
    if not path.exists():
        raise LoraMergeError(f"{path} does not exist")
    shards = [file.name for file in sorted(path.glob("adapter_model-*-of-*.safetensors"))]
    index = next((path / name for name in INDEXES if (path / name).is_file()), None)
    if (path / WEIGHTS).is_file():
        files, places = [path / WEIGHTS], {}
    elif shards:
        if index is None:
            raise LoraMergeError(f"{path} has {name_some(shards)} and no {INDEXES[0]}, which says what is in which")
        places = _places(index)
        files = [path / name for name in sorted(set(places.values()))]
    elif (path / PICKLE).is_file():
        raise LoraMergeError(pickle_advice(path / PICKLE))
    else:
        files, places = [], {}
    if missing := [name for name in (CONFIG, *([] if files else [WEIGHTS])) if not (path / name).is_file()]:
        raise LoraMergeError(
            f"{path} has no {' and no '.join(missing)}: save the adapter with PEFT's save_pretrained, or name a file"
        )
    return files, places


def pickle_advice(file: Path) -> str:
    """Return why a pickle is not read, and how to make a safetensors file of it."""
    line = (
        "import torch, safetensors.torch as s; "
        f"s.save_file({{k: v.contiguous() for k, v in torch.load({file.name!r}, weights_only=True).items()}}, "
        f"{file.with_suffix('.safetensors').name!r})"
    )
    return f"{file} is a pickle, and pickles are not read: if you trust it, convert it in its folder, in Python: {line}"


def check_shard(shard: Path, found: Sequence[str], places: Mapping[str, str]) -> None:
    """Check that a shard has the tensors that the index says, so that none is missing and none comes twice.

    Raises:
        LoraMergeError: with the tensors of which there are too many or too few.
    """
    said = {name for name, file in places.items() if file == shard.name}
    faults = []
    if lacking := sorted(said - set(found)):
        faults.append(f"{shard} lacks {name_some(lacking)}, which the index puts there")
    if beyond := sorted(set(found) - said):
        faults.append(f"{shard} has {name_some(beyond)}, which the index puts elsewhere or nowhere")
    if faults:
        raise LoraMergeError(summarise(faults))


def read_json(text: str, source: str) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        LoraMergeError: it is none; the message names the source.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise LoraMergeError(f"{source} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise LoraMergeError(f"{source} is not a JSON object")
    return content


def _places(index: Path) -> dict[str, str]:
    """Return tensor name -> file name, of shards that all are there."""
    places = read_json(index.read_text(encoding="utf-8"), str(index)).get("weight_map")
    if not isinstance(places, dict) or not places or not all(map(_is_shard, places.values())):
        raise LoraMergeError(f"{index} has no weight_map of tensors to shards in its folder")
    shards = sorted(set(places.values()))
    if missing := [name for name in shards if not (index.parent / name).is_file()]:
        raise LoraMergeError(f"{index.parent} lacks {name_some(missing)}, of which its index says tensors")
    if wrong := [name for name in shards if _shards_with(name) != len(shards)]:
        raise LoraMergeError(
            f"{index} names {len(shards)} shards, and {cut(wrong[0])} is one of {_shards_with(wrong[0])}: the others "
            "are not in it"
        )
    return places


def _is_shard(name: object) -> bool:
    return isinstance(name, str) and "/" not in name and _shards_with(name) > 0


def _shards_with(name: str) -> int:
    """Return of how many shards a file of this name is one; 0 where it is none."""
    match = _SHARD.fullmatch(name)
    return int(match[1]) if match else 0
