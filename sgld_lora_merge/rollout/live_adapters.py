"""Keep what is live on every engine in host memory, for an engine that comes back."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from sgld_lora_merge.adapter.names import parse_name
from sgld_lora_merge.errors import RequestError, name_some, summarise
from sgld_lora_merge.trainer.transport import Answer, SyncError, Transport
from sgld_lora_merge.wire.schema import DEFAULT_ADAPTER, DEFAULT_MODULE, RESET_ROUTE, RESOLVE_ROUTE


@dataclass(frozen=True, eq=False)
class LiveUpload:
    """One upload that is live.

    Attributes:
        fields: its query.
        file: its body.
        modules: whose whole adapter it is.
    """

    fields: Mapping[str, Any]
    file: bytes
    modules: frozenset[str]


class LiveAdapters:
    """The last live upload of every adapter of every module.

    Args:
        max_bytes: of all files together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._uploads: list[LiveUpload] = []
        self.versions: dict[str, str] = {}
        """Of every module that is not at its base weights."""

    def check(self, fields: Mapping[str, Any], file: bytes) -> None:
        """Check whether this upload could be kept.

        Raises:
            RequestError: with what is wrong.
        """
        faults = [f"an update of several engines needs {name}" for name in ("update_id", "weight_version")
                  if not fields.get(name)]  # fmt: skip
        place = _place(fields)
        nbytes = len(file) + sum(len(each.file) for each in self._uploads if _place(each.fields) != place)
        if nbytes > self._max_bytes:
            faults.append(f"{nbytes} bytes of adapters would be live; at most {self._max_bytes} are kept "
                          "(max_adapter_bytes)")  # fmt: skip
        if faults:
            raise RequestError(*faults)

    def keep(self, fields: Mapping[str, Any], file: bytes, modules: Collection[str]) -> None:
        """Keep an upload that is live on every engine now; what it replaces is forgotten."""
        new = LiveUpload({name: value for name, value in fields.items() if name != "commit"}, file, frozenset(modules))
        adapter = _place(fields)[0]
        kept = [each for each in self._uploads if _place(each.fields)[0] != adapter or not each.modules <= new.modules]
        self._uploads = [*kept, new]
        self.versions |= dict.fromkeys(modules, str(fields["weight_version"]))

    def forget(self) -> None:
        """Forget all uploads: the base weights are live."""
        self._uploads, self.versions = [], {}

    def bring_to(self, engine: Transport) -> None:
        """Make an engine serve all of it, whatever it serves now."""
        engine.ask(RESET_ROUTE, {})
        for upload in self._uploads:
            # an id that the engine has had and lost is used up
            engine.update({**upload.fields, "update_id": uuid.uuid4().hex}, upload.file)

    def difference(self, status: Answer) -> str | None:
        """Return how an engine of this status differs from what is live, as a sentence; None where it does not."""
        live = {name: each["weight_version"] for name, each in status["modules"].items() if each["weight_version"]}
        if live == self.versions:
            return None
        return f"it serves {versions_in_words(live)}, the last live version is {versions_in_words(self.versions)}"


def layers_in(file: bytes) -> list[str]:
    """Return the layers that a safetensors file has tensors for; only its header is read.

    Raises:
        RequestError: it is no such file, has a name that is no LoRA name, or no layer.
    """
    end = 8 + int.from_bytes(file[:8], "little")
    try:
        header = from_json(file[8:end])
    except ValueError as error:
        raise RequestError(f"the upload is not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise RequestError("the upload is not a safetensors file: its header is not an object")
    layers = dict.fromkeys(parse_name(name).layer for name in header if name != "__metadata__")
    if not layers:
        raise RequestError("the upload has no layers")
    return list(layers)


def modules_of(layers: Sequence[str], engine: Transport) -> set[str]:
    """Return the modules that an upload without a target_module is for, as an engine routes its layers.

    Raises:
        SyncError: a layer has no place there.
    """
    asked = {DEFAULT_MODULE: layers}
    places = engine.ask(RESOLVE_ROUTE, {"modules": asked})["modules"].get(DEFAULT_MODULE, {})
    faults = {layer: places.get(layer, {"fault": "not said"}).get("fault") for layer in layers}
    if lost := [f"{layer}: {fault}" for layer, fault in faults.items() if fault is not None]:
        raise SyncError(f"the file's layers have no place: {summarise(lost)}", answered=200)
    return {places[layer]["module"] for layer in layers}


def check_at(version: str, modules: Collection[str], status: Answer) -> None:
    """Check that modules are at a version on an engine of this status.

    Raises:
        SyncError: some are not.
    """
    live = {name: each["weight_version"] for name, each in status["modules"].items()}
    if others := sorted(name for name in modules if live.get(name) != version):
        raise SyncError(f"not at version {version!r}: {name_some(others)}", answered=200)


def _place(fields: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return adapter and module of an upload; no module where the names in the file say it."""
    return fields.get("adapter") or DEFAULT_ADAPTER, fields.get("target_module")


def versions_in_words(versions: Mapping[str, str]) -> str:
    """Return versions by module, for a message."""
    return ", ".join(f"{module} at {version!r}" for module, version in sorted(versions.items())) or "the base weights"
