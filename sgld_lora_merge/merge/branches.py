"""Low-rank branches: layers that keep W0 and add ``scale * x @ A.T @ B.T`` to what they give.

For weights that a merge is not defined for (quantized ones), and for engines that are told not to merge. A layer with a
branch becomes an instance of a subclass: its parameters stay, under their names, and code that takes a short cut for
layers of exactly some type sees that this is another one. It computes as PEFT's unmerged forward does, in the dtype of
A and B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sgld_lora_merge.merge.kernels import Term
from sgld_lora_merge.merge.spans import Span

Key = tuple[str, int]
Reduce = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Branch:
    """What one target's rows of the output gain.

    Attributes:
        columns: of the layer's output, the target's rows of its weight.
        terms: ``a`` ``[rank, columns of the local weight]``, ``b`` ``[rows of the target, rank]``, and the scale.
    """

    columns: Span
    terms: tuple[tuple[torch.Tensor, torch.Tensor, float], ...]


class Branches:
    """The branches of one module's layers.

    Args:
        layer_of: the layer that owns a weight, by the weight's name.
        device: where the layers compute.
        reduce: sums ``x @ A.T`` over the ranks that hold parts of a layer's columns.
    """

    def __init__(
        self,
        layer_of: Callable[[str], nn.Module],
        device: torch.device,
        reduce: Reduce = lambda _, hidden: hidden,
    ) -> None:
        self._layer_of = layer_of
        self._device = device
        self._reduce = reduce
        self._live: dict[str, dict[Key, Branch]] = {}
        self._idle: set[str] = set()

    def make(self, rows: Span, terms: Sequence[Term]) -> Branch:
        """Return a branch in memory of its own; not in force before `set`."""
        own = []
        for term in terms:
            a = torch.cat([term.a[:, span.start : span.stop] for span in term.a_cols], dim=1)
            b = torch.cat([term.b[span.start : span.stop] for span in term.b_rows])
            own.append((a.to(self._device), b.to(self._device), term.scale))
        return Branch(rows, tuple(own))

    def live(self, key: Key) -> Branch | None:
        """Return what is in force for a target."""
        return self._live.get(key[0], {}).get(key)

    def set(self, key: Key, branch: Branch | None) -> None:
        """Put a branch in force for a target, or take it out."""
        weight = key[0]
        branches = self._live.setdefault(weight, {})
        had_some = bool(branches)
        if branch is None:
            branches.pop(key, None)
        else:
            branches[key] = branch
        if bool(branches) == had_some:
            return
        layer: Any = self._layer_of(weight)
        if branches:
            cls: type[nn.Module] = type(layer)
            layer.__class__ = _with_branches(cls)
            layer.add_branches = lambda x, out: self._add(weight, layer, x, out)
            self._idle.add(weight)
        else:
            layer.__class__ = type(layer).__bases__[0]
            del layer.add_branches
            self._idle.discard(weight)

    @property
    def idle(self) -> list[str]:
        """Weights whose layers have not been called since their branch came into force."""
        return sorted(self._idle)

    def _add(self, weight: str, layer: nn.Module, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self._idle.discard(weight)
        for branch in self._live[weight].values():
            for a, b, scale in branch.terms:
                hidden = self._reduce(layer, x.to(a.dtype) @ a.T)
                update = (hidden.to(b.dtype) @ b.T * scale).to(out.dtype)
                if branch.columns.size == out.shape[-1]:
                    out = out + update
                else:
                    out[..., branch.columns.start : branch.columns.stop] += update
        return out


_subclasses: dict[type[nn.Module], type[nn.Module]] = {}


def _with_branches(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a layer's class that adds branches; one for each class."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = cls.forward(self, *args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()))
        if isinstance(output, tuple):  # sglang's layers give their output and a bias
            return self.add_branches(x, output[0]), *output[1:]
        return self.add_branches(x, output)

    if cls not in _subclasses:
        _subclasses[cls] = type(f"{cls.__name__}WithBranches", (cls,), {"forward": forward})
    return _subclasses[cls]
