"""A safetensors file as an adapter: its tensors, and the scales that its metadata holds. No pickle anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from pydantic_core import from_json
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from sgld_lora_merge.errors import RequestError

LAYER_SCALING = "layer_scaling"


def read_adapter(path: str) -> tuple[list[tuple[str, torch.Tensor]], dict[str, float]]:
    """The named tensors of a file, as views of a mapping of it, and its ``layer_scaling``: layer prefix -> whole scale.

    The mapping is private: nothing is copied here, and who copies a slice reads no more than that of the file.

    Raises:
        RequestError: not a safetensors file, or metadata that is not what it should be.
    """
    try:
        with safe_open(path, "pt", device="cpu") as file:
            scaling = _layer_scaling((file.metadata() or {}).get(LAYER_SCALING))
            return [(name, file.get_tensor(name)) for name in file.keys()], scaling  # noqa: SIM118  # not a dict
    except SafetensorError as error:
        raise RequestError(f"this is not a safetensors file: {error}") from error


def adapter_bytes(named: Mapping[str, torch.Tensor], scaling: Mapping[str, float]) -> bytes:
    """The file that `read_adapter` reads: tensors under the names of the wire, and the whole scales of layers."""
    return save(dict(named), {LAYER_SCALING: json.dumps(scaling)})


def _layer_scaling(text: str | None) -> dict[str, float]:
    if text is None:
        return {}
    try:
        scaling = from_json(text, allow_inf_nan=True)
    except ValueError as error:
        raise RequestError(f"{LAYER_SCALING} in the file's metadata is not JSON: {error}") from error
    if not isinstance(scaling, dict) or not all(type(scale) in (int, float) for scale in scaling.values()):
        raise RequestError(f"{LAYER_SCALING} in the file's metadata is not an object of numbers")
    try:
        return {layer: float(scale) for layer, scale in scaling.items()}
    except OverflowError as error:
        raise RequestError(f"{LAYER_SCALING} in the file's metadata has a number that is too large") from error
