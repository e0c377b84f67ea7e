"""The operations of a worker: one class for each request. `two_phase.TwoPhaseCommit` runs them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sglang.multimodal_gen.runtime.post_training.weights_updater import WeightsUpdater

from server_patches.rank import Rank
from server_patches.rank_result import RankResult, RanksDiverged, raise_if_rejected
from server_patches.request_context import RequestContext
from server_patches.resolve import resolve
from server_patches.two_phase import Operation, TwoPhaseCommit
from server_patches.verify import VerifiedLayer, compare_layers, find_layers
from server_patches.worker_request import MergeReq
from server_patches.worker_status import live_answer, version_in_words
from sgld_lora_merge.adapter.families import route_layers
from sgld_lora_merge.errors import ConflictError
from sgld_lora_merge.merge.engine import ModuleState, Plan
from sgld_lora_merge.merge.staging import StagedPairs
from sgld_lora_merge.wire.payload import NamedTensors

logger = logging.getLogger(__name__)


def operation_of(req: MergeReq, rank: Rank, driver: TwoPhaseCommit) -> Operation:
    """Return the operation that a request asks for."""
    if req.operation != "update":
        return OPERATIONS[req.operation](rank, driver)
    if req.is_full_update:
        return FullUpdate(rank, driver)
    return LiveUpdate(rank, driver) if req.goes_live else StageBucket(rank, driver)


class _OnRank:
    """Base class of the operations: it holds the rank and the driver."""

    agrees = True

    def __init__(self, rank: Rank, driver: TwoPhaseCommit) -> None:
        self._rank = rank
        self._driver = driver

    def prepare(self, context: RequestContext) -> Any:
        return None

    def check_again(self, prepared: Any) -> None:
        self._rank.states.refuse_sleep()

    def apply(self, prepared: Any, context: RequestContext) -> dict[str, Any]:
        raise NotImplementedError


class _GoLive(_OnRank):
    """Base class of the operations that write a plan, which is live from then on."""

    def check_again(self, prepared: Plan) -> None:
        self._rank.check_plan(prepared)

    def apply(self, prepared: Plan, context: RequestContext) -> dict[str, Any]:
        stats = self._driver.commit(prepared, context)
        losses = {part.module: stats[part.module].rounding_loss for part in prepared.modules if part.merged}
        try:
            self._rank.save_undo_point(context, prepared)
            self._settle(prepared, losses, context.req)
        except Exception as error:
            raise RanksDiverged(
                f"the new weights are live, but this rank could not record it: {type(error).__name__}: {error}. "
                "Restart the engine"
            ) from error
        timings = context.milliseconds()
        self._rank.timings |= {part.module: timings for part in prepared.modules}
        states = {part.module: self._rank.engine.state(part.module) for part in prepared.modules}
        done = self._sentence(prepared, states, context.req)
        mention_kept = context.req.operation == "update"
        return live_answer(self._rank.engine, prepared, stats, timings, done, mention_kept=mention_kept)

    def _settle(self, plan: Plan, losses: Mapping[str, float], req: MergeReq) -> None:
        """Record the written plan as this rank's state."""
        self._rank.engine.settle(plan, req.weight_version, losses)
        if req.update_id is not None:
            self._rank.staged = None  # live now, or abandoned by another update
        if self._rank.group.is_first:
            self._rank.warnings.after_update(losses)

    def _sentence(self, plan: Plan, states: Mapping[str, ModuleState], req: MergeReq) -> str:
        return f"{plan.layers} LoRA layers are live"


class LiveUpdate(_GoLive):
    """Make pairs live: those of a single request, or those of the last bucket and of all buckets before it."""

    def prepare(self, context: RequestContext) -> Plan:
        updates = self._rank.read_updates(context)
        with context.stage("validate"):
            return self._rank.engine.plan(self._rank.with_staged(context.req, updates))


class Commit(_GoLive):
    """Make a staged update live."""

    def prepare(self, context: RequestContext) -> Plan:
        staged = self._rank.staged
        if staged is None or staged.update_id != context.req.update_id:
            raise ConflictError(f"update {context.req.update_id!r} is not staged here")
        self._rank.states.prepare(staged.pairs)
        with context.stage("validate"):
            return self._rank.engine.plan(staged.updates())


class Reset(_GoLive):
    """Bring back the base weights, or take out one adapter."""

    def prepare(self, context: RequestContext) -> Plan:
        modules, adapter = context.req.target_modules, context.req.adapter
        self._rank.states.prepare(self._rank.engine.states if modules is None else modules)
        with context.stage("validate"):
            return self._rank.engine.plan_reset(modules, adapter)

    def _settle(self, plan: Plan, losses: Mapping[str, float], req: MergeReq) -> None:
        self._rank.engine.settle(plan, None)

    def _sentence(self, plan: Plan, states: Mapping[str, ModuleState], req: MergeReq) -> str:
        return "base weights are live" if req.adapter is None else f"adapter {req.adapter!r} is taken out"


class Rollback(_GoLive):
    """Bring back what was live one step before."""

    def prepare(self, context: RequestContext) -> Plan:
        self._rank.states.prepare(self._rank.engine.states)
        with context.stage("validate"):
            return self._rank.engine.plan_rollback()

    def _settle(self, plan: Plan, losses: Mapping[str, float], req: MergeReq) -> None:
        self._rank.engine.settle_rollback(plan, losses)

    def _sentence(self, plan: Plan, states: Mapping[str, ModuleState], req: MergeReq) -> str:
        return "; ".join(dict.fromkeys(f"{version_in_words(state)} is live again" for state in states.values()))


