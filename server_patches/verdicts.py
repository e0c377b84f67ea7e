"""What the ranks tell each other, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sgld_lora_merge.errors import LoraMergeError, RequestError, summarise
from sgld_lora_merge.merge.kernels import MergeStats


@dataclass(frozen=True)
class Verdict:
    """What one rank tells the others after one phase. Pickled between ranks, so plain data only.

    Attributes:
        status: 0 when all is well, else the HTTP status this rank would answer.
        reason: the word under which the failure is counted.
        faults: one sentence each.
        opened: whether this rank has opened its payload.
        digest: of what this rank was sent; equal where all were sent the same.
        stats: by module, after a commit.
    """

    status: int = 0
    reason: str = ""
    faults: tuple[str, ...] = ()
    opened: bool = False
    digest: str = ""
    stats: Mapping[str, MergeStats] = field(default_factory=dict)


class NotTogether(LoraMergeError):
    """The ranks may hold different weights: only a restart brings the engine back."""

    status = 503
    reason = "failed"


class Refused(LoraMergeError):
    """Verdicts that keep an update from going live."""

    def __init__(self, verdicts: Sequence[Verdict]) -> None:
        super().__init__(told(verdicts))
        worst = max(verdicts, key=lambda verdict: verdict.status)
        self.status, self.reason = worst.status, worst.reason
        self.verdicts = verdicts


def verdict_of(error: LoraMergeError) -> Verdict:
    faults = error.faults if isinstance(error, RequestError) else (str(error),)
    return Verdict(error.status, error.reason, faults)


def raise_if_bad(verdicts: Sequence[Verdict]) -> None:
    if any(verdict.status for verdict in verdicts):
        raise Refused(verdicts)


def told(verdicts: Sequence[Verdict]) -> str:
    """All faults of all ranks; those that every rank has are told once, the others with their rank."""
    everywhere = set.intersection(*(set(verdict.faults) for verdict in verdicts))
    lines = [fault for fault in verdicts[0].faults if fault in everywhere]
    lines += [
        f"rank {rank}: {fault}"
        for rank, verdict in enumerate(verdicts)
        for fault in verdict.faults
        if fault not in everywhere
    ]
    return summarise(lines)
