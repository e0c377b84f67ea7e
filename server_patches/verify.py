"""The verify route's work: live weights of whole layers, from all ranks, against what they should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sgld_lora_merge.adapter.pairs import layer_name
from sgld_lora_merge.errors import Faults, RequestError, in_short, name_some
from sgld_lora_merge.merge.targets import CannotLand, Landing, ModuleView, Target
from sgld_lora_merge.merge.verify import Piece, assemble, sampled, sha256, within

Share = Callable[[Callable[[], Any]], list[Any]]
Expectations = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class _Layer:
    """One layer of the request, with its place on this rank."""

    name: str
    landing: Landing
    rows: Callable[[Target], torch.Tensor]
    dtype: torch.dtype
    checksum: str | None
    samples: list[tuple[int, int, float, float]]

    def pieces(self) -> list[Piece]:
        return [Piece(target, self.rows(target)) for target in self.landing.targets]

    def pieces_on_host(self) -> list[Piece]:
        return [Piece(piece.target, piece.rows.cpu()) for piece in self.pieces()]


def verify(
    expected: Expectations,
    views: Mapping[str, ModuleView],
    rows: Callable[[str, Target], torch.Tensor],
    share: Share,
    *,
    first: bool,
) -> dict[str, Any]:
    """Compare; the answer is complete on the first rank.

    Args:
        expected: module -> layer prefix -> ``sha256`` or ``samples``.
        rows: what a module has at a target, ``[rows, columns]``.
        share: a collective that runs work on every rank and gives every rank all results, or raises on every rank. It
            is entered for the layers' places, once for each layer with a checksum, which bounds the memory to one
            layer, and once for all samples. What a rank does in between is part of its next work: no rank fails alone.
        first: this is the rank that compares.

    Raises:
        LoraMergeError: modules and layers that are not there, or any rank's failure; on every rank alike.
    """
    layers: list[_Layer] = []
    mismatched: list[str] = []
    waiting: list[tuple[_Layer, list[Piece]]] = []  # a layer whose pieces have come and are not compared yet

    def place() -> bool:
        layers.extend(_resolve(expected, views, rows))
        return True

    def compare() -> None:
        while waiting:
            layer, pieces = waiting.pop()
            if first and sha256(assemble(layer.landing, pieces)) != layer.checksum:
                mismatched.append(layer.name)

    def pieces_of(layer: _Layer) -> list[Piece]:
        compare()
        return layer.pieces_on_host()

    def samples() -> list[dict[int, float]]:
        compare()
        return [sampled(layer.pieces(), layer.samples) if layer.samples else {} for layer in layers]

    share(place)
    for layer in layers:
        if layer.checksum is not None:
            pieces = [piece for rank in share(partial(pieces_of, layer)) for piece in rank]
            waiting.append((layer, pieces))
    by_rank = share(samples)
    for position, layer in enumerate(layers):
        values = {index: value for rank in by_rank for index, value in rank[position].items()}
        if not all(i in values and within(values[i], s[2], s[3], layer.dtype) for i, s in enumerate(layer.samples)):
            mismatched.append(layer.name)
    told = f"{len(mismatched)} of {len(layers)} layers are not what they should be: {name_some(mismatched)}"
    return {
        "success": not mismatched,
        "message": told if mismatched else f"all {len(layers)} layers are what they should be",
        "mismatched": mismatched,
        "checked": len(layers),
    }


def _resolve(
    expected: Expectations, views: Mapping[str, ModuleView], rows: Callable[[str, Target], torch.Tensor]
) -> list[_Layer]:
    layers, faults = [], Faults()
    for module, by_layer in expected.items():
        view = views.get(module)
        if view is None:
            faults.append(f"no module {in_short(module)} here; there are {name_some(sorted(views))}")
            continue
        for layer, each in by_layer.items():
            try:
                landing = view.land(layer_name(layer))
            except CannotLand as error:
                faults.append(f"{module}: {in_short(layer)} cannot be verified: {error}")
                continue
            if landing is None:
                faults.append(f"{module}: unknown layer {in_short(layer)}")
            else:
                dtype = view.weight(landing.targets[0].weight).dtype
                own = partial(rows, module)
                layers.append(_Layer(f"{module}.{layer}", landing, own, dtype, each["sha256"], each["samples"] or []))
    if faults:
        raise RequestError(*faults)
    return layers
