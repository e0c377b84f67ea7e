"""Read the base weights of a checkpoint, layer by layer."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.errors import LoraMergeError


class BaseWeights:
    """The weights of one module.

    Args:
        path: a safetensors file, a folder of them, or the folder of the whole model.
        module: whose folder that one has.

    Raises:
        LoraMergeError: there are none.
    """

    def __init__(self, path: Path, module: str) -> None:
        path = path / module if (path / module).is_dir() else path
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        self._file_of: dict[str, Path] = {}
        for file in files:
            try:
                with safe_open(file, "pt") as opened:
                    self._file_of |= dict.fromkeys(opened.keys(), file)
            except (SafetensorError, OSError) as error:
                raise LoraMergeError(f"{file} is not a safetensors file: {error}") from error
        if not self._file_of:
            raise LoraMergeError(f"{path} has no safetensors file with base weights")
        self._path = path
        self._flat = {name.removesuffix(".weight").replace(".", "_"): name for name in self._file_of}

    def under(self, pair: Pair, layer: str) -> torch.Tensor:
        """Return the weight that a pair is added to: that of a layer, which may be named as kohya does.

        Raises:
            LoraMergeError: there is none of that name, or it has another shape.
        """
        weight = self._of(layer)
        if tuple(weight.flatten(1).shape) != pair.shape:
            raise LoraMergeError(
                f"{pair.layer!r} is {list(weight.shape)} in the base weights, {list(pair.shape)} in the adapter"
            )
        return weight

    def _of(self, layer: str) -> torch.Tensor:
        name = f"{layer}.weight"
        if name not in self._file_of:
            name = self._flat.get(layer.removeprefix("lora_unet_").removeprefix("lora_transformer_"), name)
        if name not in self._file_of:
            raise LoraMergeError(f"{self._path} has no {name}; base weights must have the adapter's layer names")
        with safe_open(self._file_of[name], "pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor
