"""Send an adapter: show where it would land, push it, and check that the engine then has the right weights."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sgld_lora_merge.adapter.file import adapter_bytes
from sgld_lora_merge.adapter.formats import named_tensors
from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.cli.base import BaseWeights
from sgld_lora_merge.errors import LoraMergeError, name_some, summarise
from sgld_lora_merge.trainer.expected import Expectation, expected_merged
from sgld_lora_merge.trainer.names import LayerPair
from sgld_lora_merge.trainer.transport import Answer, SyncError, Transport
from sgld_lora_merge.wire.payload import FLATTENED_BUCKET, pack, withdraw
from sgld_lora_merge.wire.schema import DEFAULT_MODULE, LORA_MERGE, RESOLVE_ROUTE, VERIFY_ROUTE

CHUNK = 2**20  # bytes of an upload between two steps of its progress


@dataclass(frozen=True)
class Mapped:
    """A pair and its place in the engine.

    Attributes:
        module, name: where that is, and what the layer is called there; empty where it has no place.
        target: the weight, and which sections of it.
        dtype: of that weight.
        merge_mode: "merge", or "dynamic" where the weight stays and a low-rank branch is added.
        fault: why it cannot land there; empty where it can.
    """

    layer: str
    rank: int
    scale: float
    module: str = ""
    name: str = ""
    target: str = ""
    dtype: str = ""
    merge_mode: str = ""
    fault: str = ""


@dataclass(frozen=True)
class PushedAdapter:
    """An adapter to send.

    Attributes:
        module: of the engine's pipeline; None leaves that to the prefixes of the model family's routes.
        adapter: which of the module's adapters it is; None is the default one.
        version: what the engine shall report as ``weight_version``.
    """

    pairs: Sequence[Pair]
    module: str | None
    adapter: str | None
    version: str

    def fields(self) -> dict[str, str | None]:
        """Return the fields of an update; with an id it may be repeated, and is the module's whole adapter."""
        update_id = f"{self.version}-{uuid.uuid4().hex}"
        return {"adapter": self.adapter, "weight_version": self.version, "update_id": update_id}


class Chunks:
    """A file in pieces that reports how many bytes have gone; each iteration begins anew."""

    def __init__(self, file: bytes, gone: Callable[[int], None]) -> None:
        self._file, self._gone = file, gone

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self._file), CHUNK):
            yield self._file[start : start + CHUNK]
            self._gone(min(start + CHUNK, len(self._file)))


def mapping(engine: Transport, update: PushedAdapter) -> list[Mapped]:
    """Ask the engine where every pair would land; nothing is changed."""
    module = update.module or DEFAULT_MODULE
    asked = {module: [pair.layer for pair in update.pairs]}
    places = engine.ask(RESOLVE_ROUTE, {"modules": asked})["modules"].get(module, {})
    if missing := [pair.layer for pair in update.pairs if pair.layer not in places]:
        raise SyncError(f"the engine does not say where layers would land: {name_some(missing)}")
    found = []
    for pair in update.pairs:
        place, fault = places[pair.layer], ""
        if "fault" in place:
            found.append(Mapped(pair.layer, pair.rank, pair.scale, fault=place["fault"]))
            continue
        sections = f"[{', '.join(map(str, place['sections']))}]" if place["sections"] else ""
        if update.module not in (None, place["module"]):
            fault = f"it belongs to module {place['module']!r}"
        elif place["shape"] != list(pair.shape):
            fault = f"lora_B @ lora_A is {list(pair.shape)}, the layer {place['shape']}"
        there = place["module"], place["layer"], f"{place['weight']}{sections}", place["dtype"], place["merge_mode"]
        found.append(Mapped(pair.layer, pair.rank, pair.scale, *there, fault))
    return found


def upload(
    engine: Transport, update: PushedAdapter, gone: Callable[[int], None], begin: Callable[[int], None]
) -> Answer:
    """Send it as a safetensors file.

    Args:
        begin: called with the number of bytes to send.
        gone: called with the number of bytes that have gone, again and again.
    """
    file = adapter_bytes(dict(named_tensors(update.pairs)), _scaling(update.pairs))
    begin(len(file))
    fields = {name: value for name, value in update.fields().items() if value is not None}
    return engine.update({"target_module": update.module, **fields}, Chunks(file, gone))


def hand_over(engine: Transport, update: PushedAdapter, known: Sequence[Mapped]) -> Answer:
    """Send it as handles of shared memory, to an engine on this machine.

    Args:
        known: where its pairs land; those without a place are sent too, for the engine to refuse.
    """
    pairs: dict[str, list[Pair]] = {}
    for pair, place in zip(update.pairs, known, strict=True):
        pairs.setdefault(update.module or place.module or DEFAULT_MODULE, []).append(pair)
    payload, buffers = pack({module: named_tensors(own) for module, own in pairs.items()})
    try:
        return engine.update(
            {
                "serialized_named_tensors": [payload],
                "load_format": FLATTENED_BUCKET,
                "target_modules": list(pairs),
                "weight_update_mode": LORA_MERGE,
                "layer_scaling": {module: _scaling(own) for module, own in pairs.items()},
                **update.fields(),
            }
        )
    except SyncError as error:
        if not any(error.payload_opened):
            withdraw(payload, buffers)
        raise


def expectations(
    update: PushedAdapter, base: Path, known: Sequence[Mapped], precision: Precision
) -> dict[str, dict[str, Expectation]]:
    """Return what every layer must be once the update is live, by module and by the sender's name of it.

    Args:
        base: of base weights, as in `BaseWeights`.
        known: where the pairs of the update land.
        precision: that the engine merges in.

    Raises:
        LoraMergeError: something does not land, has no base weight, or is not merged.
    """
    if faults := [f"{each.layer!r}: {each.fault}" for each in known if each.fault]:
        raise LoraMergeError(summarise(faults))
    if any(each.merge_mode != "merge" for each in known):
        raise LoraMergeError("the engine adds the adapter while it generates: there is no merged weight to verify")
    weights = {module: BaseWeights(base, module) for module in {each.module for each in known}}
    expected: dict[str, dict[str, Expectation]] = {}
    for pair, place in zip(update.pairs, known, strict=True):
        weight, sides = weights[place.module].under(pair, place.name), LayerPair(pair.a, pair.b)
        dtype = getattr(torch, place.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise LoraMergeError(f"{pair.layer!r}: the engine says the dtype {place.dtype!r}, which is none of torch's")
        merged = expected_merged(weight, sides, pair.scale, dtype, precision, seed=0)
        expected.setdefault(place.module, {})[pair.layer] = merged
    return expected


def verify(engine: Transport, expected: Mapping[str, Mapping[str, Expectation]]) -> str:
    """Let the engine compare every layer with what it must be; return its sentence.

    Raises:
        LoraMergeError: something is not what it must be.
    """
    message: str = engine.ask(VERIFY_ROUTE, {"modules": expected})["message"]
    return message


def _scaling(pairs: Sequence[Pair]) -> dict[str, float]:
    return {pair.layer: pair.scale for pair in pairs}
