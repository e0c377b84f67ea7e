"""sglang's layer classes: how each one divides its weight into sections and shards, and why a merge into it is refused.

Shapes come from the attributes that sglang's own weight loaders use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from sglang.multimodal_gen.runtime.distributed import tensor_model_parallel_all_reduce
from sglang.multimodal_gen.runtime.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    MergedReplicatedLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from sglang.multimodal_gen.runtime.layers.lora.linear import BaseLayerWithLoRA
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sgld_lora_merge.merge.spans import Span, take
from sgld_lora_merge.merge.targets import CONVOLUTIONS, Target, features


@dataclass(frozen=True)
class LayerSection:
    """One logical projection of a weight.

    Attributes:
        out_features: rows of the whole projection.
        source: this rank's rows of it.
        replicas: how many ranks hold the same rows.
    """

    out_features: int
    source: Span
    replicas: int = 1


Rows = list[tuple[int, Span] | tuple[int, Span, int]]


def partition(layer: Any) -> tuple[Rows, list[tuple[int, Span]], int]:
    """Return how a layer's weight is divided.

    Returns:
        Sections of the rows and segments of the columns, each with its whole size and this rank's part; and the number
        of shards.
    """
    shards = getattr(layer, "tp_size", 1) if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)) else 1
    rank = layer.tp_rank if shards > 1 else 0
    everything: Callable[[int], tuple[int, Span]] = lambda size: (size, Span(0, size))  # noqa: E731
    if isinstance(layer, QKVParallelLinear):
        q, kv = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
        replicas = layer.num_kv_head_replicas
        kv_rows = (layer.total_num_kv_heads * layer.head_size, part_of(rank // replicas, kv), replicas)
        return (
            [(layer.total_num_heads * layer.head_size, part_of(rank, q)), kv_rows, kv_rows],
            [everything(layer.input_size)],
            shards,
        )
    if isinstance(layer, ColumnParallelLinear):
        sizes = layer.output_sizes if isinstance(layer, MergedColumnParallelLinear) else [layer.output_size]
        return [(size, part_of(rank, size // shards)) for size in sizes], [everything(layer.input_size)], shards
    if isinstance(layer, RowParallelLinear):
        segments = getattr(layer, "input_sizes", None) or [layer.input_size]  # sglang 0.5.23 brought segments
        return [everything(layer.output_size)], [(size, part_of(rank, size // shards)) for size in segments], shards
    if isinstance(layer, MergedReplicatedLinear):
        return [everything(size) for size in layer.output_sizes], [everything(layer.input_size)], 1
    if isinstance(layer, ReplicatedLinear):
        return [everything(layer.output_size)], [everything(layer.input_size)], 1
    rows, columns = features(layer)
    return [everything(rows)], [everything(columns)], 1


def part_of(index: int, size: int) -> Span:
    return Span(index * size, (index + 1) * size)


def offsets_of(cols: list[tuple[int, Span]]) -> list[int]:
    return [0, *accumulate(size for size, _ in cols)][:-1]


def takes_pairs(layer: nn.Module) -> bool:
    return isinstance(layer, (LinearBase, nn.Linear, *CONVOLUTIONS))


def obstacle_to_merging(layer: Any) -> str | None:
    """Return why nothing can be merged into a layer's weight; None where a merge is defined."""
    method = getattr(layer, "quant_method", None)
    if isinstance(layer, LinearBase) and not isinstance(method, UnquantizedLinearMethod):
        return f"its weight is quantized ({type(method).__name__})"
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return "it has no plain weight (packed quantization?)"
    if isinstance(weight, DTensor) and any(isinstance(each, Shard) and each.dim != 0 for each in weight.placements):
        return "its weight is sharded by columns"
    return None


def unwrapped(layer: nn.Module) -> nn.Module:
    """Return the layer itself where sglang has wrapped it for an adapter of its own."""
    return layer.base_layer if isinstance(layer, BaseLayerWithLoRA) else layer


def local_rows(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows; FSDP keeps them as the local part of a distributed tensor."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data


def own_rows(targets: Sequence[Target], weight: DTensor) -> list[Target]:
    """Cut the targets of a weight to the rows that FSDP keeps on this rank; a target on other ranks gets no rows."""
    shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    mine = Span(offset[0], offset[0] + shape[0])
    shards = 1
    for dim, placement in enumerate(weight.placements):
        shards *= weight.device_mesh.size(dim) if isinstance(placement, Shard) else 1
    own = []
    for target in targets:
        rows = target.rows.within(mine)
        cut = Span(rows.start - target.rows.start, rows.stop - target.rows.start)
        b_rows = take(target.b_rows, cut)
        own.append(replace(target, rows=rows.shifted(-mine.start), b_rows=b_rows, copies=target.copies // shards))
    return own


def sum_over_ranks(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Sum ``x @ A.T`` over the ranks of a layer that each hold some columns, and whose output is whole."""
    parallel = isinstance(layer, RowParallelLinear) and layer.tp_size > 1 and layer.reduce_results
    return tensor_model_parallel_all_reduce(hidden, tp_group=layer.tp_group) if parallel else hidden
