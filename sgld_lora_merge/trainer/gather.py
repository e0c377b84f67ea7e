"""Sharded tensors made whole, one bucket ahead of the one that is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

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


class GatherAhead(Generic[Key]):
    """Whole tensors bucket by bucket. While one is sent the next one is under way, and no other is in memory.

    Args:
        buckets: keyed tensors, the same on every rank and in the same order.
        gather: makes one tensor whole in the place of `start_whole`, for any other sharding.
    """

    def __init__(self, buckets: Iterable[list[tuple[Key, torch.Tensor]]], gather: Gather | None = None) -> None:
        self._buckets = iter(buckets)
        self._start = gather or start_whole
        self._begun: list[tuple[Key, torch.Tensor]] = []

    def begin(self) -> None:
        """Begin the next bucket, unless it is begun: for when the present one is needed no more. A collective."""
        if not self._begun:
            self._begun = [(key, self._start(tensor)) for key, tensor in next(self._buckets, [])]

    def __iter__(self) -> Iterator[list[tuple[Key, torch.Tensor]]]:
        self.begin()
        while self._begun:
            yield self._whole()
            self.begin()

    def _whole(self) -> list[tuple[Key, torch.Tensor]]:
        """The bucket that was begun, to which nothing here refers any more."""
        begun, self._begun = self._begun, []
        return [(key, waited(tensor)) for key, tensor in begun]
