"""Compute some elements of what the engine's merged weights must be, from what each rank holds.

No base weight is made whole, and a GPU is waited for once a step, however many layers there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sgld_lora_merge.merge.spans import Span
from sgld_lora_merge.merge.targets import as_rows
from sgld_lora_merge.trainer.base import Key, held_block
from sgld_lora_merge.trainer.engines import Engines
from sgld_lora_merge.trainer.expected import Expectation, choose_positions, expected_samples
from sgld_lora_merge.trainer.gather import Gather, each_whole
from sgld_lora_merge.trainer.names import LayerPair


@dataclass(frozen=True, eq=False)
class MergedLayer:
    """What a merged weight is made of; tensors may be shards."""

    base: torch.Tensor
    pair: LayerPair
    scale: float


def sample_merged(
    layers: Mapping[Key, MergedLayer], dtype: torch.dtype, seed: int, engines: Engines, gather: Gather | None
) -> dict[Key, Expectation]:
    """Return samples of every merged weight, on ranks that call an engine; {} on the others. A collective.

    Args:
        dtype: of the engine's weights.
        seed: chooses the elements.
    """
    keys = list(layers)
    if not keys:
        return {}
    shapes = torch.tensor([(each.pair.b.shape[0], each.base.shape[1:].numel()) for each in layers.values()])
    rows, columns = choose_positions(shapes, seed)
    own = _base_values([each.base for each in layers.values()], rows, columns, dtype, engines, gather)
    expected: dict[Key, Expectation] = {}

    def add(whole: dict[tuple[int, str], torch.Tensor]) -> None:
        if not engines.mine:
            return
        left = _taken([whole[place, "b"].flatten(1) for place in range(len(keys))], list(rows))
        right = _taken([whole[place, "a"].flatten(1).T for place in range(len(keys))], list(columns))
        for rank in {each.shape[1] for each in left}:
            of_rank = [place for place, each in enumerate(left) if each.shape[1] == rank]
            b_rows, a_columns = (torch.stack([side[place] for place in of_rank]) for side in (left, right))
            scales = torch.tensor([layers[keys[place]].scale for place in of_rank])
            samples = expected_samples(rows[of_rank], columns[of_rank], own[of_rank], b_rows, a_columns, scales, dtype)
            expected.update({keys[place]: {"samples": each} for place, each in zip(of_rank, samples, strict=True)})

    sides = [
        ((place, side), tensor)
        for place, each in enumerate(layers.values())
        for side, tensor in each.pair._asdict().items()
    ]
    each_whole([sides], add, engines.run_on_all_ranks, gather)
    return {key: expected[key] for key in keys if key in expected}


def _base_values(
    weights: Sequence[torch.Tensor],
    rows: torch.Tensor,
    columns: torch.Tensor,
    dtype: torch.dtype,
    engines: Engines,
    gather: Gather | None,
) -> torch.Tensor:
    """Return the base weights' values at the positions, in the engine's dtype, on every rank: ``[layers, samples]``."""
    values = torch.full(rows.shape, torch.nan, dtype=torch.float64)
    blocks = engines.run_on_all_ranks(lambda: [None if gather else held_block(weight) for weight in weights])

    def held() -> tuple[torch.Tensor, torch.Tensor]:
        """Return where this rank knows the value, and the values there."""
        held_by_it = [(Span(0, 0), Span(0, 0)) if each is None else each[0] for each in blocks]
        bounds = torch.tensor([(high.start, high.size, wide.start, wide.size) for high, wide in held_by_it])
        first_row, row_count, first_column, column_count = (each[:, None] for each in bounds.T)
        row, column = rows - first_row, columns - first_column
        inside = (row >= 0) & (row < row_count) & (column >= 0) & (column < column_count)
        places = row * column_count + column
        chosen = [place for place, each in enumerate(inside.any(1).tolist()) if each]
        local = [each[1].reshape(-1) for place in chosen if (each := blocks[place]) is not None]
        taken = _taken(local, [places[place][inside[place]] for place in chosen])
        return inside, torch.cat([each.to(dtype).double() for each in taken]) if taken else values.new_empty(0)

    for inside, taken in engines.ranks.gather(engines.run_on_all_ranks(held)):
        values[inside] = taken

    def add(whole: dict[int, torch.Tensor]) -> None:
        for place, weight in whole.items():
            at = rows[place].to(weight.device), columns[place].to(weight.device)
            values[place] = as_rows(weight)[at].to(dtype).double().cpu()

    others = [[(place, weights[place])] for place, each in enumerate(blocks) if each is None]
    each_whole(others, add, engines.run_on_all_ranks, gather)
    return values


def _taken(tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``tensor[places]`` of each, in the host's memory: one copy of all places there, one of all values back.

    All tensors are on one device and of one dtype, or they are taken as float32.
    """
    if not tensors:
        return []
    device = tensors[0].device
    sizes = [len(each) for each in places]
    on_device = torch.cat(list(places)).to(device).split(sizes)
    taken = [tensor[place] for tensor, place in zip(tensors, on_device, strict=True)]
    if len({each.dtype for each in taken}) > 1:
        taken = [each.float() for each in taken]
    host = torch.cat([each.flatten() for each in taken]).cpu().split([each.numel() for each in taken])
    return [values.view(each.shape) for values, each in zip(host, taken, strict=True)]
