"""Decide which layers travel together: buckets of at most a given number of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from sgld_lora_merge.wire.layout import aligned


def whole_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, of a shard those of the whole; some kinds of shards know only shape and dtype."""
    return tensor.shape.numel() * tensor.dtype.itemsize


def flattened_nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that `wire.bucket.flatten` takes for these tensors; shards count whole."""
    return sum(aligned(whole_nbytes(tensor)) for tensor in tensors)


def plan_buckets(nbytes: Mapping[str, int], buffer_size: int) -> list[list[str]]:
    """Put layers into buckets.

    The layers of one parent module (to_q, to_k, to_v) are one group, which is never split: an engine that replaces a
    fused layer by what one request carries works too. A bucket ends before the group that would exceed the size; a
    larger group travels alone.

    Args:
        nbytes: layer prefix -> its bytes in a bucket.
        buffer_size: bytes of a bucket, at least 1.

    Raises:
        ValueError: a buffer size below 1.
    """
    if buffer_size < 1:
        raise ValueError(f"the buffer size is {buffer_size} bytes; it is at least 1")
    groups: dict[str, list[str]] = {}
    for layer in nbytes:
        groups.setdefault(layer.rpartition(".")[0], []).append(layer)
    buckets: list[list[str]] = []
    room = 0
    for layers in groups.values():
        size = sum(nbytes[layer] for layer in layers)
        if not buckets or size > room:
            buckets.append([])
            room = buffer_size
        buckets[-1].extend(layers)
        room -= size
    return buckets