class StageBucket(_OnRank):
    """Keep a bucket of an update that is not complete, or that waits for its commit."""

    def prepare(self, context: RequestContext) -> tuple[StagedPairs, int, list[str]]:
        """Return the staged update with this bucket added, how many layers the bucket has, and the unknown ones."""
        rank, req = self._rank, context.req
        updates = rank.read_updates(context)
        with context.stage("validate"):
            plans = rank.engine.check(rank.with_staged(req, updates))
            skipped = {plan.module: set(plan.skipped) for plan in plans}
            known = {
                update.module: [pair for pair in update.pairs if pair.layer not in skipped[update.module]]
                for update in updates
            }
            staged = rank.staged_for(req).with_bucket(known, rank.max_staged_bytes)
        return staged, sum(map(len, known.values())), [layer for plan in plans for layer in plan.skipped]

    def apply(self, prepared: tuple[StagedPairs, int, list[str]], context: RequestContext) -> dict[str, Any]:
        self._rank.save_undo_point(context)
        self._rank.staged, layers, skipped = prepared
        req = context.req
        module = next(iter(req.target_modules or self._rank.staged.pairs))  # a file says by its names where it goes
        return {
            "message": f"a bucket of {layers} LoRA layers of update {req.update_id!r} is staged; nothing is live yet",
            "weight_version": self._rank.engine.state(module).weight_version,
            "state": "staged",
            "layers": layers,
            "skipped": skipped,
            "timings_ms": context.milliseconds(),
        }


class FullUpdate(_OnRank):
    """Run sglang's own full-weight update. Every rank opens its payload before any rank writes.

    sglang's writes cannot be undone. The ranks still gather every result, so that all of them report a failure of one.
    """

    def prepare(self, context: RequestContext) -> Mapping[str, NamedTensors]:
        return self._rank.reader.full_weights(context)

    def apply(self, prepared: Mapping[str, NamedTensors], context: RequestContext) -> dict[str, Any]:
        req, message, states = context.req, "", self._rank.states
        before = dict(states.engine.states)
        try:
            success, message = WeightsUpdater(self._rank.gpu_worker.pipeline).update_weights_from_tensor(
                named_tensors=dict(prepared), target_modules=req.target_modules
            )
            outcome = RankResult() if success else RankResult(400, "full_update", (message,))
        except Exception as error:
            logger.exception("the full-weight update failed")
            outcome = RankResult(500, "full_update", (f"{type(error).__name__}: {error}",))
        # a load, also one that fails, gives its module a new state
        begun = tuple(name for name, state in states.engine.states.items() if state is not before.get(name))
        outcomes = self._rank.group.gather_results(replace(outcome, begun=begun), written=True)
        failed = any(each.status for each in outcomes)
        on_any_rank = sorted({name for each in outcomes for name in each.begun})
        states.follow_full_update(on_any_rank, None if failed else req.weight_version)
        raise_if_rejected(outcomes)
        return {"message": message, "weight_version": req.weight_version}


class Verify(_OnRank):
    """Compare live weights, or base weights, with what they should be."""

    def prepare(self, context: RequestContext) -> list[VerifiedLayer]:
        sent = context.req.expected or {}
        nothing: dict[str, dict[str, Any]] = {module: {} for module in sent}  # a module without layers must exist too
        expected = {**nothing, **route_layers(sent, self._rank.reader.routes, sent)}
        rows = self._rank.engine.base if context.req.weights == "base" else self._rank.engine.effective
        return find_layers(expected, self._rank.states.views(), rows)

    def apply(self, prepared: list[VerifiedLayer], context: RequestContext) -> dict[str, Any]:
        return compare_layers(prepared, self._rank.group)


class ReportStatus(_OnRank):
    """Report this rank's state, which every answer contains."""

    agrees = False

    def apply(self, prepared: None, context: RequestContext) -> dict[str, Any]:
        return {"message": "ok"}


class Resolve(_OnRank):
    """Report where layers would land."""

    agrees = False

    def apply(self, prepared: None, context: RequestContext) -> dict[str, Any]:
        found = resolve(context.req.layers or {}, self._rank.reader.routes, self._rank.states.views())
        return {"message": "ok", "resolved": found}


class Abort(_OnRank):
    """Drop what is staged."""

    agrees = False

    def apply(self, prepared: None, context: RequestContext) -> dict[str, Any]:
        self._rank.staged = None
        return {"message": f"update {context.req.update_id!r} is aborted"}


class Undo(_OnRank):
    """Undo this replica's part of a change that another replica has refused."""

    agrees = False

    def apply(self, prepared: None, context: RequestContext) -> dict[str, Any]:
        self._driver.undo(context)
        return {"message": "nothing is left of the change"}


OPERATIONS: Mapping[str, type[_OnRank]] = {
    "commit": Commit,
    "reset": Reset,
    "rollback": Rollback,
    "verify": Verify,
    "status": ReportStatus,
    "resolve": Resolve,
    "abort": Abort,
    "undo": Undo,
}
