"""Where a pair lands: rows of one local weight, and which rows of B and columns of A they come from.

A fused section, a tensor-parallel shard and both together are the same thing: slices. A convolution's weight is rows,
too: one for each output channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from sgld_lora_merge.adapter.kohya import segments_of, spellings
from sgld_lora_merge.merge.spans import Span

if TYPE_CHECKING:
    from sgld_lora_merge.merge.branches import Branches

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Target:
    """Rows ``rows`` of a local weight, merged from ``(b @ a)[b_rows][:, a_cols]``.

    Attributes:
        weight: the parameter's name in its module.
        section: index of the section in a fused weight; 0 where nothing is fused.
        rows: rows of the local weight, all its columns.
        b_rows: rows of the pair's B, in the order of ``rows``.
        a_cols: columns of the pair's A, in the order of the local weight's columns.
        copies: how many ranks of the replica hold this very shard; what is summed over ranks is divided by it.
        dynamic: the weight stays as it is, and the layer adds the low-rank product to its output.
    """

    weight: str
    section: int
    rows: Span
    b_rows: tuple[Span, ...]
    a_cols: tuple[Span, ...]
    copies: int = 1
    dynamic: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """Identity of what is written, whichever pair writes it."""
        return (self.weight, self.section)


@dataclass(frozen=True)
class Landing:
    """All targets of one layer prefix on this rank, and the whole unsharded weight that a pair must fit.

    Attributes:
        out_features, in_features: rows and columns of the whole weight, a convolution's flattened to two dimensions.
        kernel: of a convolution; () of a linear layer.
    """

    targets: tuple[Target, ...]
    out_features: int
    in_features: int
    kernel: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole weight as a checkpoint has it."""
        return (self.out_features, self.in_features // math.prod(self.kernel), *self.kernel)


class CannotLand(Exception):
    """A layer prefix exists in the model, but nothing can be merged into it; the text says why."""


class Offloaded(Protocol):
    """Weights that do not lie where merges are computed: written whole, one at a time, through memory that does.

    Attributes:
        device: where that memory is.
    """

    device: torch.device

    def blank(self, name: str) -> torch.Tensor:
        """That memory, in a weight's shape and dtype and of no particular content; all weights share it."""

    def opened(self, name: str, rows: Sequence[Span]) -> AbstractContextManager[torch.Tensor]:
        """Such memory for a live weight; what these rows of it hold on leaving is live once `finish` has returned."""

    def finish(self) -> None:
        """Wait until all that was written is live."""


class ModuleView(Protocol):
    """One target module of the engine, as much of it as a merge needs.

    Attributes:
        branches: of dynamic targets; None where there are none.
    """

    branches: Branches | None

    def land(self, layer: str) -> Landing | None:
        """Where a pair of this layer prefix lands; None for a layer that the module does not have.

        Raises:
            CannotLand: the layer is there, but not one to merge into.
        """

    def weight(self, name: str) -> torch.Tensor:
        """The live local weight of that parameter name, ``[rows, columns]``; written in place unless offloaded."""

    def offloaded(self, names: Collection[str]) -> Offloaded | None:
        """How these weights are written if that cannot be done in place; allocates all that it takes."""

    def layers(self) -> Sequence[str]:
        """Layer names that could be targets, for error messages."""


def whole_weight(weight: str, out_features: int, in_features: int, kernel: tuple[int, ...] = ()) -> Landing:
    """The landing of a layer that is neither fused nor sharded."""
    rows, cols = Span(0, out_features), Span(0, in_features)
    return Landing((Target(weight, 0, rows, (rows,), (cols,)),), out_features, in_features, kernel)


def as_rows(weight: torch.Tensor) -> torch.Tensor:
    """``[rows, columns]`` of a weight, in the same memory."""
    return weight.view(weight.shape[0], -1) if weight.dim() > 2 else weight


def features(layer: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[int, int]:
    """Rows and columns of the whole weight of a layer of torch's own."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    return layer.out_channels, layer.in_channels * math.prod(layer.kernel_size)


def kernel_of(layer: nn.Module) -> tuple[int, ...]:
    """The kernel of a convolution; () of any other layer.

    Raises:
        CannotLand: a convolution for which no merge is defined, or whose weight is not rows in memory.
    """
    if not isinstance(layer, CONVOLUTIONS):
        return ()
    kind = type(layer).__name__
    if layer.groups > 1:
        raise CannotLand(f"it is a {kind} of {layer.groups} groups, for which PEFT defines no merge")
    if not layer.weight.is_contiguous():
        raise CannotLand(f"it is a {kind} whose weight is not contiguous (channels-last?)")
    return tuple(layer.kernel_size)


def not_mergeable(layer: nn.Module) -> CannotLand:
    """The refusal of a layer by its type."""
    return CannotLand(f"it is a {type(layer).__name__}, not a linear layer or a convolution")


def dotted_name(layer: str, segments: Collection[str], find: Callable[[str], Landing | None]) -> str:
    """The dotted name of a layer that the sender may name as kohya does; the name as it is if it stands for none.

    Args:
        layer: the layer prefix as the sender names it.
        segments: what stands between two dots in the names of this module.
        find: where a layer of a dotted name lands.

    Raises:
        CannotLand: it stands for several layers.
    """
    found: dict[Landing, str] = {}
    refused: list[str] = []
    for name in spellings(layer, segments):
        try:
            landing = find(name)
        except CannotLand:
            refused.append(name)  # a layer that is there: its own refusal says more than that it is unknown
        else:
            if landing is not None:
                found.setdefault(landing, name)
    if len(found) > 1:
        told = " and for ".join(repr(name) for name in found.values())
        raise CannotLand(f"{layer!r} stands for {told}; send it under a dotted name")
    return next(iter([*found.values(), *refused]), layer)


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
