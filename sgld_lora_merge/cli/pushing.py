"""Sending an adapter: what would become of it, the update itself, and whether the engine then has the right weights."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import save

from sgld_lora_merge.adapter_file import LAYER_SCALING
from sgld_lora_merge.cli.adapter import named_tensors
from sgld_lora_merge.cli.base import BaseWeights
from sgld_lora_merge.errors import LoraMergeError, summarise
from sgld_lora_merge.pairs import Pair
from sgld_lora_merge.payload import FLATTENED_BUCKET, pack, withdraw
from sgld_lora_merge.precision import Precision
from sgld_lora_merge.protocol import LORA_MERGE
from sgld_lora_merge.trainer.expected import Expectation, expected_merged
from sgld_lora_merge.trainer.names import LayerPair
from sgld_lora_merge.trainer.transport import Answer, SyncError, Transport

CHUNK = 2**20  # bytes of an upload between two steps of its progress


@dataclass(frozen=True)
class Mapped:
    """A pair and its place in the engine.

    Attributes:
        target: module, weight and sections; empty where it has none.
        dtype: of that weight.
        merge_mode: "merge", or "dynamic" where the weight stays and a low-rank branch is added.
        fault: why it cannot land there; empty where it can.
    """

    layer: str
    rank: int
    scale: float
    target: str = ""
    dtype: str = ""
    merge_mode: str = ""
    fault: str = ""


@dataclass(frozen=True)
class Update:
    """An adapter to send.

    Attributes:
        module: of the engine's pipeline.
        adapter: which of the module's adapters it is; None is the default one.
        version: what the engine shall report as ``weight_version``.
    """

    pairs: Sequence[Pair]
    module: str
    adapter: str | None
    version: str

    def fields(self) -> dict[str, str | None]:
        """What an update has whichever way it is sent; with an id it may be repeated, and is the whole adapter."""
        update_id = f"{self.version}-{uuid.uuid4().hex}"
        return {"adapter": self.adapter, "weight_version": self.version, "update_id": update_id}

    def scaling(self) -> dict[str, float]:
        return {pair.layer: pair.scale for pair in self.pairs}


class Chunks:
    """A file in pieces, which tells how many bytes have gone; each iteration begins anew."""

    def __init__(self, file: bytes, gone: Callable[[int], None]) -> None:
        self._file, self._gone = file, gone

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self._file), CHUNK):
            yield self._file[start : start + CHUNK]
            self._gone(min(start + CHUNK, len(self._file)))


def mapping(engine: Transport, update: Update) -> list[Mapped]:
    """Where every pair would land; nothing is changed."""
    asked = {update.module: [pair.layer for pair in update.pairs]}
    places = engine.ask("/lora_merge/resolve", {"modules": asked})["modules"][update.module]
    found = []
    for pair in update.pairs:
        place, fault = places[pair.layer], ""
        if "fault" in place:
            found.append(Mapped(pair.layer, pair.rank, pair.scale, fault=place["fault"]))
            continue
        sections = "" if place["sections"] == [0] else f"[{', '.join(map(str, place['sections']))}]"
        if place["shape"] != list(pair.shape):
            fault = f"lora_B @ lora_A is {list(pair.shape)}, the layer {place['shape']}"
        target = f"{place['module']}.{place['weight']}{sections}"
        found.append(Mapped(pair.layer, pair.rank, pair.scale, target, place["dtype"], place["merge_mode"], fault))
    return found


def upload(engine: Transport, update: Update, gone: Callable[[int], None], begin: Callable[[int], None]) -> Answer:
    """Send it as a safetensors file.

    Args:
        begin: told how many bytes there are to send.
        gone: told how many have gone, again and again.
    """
    file = save(dict(named_tensors(update.pairs)), {LAYER_SCALING: json.dumps(update.scaling())})
    begin(len(file))
    fields = {name: value for name, value in update.fields().items() if value is not None}
    return engine.update({"target_module": update.module, **fields}, Chunks(file, gone))


def hand_over(engine: Transport, update: Update) -> Answer:
    """Send it as handles of shared memory, to an engine on this machine."""
    payload, buffers = pack({update.module: named_tensors(update.pairs)})
    try:
        return engine.update(
            {
                "serialized_named_tensors": [payload],
                "load_format": FLATTENED_BUCKET,
                "target_modules": [update.module],
                "weight_update_mode": LORA_MERGE,
                "layer_scaling": {update.module: update.scaling()},
                **update.fields(),
            }
        )
    except SyncError as error:
        if not any(error.payload_opened):
            withdraw(payload, buffers)
        raise


def expectations(
    update: Update, base: BaseWeights, known: Sequence[Mapped], precision: Precision
) -> dict[str, Expectation]:
    """What every layer must be once the update is live, by its name.

    Args:
        base: weights of the module, under the adapter's layer names.
        known: where the pairs of the update land.
        precision: that the engine merges in.

    Raises:
        LoraMergeError: something does not land, has no base weight, or is not merged.
    """
    if faults := [f"{each.layer!r}: {each.fault}" for each in known if each.fault]:
        raise LoraMergeError(summarise(faults))
    if any(each.merge_mode != "merge" for each in known):
        raise LoraMergeError("the engine adds the adapter while it generates: there is no merged weight to verify")
    expected = {}
    for pair, place in zip(update.pairs, known, strict=True):
        weight, sides = base.of(pair.layer), LayerPair(pair.a, pair.b)
        if tuple(weight.flatten(1).shape) != pair.shape:
            raise LoraMergeError(
                f"{pair.layer!r} is {list(weight.shape)} in the base weights, {list(pair.shape)} in the adapter"
            )
        expected[pair.layer] = expected_merged(
            weight, sides, pair.scale, getattr(torch, place.dtype), precision, seed=0
        )
    return expected


def verify(engine: Transport, update: Update, expected: Mapping[str, Expectation]) -> str:
    """The engine's sentence, once it has compared every layer with what it must be.

    Raises:
        LoraMergeError: something is not what it must be.
    """
    message: str = engine.ask("/lora_merge/verify", {"modules": {update.module: expected}})["message"]
    return message
