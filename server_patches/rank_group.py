"""The ranks of one replica as a group: gather a value of every rank, within a time limit."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from server_patches.rank_result import RankResult, RanksDiverged, raise_if_rejected, result_of
from sgld_lora_merge.errors import LoraMergeError, summarise

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class RankTimeout(Exception):
    """A rank did not take part in time, so the ranks can no longer agree."""


class Replica(Protocol):
    """The part of sglang's group coordinator that is used here."""

    cpu_group: Any
    world_size: int
    rank_in_group: int


class RankGroup:
    """The ranks that serve one request together.

    Args:
        replica: sglang's group of them.
        timeout_s: how long a rank waits for the others.
    """

    def __init__(self, replica: Replica, timeout_s: float) -> None:
        self._replica = replica
        self._timeout_s = timeout_s

    @property
    def size(self) -> int:
        return self._replica.world_size

    @property
    def rank(self) -> int:
        return self._replica.rank_in_group

    @property
    def is_first(self) -> bool:
        """Whether this rank's answer is the one that the client gets."""
        return self.rank == 0

    def gather(self, mine: Result, context: str = "") -> list[Result]:
        """Gather a value from every rank, in rank order. A collective: every rank must call it, also after a failure.

        Args:
            context: text that the message of a failure ends with.

        Raises:
            RanksDiverged: a rank did not come in time.
        """
        try:
            return gather(mine, self._replica, self._timeout_s)
        except Exception as error:  # whatever the cause, the ranks do not know each other's results
            cause = error if isinstance(error, RankTimeout) else f"{type(error).__name__}: {error}"
            raise RanksDiverged(f"{cause}{context}. The ranks can no longer agree: restart the engine") from error

    def gather_results(self, mine: RankResult, *, written: bool = False) -> list[RankResult]:
        """Gather each rank's result of a phase; ``written``: the phase may have changed weights."""
        own = f"; this rank: {summarise(mine.faults)}" if mine.faults else ""
        return self.gather(mine, f"{own}; the ranks may hold different weights" if written else own)

    def run(self, work: Callable[[], Result]) -> list[Result]:
        """Run read-only ``work`` on every rank; return every rank's result only if all ranks succeeded.

        Raises:
            RejectedByRank: it failed on any rank; every rank raises.
        """
        gathered = self.gather(attempt(work))
        raise_if_rejected([outcome for outcome, _ in gathered])
        return [result for _, result in gathered if result is not None]


def attempt(work: Callable[[], Result]) -> tuple[RankResult, Result | None]:
    """Run ``work``; return its outcome and its result. Never raise, since other ranks wait for this one."""
    try:
        return RankResult(), work()
    except Exception as error:
        if not isinstance(error, LoraMergeError):
            logger.exception("this rank's part of a request failed")
        return result_of(error), None


def gather(value: Any, replica: Replica, timeout_s: float) -> list[Any]:
    """Return every rank's value, in rank order. Unlike ``all_gather_object`` it gives up after ``timeout_s`` seconds.

    Raises:
        RankTimeout: not all ranks took part in time, or the connection to one broke.
    """
    if replica.world_size == 1:
        return [value]
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = _all_gather(torch.tensor([data.numel()]), replica, timeout_s)
    longest = int(max(int(size) for size in sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    everything = _all_gather(padded, replica, timeout_s)
    return [pickle.loads(each[: int(size)].numpy().tobytes()) for each, size in zip(everything, sizes, strict=True)]


def _all_gather(tensor: torch.Tensor, replica: Replica, timeout_s: float) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(replica.world_size)]
    late = f"no agreement between {replica.world_size} ranks within {timeout_s:g} s"
    try:
        work = dist.all_gather(gathered, tensor, group=replica.cpu_group, async_op=True)
        done = work.wait(timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RankTimeout(f"{late}: {error}") from error
    if not done:
        raise RankTimeout(late)
    return gathered
