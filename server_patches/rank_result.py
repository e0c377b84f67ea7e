"""The result of one phase on one rank, and what the results of all ranks mean together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sgld_lora_merge.errors import LoraMergeError, RequestError, summarise
from sgld_lora_merge.merge.kernels import MergeStats


@dataclass(frozen=True)
class RankResult:
    """The outcome of one phase on one rank. Pickled between ranks, so it holds plain data only.

    Attributes:
        status: 0 for a success, else the HTTP status that this rank would answer.
        reason: the word under which the failure is counted.
        faults: one sentence each.
        opened: whether this rank has opened its payload.
        digest: digest of what this rank was sent; equal where all ranks were sent the same.
        stats: merge statistics by module, after a commit.
        begun: modules that a full-weight update has begun to write.
    """

    status: int = 0
    reason: str = ""
    faults: tuple[str, ...] = ()
    opened: bool = False
    digest: str = ""
    stats: Mapping[str, MergeStats] = field(default_factory=dict)
    begun: tuple[str, ...] = ()


class RanksDiverged(LoraMergeError):
    """The ranks may hold different weights: only a restart brings the engine back."""

    status = 503
    reason = "failed"


class RejectedByRank(LoraMergeError):
    """At least one rank failed, so that no rank goes on. The status is that of the worst failure."""

    def __init__(self, results: Sequence[RankResult]) -> None:
        super().__init__(format_faults(results))
        worst = max(results, key=lambda result: result.status)
        self.status, self.reason = worst.status, worst.reason


def result_of(error: Exception) -> RankResult:
    """Return the result of a phase that ended with this exception."""
    if isinstance(error, RequestError):
        return RankResult(error.status, error.reason, tuple(error.faults))
    if isinstance(error, LoraMergeError):
        return RankResult(error.status, error.reason, (str(error),))
    return RankResult(500, "engine", (f"{type(error).__name__}: {error}",))


def raise_if_rejected(results: Sequence[RankResult]) -> None:
    """Raise if any rank failed.

    Raises:
        RejectedByRank: any rank failed.
    """
    if any(result.status for result in results):
        raise RejectedByRank(results)


def format_faults(results: Sequence[RankResult]) -> str:
    """Join the faults of all ranks: a fault that every rank has appears once, any other one with its rank."""
    everywhere = set.intersection(*(set(result.faults) for result in results))
    lines = [fault for fault in results[0].faults if fault in everywhere]
    lines += [
        f"rank {rank}: {fault}"
        for rank, result in enumerate(results)
        for fault in result.faults
        if fault not in everywhere
    ]
    return summarise(lines)
