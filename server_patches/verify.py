"""Compare the weights of whole layers, gathered from all ranks, with the expected ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from server_patches.rank_group import RankGroup
from sgld_lora_merge.adapter.names import layer_name
from sgld_lora_merge.errors import Faults, RequestError, in_short, name_some
from sgld_lora_merge.merge.module_view import ModuleView
from sgld_lora_merge.merge.targets import CannotLand, Landing, Target
from sgld_lora_merge.merge.verify import Piece, assemble, block_sums, sampled, sha256, within
from sgld_lora_merge.merge.weight_sums import DTYPES, Block, WeightSum, read_sums, read_weight_sum, total_of

Expectations = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class VerifiedLayer:
    """One layer to verify, and where it lies on this rank."""

    name: str
    landing: Landing
    rows: Callable[[Target], torch.Tensor]
    dtype: torch.dtype
    checksum: str | None
    samples: list[tuple[int, int, float, float]]
    weight_sum: WeightSum | None = None

    @property
    def has_summed_shape(self) -> bool:
        """Whether the weight has the shape of the expected sum."""
        expected = self.weight_sum
        return expected is not None and (expected.rows, expected.columns) == (
            self.landing.out_features,
            self.landing.in_features,
        )

    def block_sums(self) -> dict[Block, torch.Tensor]:
        """Return the sums of the blocks that this rank holds; none where no sum of this shape is expected."""
        if self.weight_sum is None or not self.has_summed_shape:
            return {}
        sums: dict[Block, torch.Tensor] = {}
        for piece in self.pieces():
            sums |= block_sums(piece, self.weight_sum.columns, DTYPES[self.weight_sum.dtype])
        return sums

    def pieces(self) -> list[Piece]:
        return [Piece(target, self.rows(target)) for target in self.landing.targets]

    def pieces_on_host(self) -> list[Piece]:
        return [Piece(piece.target, piece.rows.cpu()) for piece in self.pieces()]


def find_layers(
    expected: Expectations, views: Mapping[str, ModuleView], rows: Callable[[str, Target], torch.Tensor]
) -> list[VerifiedLayer]:
    """Find the layers of a request on this rank.

    Args:
        expected: module -> layer prefix -> ``sha256``, ``samples`` or ``weight_sum``.
        rows: returns a module's values at a target, ``[rows, columns]``.

    Raises:
        RequestError: a module or a layer does not exist, or cannot be verified.
    """
    layers, faults = [], Faults()
    for module, by_layer in expected.items():
        view = views.get(module)
        if view is None:
            faults.append(f"no module {in_short(module)} here; there are {name_some(sorted(views))}")
            continue
        for layer, each in by_layer.items():
            try:
                landing = view.land(layer_name(layer))
                weight_sum = None if each["weight_sum"] is None else read_weight_sum(each["weight_sum"])
            except (CannotLand, ValueError) as error:
                faults.append(f"{module}: {in_short(layer)} cannot be verified: {error}")
                continue
            if landing is None:
                faults.append(f"{module}: unknown layer {in_short(layer)}")
            else:
                dtype = view.weight(landing.targets[0].weight).dtype
                own = partial(rows, module)
                samples = each["samples"] or []
                layers.append(
                    VerifiedLayer(f"{module}.{layer}", landing, own, dtype, each["sha256"], samples, weight_sum)
                )
    if faults:
        raise RequestError(*faults)
    return layers


def compare_layers(layers: Sequence[VerifiedLayer], group: RankGroup) -> dict[str, Any]:
    """Compare layers on all ranks; the answer is complete on the first rank.

    All ranks gather the pieces of one layer with a checksum after the other, which bounds the memory to one layer, and
    then the values of all samples and the sums of all blocks. What a rank computes in between is part of its next step:
    no rank fails alone.

    Raises:
        RejectedByRank: any rank failed; on every rank alike.
    """
    mismatched: list[str] = []
    waiting: list[tuple[VerifiedLayer, list[Piece]]] = []  # a layer whose pieces have come and are not compared yet

    def compare() -> None:
        while waiting:
            layer, pieces = waiting.pop()
            if group.is_first and sha256(assemble(layer.landing, pieces)) != layer.checksum:
                mismatched.append(layer.name)

    def pieces_of(layer: VerifiedLayer) -> list[Piece]:
        compare()
        return layer.pieces_on_host()

    def samples() -> list[dict[int, float]]:
        compare()
        return sampled([(layer.pieces() if layer.samples else [], layer.samples) for layer in layers])

    def sums() -> list[dict[Block, int]]:
        by_layer = [layer.block_sums() for layer in layers]
        numbers = iter(read_sums([each for sums in by_layer for each in sums.values()]))
        return [dict(zip(sums, numbers, strict=False)) for sums in by_layer]

    for layer in layers:
        if layer.checksum is not None:
            pieces = [piece for rank in group.run(partial(pieces_of, layer)) for piece in rank]
            waiting.append((layer, pieces))
    by_rank = group.run(samples)
    sums_by_rank = group.run(sums)
    for position, layer in enumerate(layers):
        if (expected := layer.weight_sum) is not None:
            blocks = [rank[position] for rank in sums_by_rank]
            if not layer.has_summed_shape or expected.total != total_of(blocks, expected.rows, expected.columns):
                mismatched.append(layer.name)
    for position, layer in enumerate(layers):
        values = {index: value for rank in by_rank for index, value in rank[position].items()}
        if not all(i in values and within(values[i], s[2], s[3], layer.dtype) for i, s in enumerate(layer.samples)):
            mismatched.append(layer.name)
    wrong = f"{len(mismatched)} of {len(layers)} layers are not what they should be: {name_some(mismatched)}"
    return {
        "success": not mismatched,
        "message": wrong if mismatched else f"all {len(layers)} layers are what they should be",
        "mismatched": mismatched,
        "checked": len(layers),
    }
