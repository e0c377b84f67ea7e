"""How the ranks of one replica hear each other's verdict, with a time limit."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Silence(Exception):
    """A rank did not join in time; the ranks can no longer be kept together."""


class Replica(Protocol):
    """What is needed of sglang's group coordinator."""

    cpu_group: Any
    world_size: int
    rank_in_group: int


def gather(verdict: Any, replica: Replica, timeout_s: float) -> list[Any]:
    """Every rank's verdict, in rank order, on every rank. A collective: each rank enters once, whatever befell it.

    Unlike ``all_gather_object`` it gives up after ``timeout_s`` seconds.

    Raises:
        Silence: not all ranks took part in time, or the connection to one broke.
    """
    if replica.world_size == 1:
        return [verdict]
    data = torch.frombuffer(bytearray(pickle.dumps(verdict)), dtype=torch.uint8)
    sizes = _all_gather(torch.tensor([data.numel()]), replica, timeout_s)
    longest = int(max(int(size) for size in sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    everything = _all_gather(padded, replica, timeout_s)
    return [pickle.loads(each[: int(size)].numpy().tobytes()) for each, size in zip(everything, sizes, strict=True)]


def _all_gather(tensor: torch.Tensor, replica: Replica, timeout_s: float) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(replica.world_size)]
    try:
        work = dist.all_gather(gathered, tensor, group=replica.cpu_group, async_op=True)
        done = work.wait(timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise Silence(f"no agreement between {replica.world_size} ranks within {timeout_s:g} s: {error}") from error
    if not done:
        raise Silence(f"no agreement between {replica.world_size} ranks within {timeout_s:g} s")
    return gathered
