"""Keys of a PEFT model's state dict to the names of the wire, and tensors to pairs."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from sgld_lora_merge.adapter.names import parse_name
from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.wire.schema import DEFAULT_ADAPTER

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
BASE_LAYER = "base_layer"  # PEFT's name of a layer that it has put an adapter on

# What an adapter adds to a layer, of whatever kind; its name, and the adapter's, in the order of the key.
_ADAPTER_KEY = re.compile(r"(?:^|.*?\.)(?P<kind>lora_[A-Za-z_]+|modules_to_save)(?P<rest>(?:\..+)?)")
_SIDES = ("lora_A", "lora_B")


class LayerPair(NamedTuple):
    """A layer's A ``[rank, in]`` and B ``[out, rank]``, perhaps sharded."""

    a: torch.Tensor
    b: torch.Tensor


class PeftLoRAKeyMapper:
    """Reads the keys of one adapter.

    Args:
        adapter: its name in PEFT; it may hold dots. A key without an adapter's name, as PEFT saves them, is its too.
    """

    def __init__(self, adapter: str = DEFAULT_ADAPTER) -> None:
        self.adapter = adapter

    def is_lora_key(self, key: str) -> bool:
        """Return whether the adapter owns this key, one of a kind that is refused included."""
        match = _ADAPTER_KEY.fullmatch(unwrapped(key))
        if match is None:
            return False
        owner = match["rest"].removesuffix(".weight").removesuffix(".bias").removeprefix(".")
        return owner in ("", self.adapter) or (
            match["kind"] == "modules_to_save" and owner.startswith(f"{self.adapter}.")
        )

    def to_sgld_name(self, key: str) -> str | None:
        """Return ``<layer prefix>.lora_A`` or ``.lora_B``; None for a key of another adapter, or of unknown kind.

        Raises:
            RequestError: a part of the adapter that cannot be sent and must not be dropped in silence: a DoRA
                magnitude, a bias, an embedding, a module that is trained whole.
        """
        if not self.is_lora_key(key):
            return None
        bare = unwrapped(key)
        match = _ADAPTER_KEY.fullmatch(bare)
        assert match is not None
        if match["kind"] == "modules_to_save":
            raise RequestError(f"{key!r} is a module that is trained whole; send it as a full-weight update")
        if match["kind"] not in _SIDES and not _is_refused(bare):
            return None
        parsed = parse_name(bare)
        return f"{parsed.layer}.lora_{parsed.side}"

    def layer_prefix(self, key: str) -> str | None:
        """Return the layer prefix of a key; None and errors as `to_sgld_name`."""
        name = self.to_sgld_name(key)
        return None if name is None else name.rpartition(".")[0]


def is_adapter_key(key: str) -> bool:
    """Return whether some adapter owns this key."""
    return _ADAPTER_KEY.fullmatch(unwrapped(key)) is not None


@functools.lru_cache(maxsize=2**16)  # every sync of a run has the same keys
def unwrapped(key: str) -> str:
    """Return a key without what PEFT, FSDP, checkpointing and torch.compile put into it, wherever that stands."""
    return ".".join(_without_wrappers(key.split(".")))


def collect_lora_layer_groups(
    state_dict: Mapping[str, torch.Tensor], mapper: PeftLoRAKeyMapper
) -> tuple[dict[str, LayerPair], list[str]]:
    """Return the adapter's pairs by layer prefix, sorted, and the keys of the adapter that have no place.

    Keys that the adapter does not own, base weights among them, are left out.

    Raises:
        RequestError: with all keys that `PeftLoRAKeyMapper.to_sgld_name` refuses, all lone sides, and all keys that
            stand for the same tensor.
    """
    sides: dict[str, dict[str, tuple[str, torch.Tensor]]] = {}
    unmapped: list[str] = []
    faults: list[str] = []
    for key, tensor in state_dict.items():
        try:
            name = mapper.to_sgld_name(key)
        except RequestError as error:
            faults.extend(error.faults)
            continue
        if name is None:
            if mapper.is_lora_key(key):
                unmapped.append(key)
            continue
        layer, _, side = name.rpartition(".")
        other = sides.setdefault(layer, {}).setdefault(side, (key, tensor))
        if other[0] != key:
            faults.append(f"{key!r} and {other[0]!r} are both {name!r}")
    for layer, each in sorted(sides.items()):
        faults.extend(f"{layer!r} has no {missing}" for missing in _SIDES if missing not in each)
    if faults:
        raise RequestError(*faults)
    return {layer: LayerPair(*(each[side][1] for side in _SIDES)) for layer, each in sorted(sides.items())}, unmapped


def _without_wrappers(segments: list[str]) -> Iterator[str]:
    skip = False
    for here, following in zip(segments, [*segments[1:], ""], strict=True):
        if here == "base_model" and following == "model":
            skip = True
        elif skip:
            skip = False
        elif here not in WRAPPERS:
            yield here


def _is_refused(name: str) -> bool:
    return name.split(".")[-1] == "bias" or "lora_magnitude_vector" in name or "lora_embedding_" in name
