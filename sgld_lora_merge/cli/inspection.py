"""Look at an adapter: its layers, how large its update is, and what rounding would take of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgld_lora_merge.adapter.names import is_flattened
from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.cli.base import BaseWeights
from sgld_lora_merge.merge.kernels import MergeJob, MergeStats, Term, merge, scratch_for
from sgld_lora_merge.merge.spans import Span

_BLOCK = re.compile(r"^.*?[._]\d+[._]")  # up to the first number in a layer's name


@dataclass(frozen=True)
class InspectedLayer:
    """One layer of an adapter.

    Attributes:
        shape: rows and columns of its weight, a convolution's flattened.
        dtype: of A, and of B where that has another one.
        norm: Frobenius norm of ``scale * B @ A``.
        rounding_loss: share of the update that rounding into the weight would take; None without base weights.
        relative: ``norm`` over the norm of the base weight; None without base weights.
    """

    layer: str
    shape: tuple[int, int]
    rank: int
    scale: float
    dtype: str
    norm: float
    rounding_loss: float | None = None
    relative: float | None = None


@dataclass(frozen=True)
class AdapterReport:
    """An adapter.

    Attributes:
        target_modules: what the layers are called below their block -> how many are called so.
        nbytes: of A and B.
        rounding_loss: of all layers together; None without base weights.
        beyond: layers that none of the family's target modules names.
        missing: target modules of the family that no layer has.
    """

    layers: tuple[InspectedLayer, ...]
    target_modules: dict[str, int]
    nbytes: int
    rounding_loss: float | None
    beyond: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def report(
    pairs: Sequence[Pair], target_modules: Sequence[str] | None, base: BaseWeights | None, dtype: torch.dtype | None
) -> AdapterReport:
    """Look at an adapter.

    Args:
        target_modules: of the family that it should be of.
        base: weights to estimate the rounding loss with.
        dtype: that the engine holds them in; None takes them as they are.

    Raises:
        LoraMergeError: the base weights do not fit.
    """
    layers, total = [], MergeStats()
    for pair in pairs:
        layer, stats = _look(pair, base, dtype)
        layers.append(layer)
        total += stats
    named = {target: [pair.layer for pair in pairs if _is_named(pair.layer, target)] for target in target_modules or ()}
    known = {layer for matching in named.values() for layer in matching}
    return AdapterReport(
        tuple(layers),
        dict(Counter(_BLOCK.sub("", pair.layer) for pair in pairs)),
        sum(pair.nbytes for pair in pairs),
        None if base is None else total.rounding_loss,
        tuple(pair.layer for pair in pairs if target_modules is not None and pair.layer not in known),
        tuple(target for target, matching in named.items() if not matching),
    )


def _look(pair: Pair, base: BaseWeights | None, dtype: torch.dtype | None) -> tuple[InspectedLayer, MergeStats]:
    shape = pair.shape
    dtypes = dict.fromkeys(str(side.dtype).removeprefix("torch.") for side in (pair.a, pair.b))
    known = pair.layer, shape, pair.rank, pair.scale, ", ".join(dtypes), _norm(pair)
    if base is None:
        return InspectedLayer(*known), MergeStats()
    weight = base.under(pair, pair.layer).flatten(1)
    if dtype is not None:
        weight = weight.to(dtype)
    term = Term(pair.a, pair.b, pair.scale, (Span(0, shape[0]),), (Span(0, shape[1]),))
    job = MergeJob(torch.empty_like(weight), weight, (term,))
    (stats,) = merge([job], Precision.FP32, scratch_for([job], Precision.FP32))
    return InspectedLayer(
        *known, stats.rounding_loss, known[-1] / float(torch.linalg.vector_norm(weight.float()))
    ), stats


def _norm(pair: Pair) -> float:
    """Return the norm of ``scale * B @ A`` without the product: its square is the sum of (B.T @ B) * (A @ A.T)."""
    a, b = pair.a.double(), pair.b.double()
    return abs(pair.scale) * float(((b.T @ b) * (a @ a.T)).sum().clamp(min=0).sqrt())


def _is_named(layer: str, target: str) -> bool:
    """Return whether PEFT would put LoRA on a layer for this entry of target_modules."""
    if is_flattened(layer):
        return layer.endswith(f"_{target.replace('.', '_')}")
    return layer == target or layer.endswith(f".{target}")
