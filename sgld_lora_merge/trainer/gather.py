"""Make sharded tensors whole, one bucket ahead of the one that is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

Gather = Callable[[torch.Tensor], torch.Tensor]
Key = TypeVar("Key")

SMALL_NBYTES = 4 * 2**20  # of a whole tensor that travels with others
GROUP_NBYTES = 64 * 2**20
# torch 2.13 has another name for it, and warns of the one that torch 2.11 has
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
    """Wait until the collective that makes a tensor whole has ended; return the tensor."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def whole(tensor: torch.Tensor, gather: Gather | None = None) -> torch.Tensor:
    """Make one tensor whole."""
    return waited((gather or start_whole)(tensor))


def start_all(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Begin to make many tensors whole; return a function that waits for them. A collective.

    Small shards of rows over one mesh, which is how FSDP2 has A and B, travel together: hundreds of collectives take
    the host longer than the links.
    """
    groups = group_small_shards(tensors)
    grouped = {index for group in groups for index in group}
    alone = {index: start_whole(tensor) for index, tensor in enumerate(tensors) if index not in grouped}
    begun = [(group, _start_rows([tensors[index] for index in group])) for group in groups]

    def finish() -> list[torch.Tensor]:
        done = {index: waited(tensor) for index, tensor in alone.items()}
        while begun:
            group, rows = begun.pop(0)  # whose memory is free before the next one takes as much again
            done |= zip(group, rows(), strict=True)
        return [done[index] for index in range(len(tensors))]

    return finish


def group_small_shards(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the positions of shards that travel together, in groups up to a limit of bytes."""
    groups: list[list[int]] = []
    open_groups: dict[tuple[DeviceMesh, torch.dtype], tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, DTensor) or tensor.placements != (Shard(0),) or tensor.nbytes > SMALL_NBYTES:
            continue
        key = tensor.device_mesh, tensor.dtype
        group, nbytes = open_groups.get(key, ([], GROUP_NBYTES))
        if nbytes + tensor.nbytes > GROUP_NBYTES:
            group, nbytes = [], 0
            groups.append(group)
        group.append(index)
        open_groups[key] = group, nbytes + tensor.nbytes
    return groups


def _start_rows(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Begin one collective for DTensors of one dtype whose rows are sharded over one mesh of one dimension.

    A rank has ``ceil(rows / ranks)`` rows, as `torch.chunk` gives them; the last ranks may have fewer, or none, and
    fill up, so that what is filled up is behind all rows.
    """
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    mesh = sharded[0].device_mesh
    ranks = mesh.size()
    chunks = [-(-tensor.shape[0] // ranks) for tensor in sharded]
    sizes = [chunk * tensor.shape[1:].numel() for chunk, tensor in zip(chunks, sharded, strict=True)]
    local = [_filled(tensor.to_local().detach().flatten(), size) for tensor, size in zip(sharded, sizes, strict=True)]
    everyones = local[0].new_empty(ranks * sum(sizes))
    own = everyones.chunk(ranks)[mesh.get_local_rank()]
    torch.cat(local, out=own)
    work = _all_gather(everyones, own, group=mesh.get_group(), async_op=True)

    def finish() -> list[torch.Tensor]:
        work.wait()
        parts = everyones.view(ranks, -1).split(sizes, dim=1)
        return [
            part.reshape(ranks * chunk, *tensor.shape[1:])[: tensor.shape[0]]
            for part, chunk, tensor in zip(parts, chunks, sharded, strict=True)
        ]

    return finish


def _filled(local: torch.Tensor, size: int) -> torch.Tensor:
    return local if local.numel() == size else torch.cat([local, local.new_zeros(size - local.numel())])


class GatherAhead(Generic[Key]):
    """Makes tensors whole bucket by bucket. While one is sent the next one is under way, and no other is in memory.

    Args:
        buckets: keyed tensors, the same on every rank and in the same order.
        gather: makes one tensor whole in the place of `start_all`, for any other sharding.
    """

    def __init__(self, buckets: Iterable[list[tuple[Key, torch.Tensor]]], gather: Gather | None = None) -> None:
        self._buckets = iter(buckets)
        self._start = start_all if gather is None else _one_by_one(gather)
        self._begun: tuple[list[Key], Callable[[], list[torch.Tensor]]] | None = None

    def begin(self) -> None:
        """Begin the next bucket, unless it is begun: called when the present one is needed no more. A collective."""
        if self._begun is None and (bucket := next(self._buckets, None)):
            self._begun = [key for key, _ in bucket], self._start([tensor for _, tensor in bucket])

    def __iter__(self) -> Iterator[list[tuple[Key, torch.Tensor]]]:
        self.begin()
        while self._begun is not None:
            yield self._whole(*self._begun)
            self.begin()

    def _whole(self, keys: list[Key], finish: Callable[[], list[torch.Tensor]]) -> list[tuple[Key, torch.Tensor]]:
        """Finish the bucket that was begun; nothing here refers to it afterwards."""
        self._begun = None
        return list(zip(keys, finish(), strict=True))


def _one_by_one(gather: Gather) -> Callable[[Sequence[torch.Tensor]], Callable[[], list[torch.Tensor]]]:
    def start(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        begun = [gather(tensor) for tensor in tensors]
        return lambda: [waited(begun.pop(0)) for _ in range(len(begun))]

    return start
