"""Rows and columns of a weight as its checkpoint has them, where sglang puts them elsewhere as it loads it.

MiniMax-H3's checkpoint has q, k and v of head 0, then those of head 1; its ``qkv_proj`` has all q, all k, all v. A pair
of the weight's own name is of the checkpoint's rows. What sglang does to the whole weight, before it is sharded, is an
attribute of the parameter: ``rank_local_weight_transform``.

In sglang 0.5.21 and 0.5.22 the last layer of FLUX's and LongCat's single blocks, over several ranks, takes a part of
the attention's columns and a part of the MLP's. Only a loader that is set on the layer itself knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from sglang.multimodal_gen.runtime.layers.linear import RowParallelLinear
from torch import nn

from sgld_lora_merge.merge.spans import Span, take
from sgld_lora_merge.merge.targets import CannotLand

Transform = Callable[[torch.Tensor], torch.Tensor]


def checkpoint_rows(model: nn.Module, name: str, layer: Any, rows: int) -> tuple[Span, ...]:
    """Return the rows of a layer's whole weight in its checkpoint, in the order in which sglang has them.

    Args:
        model: the module that the layer's name is of.
        name: of the layer.
        rows: of the whole weight.

    Raises:
        CannotLand: sglang does something else to the weight than to reorder its rows, or what it does is not known.
    """
    # FSDP puts parameters of its own in place of those with the attribute; sglang's loader keeps the latter
    before_fsdp = model.__dict__.get("_pre_fsdp_weight_loader_params", {})
    weight = before_fsdp.get(f"{name}.weight", getattr(layer, "weight", None))
    transform = getattr(weight, "rank_local_weight_transform", None)
    if transform is not None:
        return _order_of(transform, rows)
    parent, _, own_name = name.rpartition(".")
    reorders = own_name == "qkv_proj" and hasattr(model.get_submodule(parent), "_install_qkv_weight_loader")
    if reorders and not hasattr(weight, "weight_loader"):
        raise CannotLand(
            "its rows may stand in another order than in the checkpoint, and the weight, which was replaced after it "
            "was loaded (quantization?), does not tell: send to_q, to_k and to_v under diffusers' names"
        )
    return (Span(0, rows),)


def checkpoint_columns(layer: Any, columns: int) -> tuple[Span, ...] | None:
    """Return the columns of a layer's checkpoint that this rank has, in its order; None where the class decides.

    Args:
        columns: of the whole weight.
    """
    loader = vars(layer).get("weight_loader")
    if loader is None or not isinstance(layer, RowParallelLinear):
        return None
    own: Any = nn.Parameter(torch.zeros(1, layer.input_size_per_partition, dtype=torch.int64), requires_grad=False)
    own.input_dim = 1
    loader(own, torch.arange(columns)[None])
    return _runs(own.data[0])


def reorder(spans: Sequence[Span], order: Sequence[Span]) -> tuple[Span, ...]:
    """Return what stands at these rows of the rows that `order` names one after the other."""
    return tuple(row for span in spans for row in take(order, span))


def _order_of(transform: Transform, rows: int) -> tuple[Span, ...]:
    """Learn from row numbers what a transform does to rows; two columns show that it leaves columns alone."""
    numbered = torch.arange(2 * rows).view(rows, 2)
    name = getattr(transform, "__qualname__", repr(transform))
    try:
        moved = transform(numbered.clone()).to(numbered)
    except Exception as error:
        raise CannotLand(f"sglang changes its weight on loading, and {name} failed on row numbers: {error}") from error
    if not torch.equal(moved.sort(dim=0).values, numbered) or not torch.equal(moved[:, 1], moved[:, 0] + 1):
        raise CannotLand(f"sglang changes its weight on loading by more than the order of its rows ({name})")
    return _runs(moved[:, 0] // 2)


def _runs(numbers: torch.Tensor) -> tuple[Span, ...]:
    """Return the runs of consecutive numbers, int64 ``[count]``, in their order."""
    starts = [0, *(numbers.diff().ne(1).nonzero().flatten() + 1).tolist()]
    sizes = [stop - start for start, stop in pairwise([*starts, len(numbers)])]
    return tuple(Span(first, first + size) for first, size in zip(numbers[starts].tolist(), sizes, strict=True))
