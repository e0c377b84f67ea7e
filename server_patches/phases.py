"""What all ranks of a replica do together: judge, agree, commit, and undo what one of them could not do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

from server_patches.agreement import Silence, gather
from server_patches.clock import Clock
from server_patches.verdicts import NotTogether, Refused, Verdict, raise_if_bad, told, verdict_of
from sgld_lora_merge.errors import LoraMergeError, RequestError, summarise
from sgld_lora_merge.merge.engine import MergeEngine, Plan
from sgld_lora_merge.merge.fingerprint import differences
from sgld_lora_merge.merge.kernels import MergeStats

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Phases:
    """The steps that every rank enters, whatever befell it in the one before.

    Args:
        engine: this rank's merges.
        weights_change: entered around every write, with the plan.
        replica: the ranks that serve one request together.
        timeout_s: how long a rank waits for the others.
    """

    def __init__(
        self,
        engine: MergeEngine,
        weights_change: Callable[[Plan], AbstractContextManager[None]],
        replica: Any,
        timeout_s: float,
    ) -> None:
        self._engine = engine
        self._weights_change = weights_change
        self._replica = replica
        self._timeout_s = timeout_s

    @property
    def is_first(self) -> bool:
        """Whether this rank's answer is the one that the client gets."""
        return bool(self._replica.rank_in_group == 0)

    def all_or_none(self, work: Callable[[], Result], clock: Clock, opened: list[bool]) -> Result:
        """Do work that writes nothing; its result, if it went well on every rank.

        Args:
            opened: set to whether each rank has opened its payload.

        Raises:
            Refused: with what was wrong on any rank.
        """

        def planned() -> Result:
            value = work()
            self._digest(clock)  # which may fail, and then is this rank's fault like any other
            return value

        verdict, result = _judge(planned)
        verdict = replace(verdict, opened=clock.opened, digest="" if verdict.status else self._digest(clock))
        opened[self._replica.rank_in_group] = verdict.opened
        verdicts = self.agree(verdict)
        opened[:] = [each.opened for each in verdicts]
        if any(each.reason == NotTogether.reason for each in verdicts):
            raise NotTogether(told(verdicts))
        raise_if_bad(verdicts)
        if len({each.digest for each in verdicts}) > 1:
            self._refuse_differences(clock)
        assert result is not None
        return result

    def _digest(self, clock: Clock) -> str:
        """Of what this rank was sent; nothing where no other rank has it to compare."""
        return clock.sent.digest if clock.sent is not None and self._replica.world_size > 1 else ""

    def _refuse_differences(self, clock: Clock) -> None:
        """Find out whether the ranks were sent different updates, or the same ones in another packing.

        Raises:
            RequestError: they were; with every layer that is another one on another rank.
        """
        sent = clock.sent
        faults = differences(self.share(lambda: {} if sent is None else sent.prints))
        if faults:
            raise RequestError(*(f"the ranks were sent different updates: {fault}" for fault in faults))

    def share(self, work: Callable[[], Result]) -> list[Result]:
        """Run read-only work on every rank, and return every rank's result on every rank.

        Raises:
            Refused: it failed on any of them; every rank raises.
        """
        verdict, result = _judge(work)
        gathered = self.gather_all((verdict, result))
        raise_if_bad([each for each, _ in gathered])
        return [each for _, each in gathered if each is not None]

    def commit(self, plan: Plan, clock: Clock) -> dict[str, MergeStats]:
        """Write on every rank; on failure of any, undo on every rank and raise."""
        try:
            with clock.stage("merge"):
                with self._weights_change(plan):
                    finish = self._engine.begin(plan)
                stats = finish()  # a GPU merges while caches are dropped
            faults = tuple(
                f"{module}: {each.non_finite} elements of the merged weight are not finite in its dtype"
                for module, each in stats.items()
                if each.non_finite
            )
            verdict = Verdict(400, "overflow", faults) if faults else Verdict(stats=stats)
        except Exception as error:
            logger.exception("the merge failed")
            verdict = Verdict(500, "engine", (f"{type(error).__name__}: {error}",))
        verdicts = self.agree(verdict, written=True)
        if not any(each.status for each in verdicts):
            return {
                part.module: sum((each.stats[part.module] for each in verdicts), MergeStats()) for part in plan.modules
            }
        self.revert(plan, told(verdicts))
        raise Refused(verdicts)

    def revert(self, plan: Plan, why: str) -> None:
        """Undo a commit on every rank.

        Raises:
            NotTogether: not all could; the message begins with ``why``.
        """
        undone = Verdict()
        try:
            with self._weights_change(plan):
                self._engine.revert(plan)
        except Exception as error:
            logger.exception("the previous weights could not be restored")
            undone = Verdict(503, "failed", (f"{type(error).__name__}: {error}",))
        undone_everywhere = self.agree(undone, written=True)
        if any(each.status for each in undone_everywhere):
            raise NotTogether(
                f"{why}; then the previous weights could not be restored: {told(undone_everywhere)}: restart the engine"
            )

    def agree(self, verdict: Verdict, *, written: bool = False) -> list[Verdict]:
        own = f"; this rank: {summarise(verdict.faults)}" if verdict.faults else ""
        return self.gather_all(verdict, f"{own}; the ranks may hold different weights" if written else own)

    def gather_all(self, mine: Result, context: str = "") -> list[Result]:
        """What every rank has, on every rank.

        Raises:
            NotTogether: a rank did not come in time.
        """
        try:
            return gather(mine, self._replica, self._timeout_s)
        except Exception as error:  # whatever it is: this rank has not heard the others, nor they it
            told = error if isinstance(error, Silence) else f"{type(error).__name__}: {error}"
            raise NotTogether(f"{told}{context}. The ranks have lost each other: restart the engine") from error


def _judge(work: Callable[[], Result]) -> tuple[Verdict, Result | None]:
    """What this rank makes of a request, and its verdict on it."""
    try:
        return Verdict(), work()
    except LoraMergeError as error:
        return verdict_of(error), None
    except Exception as error:
        logger.exception("a rank's part of a request failed")
        return Verdict(500, "engine", (f"{type(error).__name__}: {error}",)), None
