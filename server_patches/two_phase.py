"""The one driver of operations, for ranks and for replicas.

    prepare   every rank runs `Operation.prepare`, which reads and may refuse; an exception becomes a `RankResult`
    agree     all ranks gather all results; if one failed, or they were sent different updates, nothing is written
    apply     every rank runs `Operation.apply`, which writes
    agree     `commit` ends with a second agreement: if one rank failed or a result overflowed, all go back to before

An engine with several replicas gets ``prepare`` and ``finish`` (apply) as two requests, and ``undo`` where another
replica fails. In between, the prepared plan waits here. Requests run one at a time in the scheduler's loop, so nothing
interleaves with a generation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from server_patches.rank import Rank
from server_patches.rank_group import attempt
from server_patches.rank_result import (
    RankResult,
    RanksDiverged,
    RejectedByRank,
    format_faults,
    raise_if_rejected,
)
from server_patches.request_context import RequestContext
from server_patches.worker_request import MergeReq
from sgld_lora_merge.errors import ConflictError, RequestError
from sgld_lora_merge.merge.engine import Plan
from sgld_lora_merge.merge.fingerprint import differences
from sgld_lora_merge.merge.kernels import MergeStats

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Operation(Protocol):
    """One request of the worker.

    Attributes:
        agrees: the ranks agree between `prepare` and `apply`; False where nothing of another rank matters.
    """

    agrees: bool

    def prepare(self, context: RequestContext) -> Any:
        """Read what the request needs and refuse what cannot be done; change nothing."""

    def check_again(self, prepared: Any) -> None:
        """Refuse to apply what was prepared by an earlier request, if the engine is in no state for it any more."""

    def apply(self, prepared: Any, context: RequestContext) -> dict[str, Any]:
        """Do it, and return the answer."""


class TwoPhaseCommit:
    """Runs operations on one rank, together with the other ranks."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._group = rank.group
        self._waiting: tuple[Any, RequestContext] | None = None  # prepared, until the other replicas are too

    def context_of(self, req: MergeReq) -> RequestContext:
        """Return the context of a request; the second step of one continues that of the first."""
        if req.step == "finish" and self._waiting is not None:
            context = self._waiting[1]
            context.req, context.opened_by_rank = req, [False] * self._group.size
            return context
        return RequestContext(req, self._group.size)

    def forget(self) -> None:
        """Drop the prepared plan and the undo point: something else has changed the weights."""
        self._waiting = self._rank.undo_point = None

    def run(self, operation: Operation, context: RequestContext) -> dict[str, Any]:
        """Run the step of an operation that its request asks for; return its answer.

        Raises:
            LoraMergeError: it was refused or failed; on every rank alike where the ranks agree.
        """
        if not operation.agrees:
            self._rank.check_alive()
            return operation.apply(operation.prepare(context), context)
        step = context.req.step
        if step == "prepare":
            self.forget()

        def prepare() -> Any:
            self._rank.check_alive()
            if step == "finish":
                return self._take_waiting(operation)
            prepared = operation.prepare(context)
            if step == "prepare" and context.sent is not None:
                context.digest = context.sent.exact_digest
            return prepared

        try:
            prepared = self.on_all_ranks(prepare, context)
        finally:
            context.sent = None  # the sender's memory
        if step == "prepare":
            self._waiting = prepared, context
            return {"message": "prepared"}
        return operation.apply(prepared, context)

    def undo(self, context: RequestContext) -> None:
        """Undo this replica's part of a change that another replica has refused."""
        before = self._rank.undo_point
        self.forget()
        if before is None:
            return
        if (plan := before.plan) is not None:
            self.on_all_ranks(lambda: self._rank.check_plan(plan), context)
            self.revert(plan, "another replica has refused the update")
        self._rank.restore(before)

    def on_all_ranks(self, work: Callable[[], Result], context: RequestContext) -> Result:
        """Run read-only ``work`` on every rank; return its result only if all ranks succeeded.

        Raises:
            RejectedByRank: any rank failed; the message has the faults of all ranks.
            RequestError: the ranks were sent different updates.
            RanksDiverged: a rank did not come in time, or says that it has failed before.
        """

        def work_and_digest() -> tuple[Result, str]:
            result = work()
            return result, self._digest(context)  # a failure of the digest is a fault of this rank like any other

        outcome, done = attempt(work_and_digest)
        outcome = replace(outcome, opened=context.opened, digest="" if done is None else done[1])
        context.opened_by_rank[self._group.rank] = context.opened
        outcomes = self._group.gather_results(outcome)
        context.opened_by_rank = [each.opened for each in outcomes]
        if any(each.reason == RanksDiverged.reason for each in outcomes):
            raise RanksDiverged(format_faults(outcomes))
        raise_if_rejected(outcomes)
        if len({each.digest for each in outcomes}) > 1:
            self._refuse_differences(context)
        assert done is not None
        return done[0]

    def commit(self, plan: Plan, context: RequestContext) -> dict[str, MergeStats]:
        """Write a plan on every rank; return the merge statistics of all ranks together, by module.

        Raises:
            RejectedByRank: a rank failed, or a result overflowed; all ranks have what they had before.
            RanksDiverged: a rank could not go back.
        """
        try:
            with context.stage("merge"):
                with self._rank.states.weights_change(plan):
                    finish = self._rank.engine.begin(plan)
                stats = finish()  # the GPU merges while the caches are emptied
            faults = tuple(
                f"{module}: {each.non_finite} elements of the merged weight are not finite in its dtype"
                for module, each in stats.items()
                if each.non_finite
            )
            outcome = RankResult(400, "overflow", faults) if faults else RankResult(stats=stats)
        except Exception as error:
            logger.exception("the merge failed")
            outcome = RankResult(500, "engine", (f"{type(error).__name__}: {error}",))
        outcomes = self._group.gather_results(outcome, written=True)
        if any(each.status for each in outcomes):
            self.revert(plan, format_faults(outcomes))
            raise RejectedByRank(outcomes)
        return {part.module: sum((each.stats[part.module] for each in outcomes), MergeStats()) for part in plan.modules}

    def revert(self, plan: Plan, why: str) -> None:
        """Undo a commit on every rank.

        Raises:
            RanksDiverged: not all could; the message begins with ``why``.
        """
        outcome = RankResult()
        try:
            with self._rank.states.weights_change(plan):
                self._rank.engine.revert(plan)
        except Exception as error:
            logger.exception("the previous weights could not be restored")
            outcome = RankResult(503, "failed", (f"{type(error).__name__}: {error}",))
        outcomes = self._group.gather_results(outcome, written=True)
        if any(each.status for each in outcomes):
            faults = format_faults(outcomes)
            raise RanksDiverged(f"{why}; then the previous weights could not be restored: {faults}: restart the engine")

    def _take_waiting(self, operation: Operation) -> Any:
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            raise ConflictError("the base weights have changed since the replicas agreed: send the update again")
        operation.check_again(waiting[0])
        return waiting[0]

    def _digest(self, context: RequestContext) -> str:
        """Return a digest of what this rank was sent; "" where no other rank has it to compare."""
        return context.sent.digest if context.sent is not None and self._group.size > 1 else ""

    def _refuse_differences(self, context: RequestContext) -> None:
        """Refuse the request if the ranks were sent different updates. The same update in another packing passes.

        Raises:
            RequestError: they were; the message names the layers that differ.
        """
        sent = context.sent
        faults = differences(self._group.run(lambda: {} if sent is None else sent.prints))
        if faults:
            raise RequestError(*(f"the ranks were sent different updates: {fault}" for fault in faults))
