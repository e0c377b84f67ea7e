"""Where a pair lands: rows of one local weight, and which rows of B and columns of A they come from.

A fused section, a tensor-parallel shard and both together are the same thing: slices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from sgld_lora_merge.dynamic import Branches


@dataclass(frozen=True, order=True)
class Span:
    """A half-open range ``[start, stop)`` of rows or columns."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def shifted(self, offset: int) -> Span:
        return Span(self.start + offset, self.stop + offset)

    def within(self, other: Span) -> Span:
        """The part of this range that lies in another; empty, at an end of that, where nothing does."""
        start = min(max(self.start, other.start), other.stop)
        return Span(start, max(start, min(self.stop, other.stop)))


@dataclass(frozen=True)
class Target:
    """Rows ``rows`` of a local weight, merged from ``(b @ a)[b_rows][:, a_cols]``.

    Attributes:
        weight: the parameter's name in its module.
        section: index of the section in a fused weight; 0 where nothing is fused.
        rows: rows of the local weight, all its columns.
        b_rows: rows of the pair's whole B, in the order of ``rows``.
        a_cols: columns of the pair's whole A, in the order of the local weight's columns.
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
    """All targets of one layer prefix on this rank, and the shape of the whole unsharded weight a pair must fit."""

    targets: tuple[Target, ...]
    out_features: int
    in_features: int


class CannotLand(Exception):
    """A layer prefix exists in the model, but nothing can be merged into it; the text says why."""


class Offloaded(Protocol):
    """Weights that do not lie where merges are computed: written whole, one at a time, through memory that does."""

    def blank(self, name: str) -> torch.Tensor:
        """That memory, in a weight's shape and dtype and of no particular content; all weights share it."""

    def opened(self, name: str) -> AbstractContextManager[torch.Tensor]:
        """The live weight, in that memory; what it holds on leaving is live then."""


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


def whole_weight(weight: str, out_features: int, in_features: int) -> Landing:
    """The landing of a layer that is neither fused nor sharded."""
    rows, cols = Span(0, out_features), Span(0, in_features)
    return Landing((Target(weight, 0, rows, (rows,), (cols,)),), out_features, in_features)


class LinearModule:
    """`ModuleView` of a plain torch module: its ``nn.Linear`` layers under their own names."""

    branches = None

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._linears = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
        self._others = {name: type(m).__name__ for name, m in module.named_modules() if name not in self._linears}

    def land(self, layer: str) -> Landing | None:
        linear = self._linears.get(layer)
        if linear is None:
            if layer in self._others:
                raise CannotLand(f"it is a {self._others[layer]}, not a linear layer")
            return None
        return whole_weight(f"{layer}.weight", linear.out_features, linear.in_features)

    def weight(self, name: str) -> torch.Tensor:
        return self._module.get_parameter(name).data

    def offloaded(self, names: Collection[str]) -> None:
        return None

    def layers(self) -> Sequence[str]:
        return sorted(self._linears)
