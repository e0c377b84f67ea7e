"""The trainer's ranks and the engines beside them: ranks ``[i * g, (i + 1) * g)`` belong to engine i of g GPUs."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from sgld_lora_merge.errors import LoraMergeError

Value = TypeVar("Value")


class Ranks:
    """Who sends to which engine. Making one is a collective, as is every method; without torch.distributed it is alone.

    Args:
        engines: how many there are.
        gpus_per_engine: g.

    Raises:
        LoraMergeError: there are fewer ranks than the engines have GPUs, or no engine.
    """

    def __init__(self, engines: int, gpus_per_engine: int) -> None:
        self._distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self._distributed else 0
        self.size = dist.get_world_size() if self._distributed else 1
        needed = engines * gpus_per_engine
        if engines < 1 or gpus_per_engine < 1 or needed > self.size:
            raise LoraMergeError(
                f"{engines} engines of {gpus_per_engine} GPUs need at least one engine, one GPU each, and a rank for "
                f"every GPU; there are {self.size} ranks"
            )
        self.serves = self.rank < needed
        """Whether a worker of an engine reads this rank's payload."""
        self.engine = self.rank // gpus_per_engine if self.serves and self.rank % gpus_per_engine == 0 else None
        """The engine that this rank calls; None for all but the first rank of an engine."""
        self.place = self.rank % gpus_per_engine
        """Of this rank's worker among those of its engine."""
        self._group: Any = None
        self._all: Any = None
        if self._distributed:
            # objects travel over gloo, whatever the tensors travel over
            self._all = dist.new_group(backend="gloo")
            for first in range(0, needed, gpus_per_engine):
                members = list(range(first, first + gpus_per_engine))
                group = dist.new_group(members, backend="gloo")
                if self.rank in members:
                    self._group, self._first = group, first

    def gather(self, value: Value) -> list[Value]:
        """Return what every rank has, in the order of the ranks."""
        if not self._distributed:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._all)
        return values

    def gather_of_engine(self, value: Value) -> list[Value]:
        """Return what the ranks of this rank's engine have, on the rank that calls it; [] on the others."""
        if not self._distributed:
            return [value]
        if not self.serves:
            return []
        values: list[Any] | None = None
        if self.engine is not None:
            values = [None] * dist.get_world_size(self._group)
        dist.gather_object(value, values, dst=self._first, group=self._group)
        return values or []

    def of_engine_from_first(self, value: Value) -> Value:
        """Return what the rank that calls the engine has, on all ranks of that engine; other ranks keep their own."""
        if self._distributed and self.serves:
            box = [value]
            dist.broadcast_object_list(box, src=self._first, group=self._group)
            value = box[0]
        return value
