"""A safetensors file as an adapter: its tensors, and the scales that its metadata holds. No pickle anywhere."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic_core import from_json
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from sgld_lora_merge.errors import Faults, RequestError, cut, in_short
from sgld_lora_merge.wire.limits import check_json, check_name, check_tensors

LAYER_SCALING = "layer_scaling"


def read_adapter(path: str) -> tuple[list[tuple[str, torch.Tensor]], dict[str, float]]:
    """Return a file's named tensors, as views of a mapping of it, and its ``layer_scaling``, whole scales by layer.

    The mapping is private: nothing is copied here, and who copies a slice reads no more than that of the file.

    Raises:
        RequestError: not a safetensors file, tensors that torch does not make, names that are too long, more tensors
            than a file of its size may have, or metadata that is not what it should be.
    """
    _check_header(path)
    try:
        with safe_open(path, "pt", device="cpu") as file:
            scaling = _layer_scaling((file.metadata() or {}).get(LAYER_SCALING))
            names = file.keys()
            check_tensors(len(names), os.path.getsize(path), "the file")
            return _tensors(file, names), scaling
    except SafetensorError as error:
        raise RequestError(f"this is not a safetensors file: {cut(str(error), 200)}") from error


def _check_header(path: str) -> None:
    """Check what the header takes when it is read; whether it is one is safetensors' to say."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        sent = os.path.getsize(path)
        check_json(file.read(min(length, sent)), "the file's header", sent)


def _tensors(file: Any, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
    tensors, faults = [], Faults()
    for name in names:
        try:
            tensors.append((check_name(name), file.get_tensor(name)))
        except RequestError as error:
            faults.extend(error.faults)
        except (OverflowError, RuntimeError, TypeError, ValueError) as error:
            faults.append(f"{in_short(name)} is no tensor that torch can make: {cut(str(error).partition(chr(10))[0])}")
    if faults:
        raise RequestError(*faults)
    return tensors


def adapter_bytes(named: Mapping[str, torch.Tensor], scaling: Mapping[str, float]) -> bytes:
    """Return a file that `read_adapter` reads: tensors under the names of the wire, and whole scales of layers."""
    return save(dict(named), {LAYER_SCALING: json.dumps(scaling)})


def _layer_scaling(text: str | None) -> dict[str, float]:
    if text is None:
        return {}
    check_json(text, f"{LAYER_SCALING} in the file's metadata")
    try:
        scaling = from_json(text, allow_inf_nan=True)
    except ValueError as error:
        raise RequestError(f"{LAYER_SCALING} in the file's metadata is not JSON: {error}") from error
    if not isinstance(scaling, dict) or not all(type(scale) in (int, float) for scale in scaling.values()):
        raise RequestError(f"{LAYER_SCALING} in the file's metadata is not an object of numbers")
    for layer in scaling:
        check_name(layer)
    try:
        return {layer: float(scale) for layer, scale in scaling.items()}
    except OverflowError as error:
        raise RequestError(f"{LAYER_SCALING} in the file's metadata has a number that is too large") from error
