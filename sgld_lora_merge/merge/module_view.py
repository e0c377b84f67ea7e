"""What a merge needs of a module: where pairs land, its weights, and how they are written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from sgld_lora_merge.adapter.names import segments_of
from sgld_lora_merge.merge.branches import Branches
from sgld_lora_merge.merge.spans import Span
from sgld_lora_merge.merge.targets import (
    CONVOLUTIONS,
    Landing,
    as_rows,
    dotted_name,
    features,
    kernel_of,
    not_mergeable,
    whole_weight,
)


class Offloaded(Protocol):
    """Weights that do not lie where merges are computed: written whole, one at a time, through memory that does.

    Attributes:
        device: where that memory is.
    """

    device: torch.device

    def blank(self, name: str) -> torch.Tensor:
        """Return that memory, in a weight's shape and dtype and of no particular content; all weights share it."""

    def opened(self, name: str, rows: Sequence[Span]) -> AbstractContextManager[torch.Tensor]:
        """Yield such memory for a live weight; what these rows hold on leaving is live once `finish` has returned."""

    def finish(self) -> None:
        """Wait until all that was written is live."""


class ModuleView(Protocol):
    """One target module of the engine, as much of it as a merge needs.

    Attributes:
        branches: of dynamic targets; None where there are none.
    """

    branches: Branches | None

    def land(self, layer: str) -> Landing | None:
        """Return where a pair of this layer prefix lands; None for a layer that the module does not have.

        Raises:
            CannotLand: the layer is there, but not one to merge into.
        """

    def weight(self, name: str) -> torch.Tensor:
        """Return the live local weight of a parameter name, ``[rows, columns]``; written in place unless offloaded."""

    def offloaded(self, names: Collection[str]) -> Offloaded | None:
        """Return how these weights are written if that cannot be done in place; allocates all that it takes."""

    def layers(self) -> Sequence[str]:
        """Return layer names that could be targets, for error messages."""


class LinearModule:
    """`ModuleView` of a plain torch module: linear layers and convolutions, by their own names or as kohya has them."""

    branches = None

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._layers = dict(module.named_modules())
        self._segments = segments_of(self._layers)

    def land(self, layer: str) -> Landing | None:
        return self._find(dotted_name(layer, self._segments, self._find))

    def _find(self, layer: str) -> Landing | None:
        found = self._layers.get(layer)
        if found is None:
            return None
        if not isinstance(found, (nn.Linear, *CONVOLUTIONS)):
            raise not_mergeable(found)
        kernel = kernel_of(found)
        return whole_weight(f"{layer}.weight", *features(found), kernel)

    def weight(self, name: str) -> torch.Tensor:
        return as_rows(self._layers[name.removesuffix(".weight")].get_parameter("weight").data)

    def offloaded(self, names: Collection[str]) -> None:
        return None

    def layers(self) -> Sequence[str]:
        return sorted(name for name, layer in self._layers.items() if isinstance(layer, (nn.Linear, *CONVOLUTIONS)))
