"""Make sharded tensors whole, one bucket ahead of the one that is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

Gather = Callable[[torch.Tensor], torch.Tensor]
Key = TypeVar("Key")

GROUP_NBYTES = 64 * 2**20  # of small shards that travel together
# torch 2.13 has another name for it, and warns of the one that torch 2.11 has
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Gathering(Protocol):
    """Tensors on their way to be whole. What may fail on one rank alone is apart from what all ranks must call.

    Making one allocates what it needs, `start` is the collective, and `finish` waits and copies.
    """

    def start(self) -> None:
        """Begin. A collective."""

    def finish(self) -> list[torch.Tensor]:
        """Return the whole tensors, in order. Called once."""


def whole(tensor: torch.Tensor, gather: Gather | None = None) -> torch.Tensor:
    """Make one tensor whole. A collective."""
    gathering = prepare([tensor], gather)
    gathering.start()
    return gathering.finish()[0]


def prepare(tensors: Sequence[torch.Tensor], gather: Gather | None = None) -> Gathering:
    """Prepare to make tensors whole: DTensors are gathered, plain tensors pass.

    Shards of rows over one mesh, which is how FSDP2 has A and B, travel together: hundreds of collectives take the host
    longer than the links.

    Args:
        gather: makes one tensor whole, for any other sharding.
    """
    if gather is not None:
        return _OneByOne(tensors, gather)  # its shards may be no tensors of torch's
    detached = [tensor.detach() for tensor in tensors]
    rows = [index for index, tensor in enumerate(detached) if _has_rows(tensor)]
    others = [index for index in range(len(detached)) if index not in set(rows)]
    groups = [[rows[at] for at in group] for group in group_shards([detached[index] for index in rows])]
    parts: list[tuple[list[int], Gathering]] = [
        (group, _Rows([detached[index] for index in group])) for group in groups
    ]
    parts.append((others, _OneByOne([detached[index] for index in others], _redistribute)))
    return _Parts(parts, len(detached))


def group_shards(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the positions of shards that travel together: one mesh, one dtype, up to a limit of bytes."""
    groups: list[list[int]] = []
    open_groups: dict[tuple[DeviceMesh, torch.dtype], tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        assert isinstance(tensor, DTensor)
        key = tensor.device_mesh, tensor.dtype
        group, nbytes = open_groups.get(key, ([], GROUP_NBYTES))
        if nbytes + tensor.nbytes > GROUP_NBYTES:
            group, nbytes = [], 0
            groups.append(group)
        group.append(index)
        open_groups[key] = group, nbytes + tensor.nbytes
    return groups


def _has_rows(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and tensor.placements == (Shard(0),)


def _redistribute(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim, async_op=True).to_local()


class _Parts:
    """Several gatherings as one."""

    def __init__(self, parts: list[tuple[list[int], Gathering]], count: int) -> None:
        self._parts, self._count = parts, count

    def start(self) -> None:
        for _, part in self._parts:
            part.start()

    def finish(self) -> list[torch.Tensor]:
        done: dict[int, torch.Tensor] = {}
        while self._parts:
            places, part = self._parts.pop(0)  # whose memory is free before the next one takes as much again
            done |= zip(places, part.finish(), strict=True)
        return [done[index] for index in range(self._count)]


class _OneByOne:
    """Calls a function that makes one tensor whole. It allocates when it is called, so it may fail on one rank."""

    def __init__(self, tensors: Sequence[torch.Tensor], gather: Gather) -> None:
        self._tensors, self._gather = tensors, gather
        self._begun: list[torch.Tensor] = []

    def start(self) -> None:
        self._begun = [self._gather(tensor) for tensor in self._tensors]
        self._tensors = ()

    def finish(self) -> list[torch.Tensor]:
        return [_waited(self._begun.pop(0)) for _ in range(len(self._begun))]


class _Rows:
    """One collective for DTensors of one dtype whose rows are sharded over one mesh of one dimension.

    A rank has ``ceil(rows / ranks)`` rows, as `torch.chunk` gives them; the last ranks may have fewer, or none, and
    fill up, so that what is filled up is behind all rows.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        mesh = sharded[0].device_mesh
        self._ranks, self._group = mesh.size(), mesh.get_group()
        self._shapes = [tensor.shape for tensor in sharded]
        self._chunks = [-(-shape[0] // self._ranks) for shape in self._shapes]
        self._sizes = [chunk * shape[1:].numel() for chunk, shape in zip(self._chunks, self._shapes, strict=True)]
        pairs = zip(sharded, self._sizes, strict=True)
        local = [_filled(tensor.to_local().detach().flatten(), size) for tensor, size in pairs]
        self._everyones = local[0].new_empty(self._ranks * sum(self._sizes))
        self._own = self._everyones.chunk(self._ranks)[mesh.get_local_rank()]
        torch.cat(local, out=self._own)
        self._work: Any = None

    def start(self) -> None:
        self._work = _all_gather(self._everyones, self._own, group=self._group, async_op=True)

    def finish(self) -> list[torch.Tensor]:
        self._work.wait()
        parts = self._everyones.view(self._ranks, -1).split(self._sizes, dim=1)
        return [
            part.reshape(self._ranks * chunk, *shape[1:])[: shape[0]]
            for part, chunk, shape in zip(parts, self._chunks, self._shapes, strict=True)
        ]


def _filled(local: torch.Tensor, size: int) -> torch.Tensor:
    return local if local.numel() == size else torch.cat([local, local.new_zeros(size - local.numel())])


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


class GatherAhead(Generic[Key]):
    """Makes tensors whole bucket by bucket. While one is sent the next one is under way, and no other is in memory.

    For each bucket: `prepare`, agree with the other ranks that all have, `start`, `take`. So no rank waits in a
    collective for one that has failed.

    Args:
        buckets: keyed tensors, the same on every rank and in the same order.
        gather: makes one tensor whole, for any other sharding than DTensor's.
    """

    def __init__(self, buckets: Iterable[list[tuple[Key, torch.Tensor]]], gather: Gather | None = None) -> None:
        self._buckets = iter(buckets)
        self._gather = gather
        self._next: tuple[list[Key], Gathering] | None = None
        self._failure: Exception | None = None

    def prepare(self) -> None:
        """Allocate for the next bucket, where there is one."""
        if bucket := next(self._buckets, None):
            keys, tensors = [key for key, _ in bucket], [tensor for _, tensor in bucket]
            self._next = keys, prepare(tensors, self._gather)

    def start(self) -> None:
        """Begin what is prepared. A collective; where it fails, `take` raises that."""
        try:
            if self._next is not None:
                self._next[1].start()
        except Exception as error:
            self._failure = error

    def take(self) -> dict[Key, torch.Tensor]:
        """Return the whole tensors of the bucket that was started; nothing here refers to them afterwards."""
        assert self._next is not None
        (keys, gathering), self._next = self._next, None
        if self._failure is not None:
            raise self._failure
        return dict(zip(keys, gathering.finish(), strict=True))


def each_whole(
    buckets: Sequence[list[tuple[Key, torch.Tensor]]],
    work: Callable[[dict[Key, torch.Tensor]], None],
    agree: Callable[[Callable[[], None]], None],
    gather: Gather | None = None,
) -> None:
    """Make tensors whole and work with them, bucket by bucket. A collective.

    Args:
        work: is given the whole tensors of one bucket.
        agree: runs a function on every rank, and raises on all where it failed on one.
    """
    ahead = GatherAhead(buckets, gather)
    for _ in buckets:
        agree(ahead.prepare)
        ahead.start()
        agree(lambda: work(ahead.take()))
