"""Whether the engine's base weights are the trainer's: pairs of a policy that was trained on others are another policy.

Both sides sum the bits of every linear layer and convolution where it lies (`merge.weight_sums`), in one pass at the
speed of memory; no weight travels.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sgld_lora_merge.errors import SHOWN_FAULTS, RequestError, name_some
from sgld_lora_merge.merge.spans import Span
from sgld_lora_merge.merge.targets import as_rows
from sgld_lora_merge.merge.weight_sums import DTYPES, Block, WeightSum, block_sum, read_sums, total_of
from sgld_lora_merge.trainer.account import Survey, is_allowed
from sgld_lora_merge.trainer.engines import Engines
from sgld_lora_merge.trainer.gather import Gather, each_whole
from sgld_lora_merge.trainer.names import BASE_LAYER
from sgld_lora_merge.trainer.transport import SyncError
from sgld_lora_merge.wire.schema import RESOLVE_ROUTE

Key = tuple[str, str]  # module and layer
Parts = dict[Key, dict[Block, int]]

logger = logging.getLogger(__name__)


class BaseDiffers(SyncError):
    """The engine has other base weights than the trainer."""


@dataclass(frozen=True, eq=False)
class BaseWeights:
    """The base weights of one module, as the trainer has them.

    Attributes:
        weights: layer prefix -> weight of a linear layer or a convolution, perhaps a shard.
        merged: adapters that PEFT has merged into them.
        adapters: all that the model has.
        writes: how often torch has seen each one written to, which PEFT's merges are hidden from.
    """

    weights: Mapping[str, torch.Tensor]
    merged: frozenset[str]
    adapters: frozenset[str]
    writes: Sequence[int]

    @property
    def state(self) -> object:
        """Equal as long as nothing has written to the weights, and no adapter that might be in them came or went."""
        return self.merged, self.adapters, list(self.writes)


def read_base(surveyed: Survey, state: Mapping[str, torch.Tensor], allow_unsynced: Sequence[str]) -> BaseWeights:
    """Find the base weights of a model.

    Args:
        state: the model's state dict without wrappers; it has shards where the modules have something else (FSDP1).
        allow_unsynced: patterns of parameters that the engine may have otherwise.
    """
    found = [(name, module) for name, module in surveyed.weights if name in state]
    if allow_unsynced:
        found = [(name, module) for name, module in found if not is_allowed(name, allow_unsynced)]
    of_peft = [vars(module) for _, module in surveyed.of_peft]
    return BaseWeights(
        {name.removesuffix(".weight").removesuffix(f".{BASE_LAYER}"): state[name] for name, _ in found},
        frozenset(name for own in of_peft for name in own.get("merged_adapters", ())),
        frozenset(name for own in of_peft for name in own.get("peft_config", ())),
        [_writes(module.weight) for _, module in found],
    )


def compare_base(modules: Mapping[str, BaseWeights], engines: Engines, gather: Gather | None) -> None:
    """Compare the base weights of every module with those of every engine. A collective.

    Layers that the engine does not have under these names are left out, and so are, with a warning, those that one side
    has quantized. Where the dtypes differ, both are rounded to the narrower one first.

    Raises:
        BaseDiffers: they differ, and in which layers.
        RequestError: the trainer's ranks differ.
        SyncError: an engine did not say.
    """
    layers = {module: list(base.weights) for module, base in modules.items() if base.weights}
    if not layers:
        return
    places = engines.call(lambda transport: transport.ask(RESOLVE_ROUTE, {"modules": layers}))[0]["modules"]
    dtypes: dict[Key, torch.dtype] = {}
    shapes, unequal, uncompared = [], [], []
    for module, names in layers.items():
        for name in names:
            weight, place = modules[module].weights[name], places.get(module, {}).get(name, {"fault": "not answered"})
            if "fault" in place:
                continue
            dtype = common_dtype(weight.dtype, place["dtype"])
            if dtype is None or not weight.shape.numel():
                uncompared.append(f"{module}.{name}")
            elif place["shape"] != (shape := [weight.shape[0], math.prod(weight.shape[1:])]):
                shapes.append(f"{module}: {name!r} has shape {shape}, the engine's {place['shape']}")
            else:
                dtypes[module, name] = dtype
    if uncompared and engines.ranks.rank == 0:
        logger.warning("%d base weights cannot be compared with the engine's, since they are quantized, or empty as a "
                       "parameter of DeepSpeed's ZeRO-3 is: %s", len(uncompared), name_some(uncompared))  # fmt: skip
    weights = {(module, name): (modules[module].weights[name], dtype) for (module, name), dtype in dtypes.items()}
    parts = sums_of_ranks(weights, engines, gather)
    expected: dict[str, dict[str, dict[str, str]]] = {}
    for (module, name), (weight, dtype) in weights.items():
        rows, columns = weight.shape[0], math.prod(weight.shape[1:])
        total = total_of([rank.get((module, name), {}) for rank in parts], rows, columns)
        if total is None:
            unequal.append(f"{module}.{name}")
        else:
            one = WeightSum(str(dtype).removeprefix("torch."), rows, columns, total)
            expected.setdefault(module, {})[name] = {"weight_sum": str(one)}
    if unequal:
        raise RequestError(
            f"the trainer's ranks have different base weights in {len(unequal)} layers: {name_some(unequal)}"
        )
    if shapes:
        raise BaseDiffers("; ".join(shapes[:SHOWN_FAULTS]))
    try:
        engines.verify({"base": expected})
    except SyncError as error:
        if error.answered == 200:  # the engine has compared
            raise BaseDiffers(str(error)) from error
        raise


def common_dtype(mine: torch.dtype, theirs: str) -> torch.dtype | None:
    """Return the dtype in which weights of two dtypes are compared, the narrower one; None where one is quantized."""
    other = DTYPES.get(theirs)
    if other is None or mine not in DTYPES.values():
        return None
    return mine if mine.itemsize < other.itemsize else other


def sums_of_ranks(
    weights: Mapping[Key, tuple[torch.Tensor, torch.dtype]], engines: Engines, gather: Gather | None
) -> list[Parts]:
    """Return, of every rank, the sums of the blocks that it holds. A collective.

    Args:
        weights: perhaps shards, and the dtype that each is rounded to.
        gather: makes one tensor whole, where the shards are no DTensors.
    """
    blocks = engines.run_on_all_ranks(
        lambda: {key: None if gather else held_block(weight) for key, (weight, _) in weights.items()}
    )
    others = [[(key, weights[key][0])] for key, each in blocks.items() if each is None]

    def own() -> Parts:
        held = {key: each for key, each in blocks.items() if each is not None and each[0].size}
        sums = read_sums([_sum(values, block, *weights[key]) for key, (block, values) in held.items()])
        return {key: {block: total} for (key, (block, _)), total in zip(held.items(), sums, strict=True)}

    parts = engines.run_on_all_ranks(own)

    def add(one: dict[Key, torch.Tensor]) -> None:
        for key, whole in one.items():
            rows = as_rows(whole)
            block = Block(Span(0, rows.shape[0]), Span(0, rows.shape[1]))
            parts[key] = {block: read_sums([_sum(rows, block, *weights[key])])[0]}

    each_whole(others, add, engines.run_on_all_ranks, gather)
    return engines.ranks.gather(parts)


def held_block(weight: torch.Tensor) -> tuple[Block, torch.Tensor] | None:
    """Return the rows and columns of the whole weight that this rank holds, and their values ``[rows, columns]``.

    Returns:
        None for a sharding of which a rank's part is no such block.
    """
    weight = weight.detach()
    if not isinstance(weight, DTensor):
        rows = as_rows(weight)
        return Block(Span(0, rows.shape[0]), Span(0, rows.shape[1])), rows
    cut = {each.dim for each in weight.placements if isinstance(each, Shard)}
    plain = all(type(each) in (Replicate, Shard) for each in weight.placements)
    if not plain or not cut <= ({0, 1} if weight.ndim == 2 else {0}):
        return None
    shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    local = weight.to_local()
    columns = math.prod(shape[1:])
    first = offset[1] if weight.ndim == 2 else 0
    block = Block(Span(offset[0], offset[0] + shape[0]), Span(first, first + columns))
    return block, local.reshape(shape[0], columns)


def _sum(values: torch.Tensor, block: Block, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return block_sum(values, block, math.prod(weight.shape[1:]), dtype)


def _writes(weight: Any) -> int:
    return 0 if weight.is_inference() else weight._version
