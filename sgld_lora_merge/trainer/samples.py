"""Compute some elements of what the engine's merged weights must be, from what each rank holds.

No base weight is made whole, and a GPU is waited for once a step, however many layers there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sgld_lora_merge.merge.targets import as_rows
from sgld_lora_merge.trainer.base import Key, held_block
from sgld_lora_merge.trainer.engines import Engines
from sgld_lora_merge.trainer.expected import Expectation, Positions, choose_positions, expected_samples
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
    shapes = [(each.pair.b.shape[0], each.base.shape[1:].numel()) for each in layers.values()]
    positions = dict(zip(layers, choose_positions(shapes, seed), strict=True))
    own = _base_values({key: each.base for key, each in layers.items()}, positions, dtype, engines, gather)
    expected: dict[Key, Expectation] = {}

    def add(whole: dict[tuple[Key, str], torch.Tensor]) -> None:
        if not engines.mine:
            return
        keys = [key for key, side in whole if side == "a"]
        a, b = ([whole[key, side].flatten(1) for key in keys] for side in "ab")
        left = _taken(b, [positions[key].rows for key in keys])
        right = _taken([each.T for each in a], [positions[key].columns for key in keys])
        for key, rows, columns in zip(keys, left, right, strict=True):
            expected[key] = expected_samples(positions[key], own[key], rows, columns, layers[key].scale, dtype)

    pairs = [((key, side), tensor) for key, each in layers.items() for side, tensor in each.pair._asdict().items()]
    each_whole([pairs] if pairs else [], add, engines.run_on_all_ranks, gather)
    return expected


def _base_values(
    weights: Mapping[Key, torch.Tensor],
    positions: Mapping[Key, Positions],
    dtype: torch.dtype,
    engines: Engines,
    gather: Gather | None,
) -> dict[Key, torch.Tensor]:
    """Return the base weights' values at the positions, in the engine's dtype, on every rank."""
    values = {key: torch.full(each.rows.shape, torch.nan, dtype=torch.float64) for key, each in positions.items()}
    blocks = engines.run_on_all_ranks(
        lambda: {key: None if gather else held_block(weight) for key, weight in weights.items()}
    )

    def held() -> dict[Key, tuple[torch.Tensor, torch.Tensor]]:
        inside: dict[Key, torch.Tensor] = {}
        flat: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        for key, each in blocks.items():
            if each is None:
                continue
            (rows, columns), local = each
            row, column = positions[key].rows - rows.start, positions[key].columns - columns.start
            here = ((row >= 0) & (row < rows.size) & (column >= 0) & (column < columns.size)).nonzero()[:, 0]
            if len(here):
                inside[key] = here
                flat.append(local.reshape(-1))
                places.append(row[here] * columns.size + column[here])
        return {key: (inside[key], taken) for key, taken in zip(inside, _taken(flat, places), strict=True)}

    for rank in engines.ranks.gather(engines.run_on_all_ranks(held)):
        for key, (here, taken) in rank.items():
            values[key][here] = taken.to(dtype).double()

    def add(whole: dict[Key, torch.Tensor]) -> None:
        for key, weight in whole.items():
            place = positions[key].rows.to(weight.device), positions[key].columns.to(weight.device)
            values[key] = as_rows(weight)[place].to(dtype).double().cpu()

    others = [[(key, weights[key])] for key, each in blocks.items() if each is None]
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
