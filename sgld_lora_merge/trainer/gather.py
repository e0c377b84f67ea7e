"""Sharded tensors made whole, one bucket ahead of the one that is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate

Gather = Callable[[torch.Tensor], torch.Tensor]
Key = TypeVar("Key")


def start_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Begin to make a tensor whole: a DTensor is redistributed, a plain tensor passes. A collective.

    The result must go through `waited` before its bytes are read.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim, async_op=True)
    return whole.to_local()


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor when its collective has ended."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def whole(tensor: torch.Tensor, gather: Gather | None = None) -> torch.Tensor:
    """One tensor made whole."""
    return waited((gather or start_whole)(tensor))


def gather_ahead(
    buckets: Iterable[list[tuple[Key, torch.Tensor]]], gather: Gather | None = None
) -> Iterator[list[tuple[Key, torch.Tensor]]]:
    """Whole tensors bucket by bucket; while one is in use the next one is under way, and no other is in memory.

    Args:
        buckets: keyed tensors, the same on every rank and in the same order.
        gather: makes one tensor whole in the place of `start_whole`, for any other sharding.
    """
    start = gather or start_whole
    ahead: list[tuple[Key, torch.Tensor]] | None = None
    for bucket in buckets:
        begun = [(key, start(tensor)) for key, tensor in bucket]
        if ahead is not None:
            yield [(key, waited(tensor)) for key, tensor in ahead]
        ahead = begun
    if ahead is not None:
        yield [(key, waited(tensor)) for key, tensor in ahead]
