"""Low-rank branches: layers that keep W0 and add ``scale * x @ A.T @ B.T`` to what they give.

For weights that a merge is not defined for (quantized ones), and for engines that are told not to merge. A branch is a
forward hook: the module keeps its parameters, under their names. It computes as PEFT's unmerged forward does, in the
dtype of A and B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sgld_lora_merge.kernels import Term
from sgld_lora_merge.targets import Span

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
        self._hooks: dict[str, Any] = {}
        self._idle: set[str] = set()

    def make(self, rows: Span, terms: Sequence[Term]) -> Branch:
        """A branch in memory of its own; not in force before `set`."""
        own = []
        for term in terms:
            a = torch.cat([term.a[:, span.start : span.stop] for span in term.a_cols], dim=1)
            b = torch.cat([term.b[span.start : span.stop] for span in term.b_rows])
            own.append((a.to(self._device), b.to(self._device), term.scale))
        return Branch(rows, tuple(own))

    def live(self, key: Key) -> Branch | None:
        """What is in force for a target."""
        return self._live.get(key[0], {}).get(key)

    def set(self, key: Key, branch: Branch | None) -> None:
        """Put a branch in force for a target, or take it out."""
        weight = key[0]
        branches = self._live.setdefault(weight, {})
        if branch is not None:
            branches[key] = branch
            if weight not in self._hooks:
                hook = self._hook(weight)
                self._hooks[weight] = self._layer_of(weight).register_forward_hook(hook, with_kwargs=True)
                self._idle.add(weight)
        elif branches.pop(key, None) is not None and not branches:
            self._hooks.pop(weight).remove()
            self._idle.discard(weight)

    @property
    def idle(self) -> list[str]:
        """Weights whose layers have not been called since their branch came into force."""
        return sorted(self._idle)

    def _hook(self, weight: str) -> Callable[..., Any]:
        branches = self._live[weight]

        def add(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            self._idle.discard(weight)
            x = args[0] if args else next(iter(kwargs.values()))
            out = output[0] if isinstance(output, tuple) else output
            for branch in branches.values():
                for a, b, scale in branch.terms:
                    hidden = self._reduce(layer, x.to(a.dtype) @ a.T)
                    update = (hidden.to(b.dtype) @ b.T * scale).to(out.dtype)
                    if branch.columns.size == out.shape[-1]:
                        out = out + update
                    else:
                        out[..., branch.columns.start : branch.columns.stop] += update
            return (out, *output[1:]) if isinstance(output, tuple) else out

        return add
