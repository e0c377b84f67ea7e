"""Where a pair lands: rows of one local weight, and which rows of B and columns of A they come from.

A fused section, a tensor-parallel shard and both together are the same thing: slices. A convolution's weight is rows,
too: one for each output channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import nn

from sgld_lora_merge.adapter.names import spellings
from sgld_lora_merge.merge.spans import Span

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


def whole_weight(weight: str, out_features: int, in_features: int, kernel: tuple[int, ...] = ()) -> Landing:
    """Return the landing of a layer that is neither fused nor sharded."""
    rows, cols = Span(0, out_features), Span(0, in_features)
    return Landing((Target(weight, 0, rows, (rows,), (cols,)),), out_features, in_features, kernel)


def as_rows(weight: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, columns]`` of a weight, in the same memory."""
    return weight.view(weight.shape[0], -1) if weight.dim() > 2 else weight


def features(layer: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[int, int]:
    """Return rows and columns of the whole weight of a layer of torch's own."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    return layer.out_channels, layer.in_channels * math.prod(layer.kernel_size)


def kernel_of(layer: nn.Module) -> tuple[int, ...]:
    """Return the kernel of a convolution; () of any other layer.

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
    """Return the refusal of a layer by its type."""
    return CannotLand(f"it is a {type(layer).__name__}, not a linear layer or a convolution")


def dotted_name(layer: str, segments: Collection[str], find: Callable[[str], Landing | None]) -> str:
    """Return the dotted name of a layer that may be named as kohya does; the name itself where it stands for none.

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
        layers = " and for ".join(repr(name) for name in found.values())
        raise CannotLand(f"{layer!r} stands for {layers}; send it under a dotted name")
    return next(iter([*found.values(), *refused]), layer)
