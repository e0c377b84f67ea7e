"""The workers' side: every rank plans, the ranks agree, all commit, and they agree once more.

    verdict   own payload -> pairs -> plan; whatever goes wrong becomes a verdict, never an exception
    agree     all ranks of the replica hear all verdicts; one bad one and no rank writes
    commit    every rank writes
    agree     an overflow or an exception on one rank: all compute the state before again

Requests run one at a time in the scheduler's loop, so nothing here interleaves with a generation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sglang.multimodal_gen.runtime.distributed.parallel_state import get_replica_group
from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import UpdateWeightFromTensorReqInput
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch
from sglang.multimodal_gen.runtime.post_training.weights_updater import WeightsUpdater
from torch import nn

from server_patches.clock import Clock
from server_patches.engine_states import EngineStates
from server_patches.phases import Phases
from server_patches.request_reader import Reading
from server_patches.resolve import resolve
from server_patches.run_warnings import Warnings
from server_patches.verdicts import NotTogether, Verdict, raise_if_bad
from server_patches.verify import Expectations, verify
from server_patches.version_header import label_of
from server_patches.worker_request import MergeReq, from_stock
from server_patches.worker_status import held, only, outcome, snapshot, told_version
from sgld_lora_merge.adapter.families import Family, load_families, route_layers
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.errors import ConflictError, LoraMergeError, name_some
from sgld_lora_merge.merge.base_store import StorePolicy, policy_from
from sgld_lora_merge.merge.engine import ModuleState, ModuleUpdate, Plan
from sgld_lora_merge.merge.kernels import MergeStats
from sgld_lora_merge.merge.resident import DEFAULT_ADAPTER
from sgld_lora_merge.merge.staging import StagedPairs
from sgld_lora_merge.printable import printable
from sgld_lora_merge.settings import settings_from
from sgld_lora_merge.wire.schema import UpdateAnswer

logger = logging.getLogger(__name__)

_ALONE = ("status", "resolve", "abort", "undo")  # operations in which ranks do not begin with an agreement


@dataclass(frozen=True)
class _Before:
    """What a change can be taken back to, until the next one; ``plan`` where it has written weights."""

    states: dict[str, ModuleState]
    staged: StagedPairs | None
    timings: dict[str, dict[str, float]]
    plan: Plan | None = None


class MergeWorker:
    """One rank's side of every request of ours.

    Args:
        gpu_worker: sglang's worker; its pipeline holds the modules.
        replica: the ranks that serve one request together.
        precision: of every merge.
        policy: where base weights are kept.
        timeout_s: how long a rank waits for the others.
        max_staged_bytes: of one update's buckets, on this rank.
        families: whose routes say to which module a tensor with a prefix belongs.
    """

    def __init__(
        self,
        gpu_worker: Any,
        replica: Any,
        precision: Precision,
        policy: StorePolicy,
        timeout_s: float,
        max_staged_bytes: int,
        families: Mapping[str, Family],
    ) -> None:
        self.gpu_worker = gpu_worker
        self.states = EngineStates(gpu_worker, replica.world_size, precision, policy)
        self.engine = self.states.engine
        self._replica = replica
        self._phases = Phases(self.engine, self.states.weights_change, replica, timeout_s)
        self._max_staged_bytes = max_staged_bytes
        self._reading = Reading(self.states, families)
        self._staged: StagedPairs | None = None
        self._timings: dict[str, dict[str, float]] = {}
        self._failed: str | None = None
        self._prepared: tuple[Any, Clock] | None = None  # a plan that waits for the other replicas
        self._before: _Before | None = None
        self._warnings = Warnings()

    # requests

    def handle(self, reqs: list[MergeReq]) -> OutputBatch:
        """The scheduler's handler for `MergeReq`; answers whatever happens."""
        req = reqs[0]
        clock = self._prepared[1] if req.step == "finish" and self._prepared is not None else Clock()
        opened: list[bool] = [False] * self._replica.world_size
        try:
            if self._failed is not None and req.operation in _ALONE:
                raise NotTogether(self._failed)
            match req.operation:
                case "status":
                    answer: dict[str, Any] = {"message": "ok"}
                case "verify":
                    answer = self._verify(req)
                case "resolve":
                    views = self.states.views()
                    answer = {"message": "ok", "resolved": resolve(req.layers or {}, self._reading.routes, views)}
                case "reset":
                    answer = self._go_live(self._plan_reset, req, clock, opened)
                case "rollback":
                    answer = self._go_live(self._plan_rollback, req, clock, opened)
                case "commit":
                    answer = self._go_live(self._plan_commit, req, clock, opened)
                case "undo":
                    answer = self._undo(clock, opened)
                case "abort":
                    self._staged = None
                    answer = {"message": f"update {req.update_id!r} is aborted"}
                case _ if req.is_full_update:
                    answer = self._full_update(req, clock, opened)
                case _ if req.goes_live:
                    answer = self._go_live(self._plan_update, req, clock, opened)
                case _:
                    answer = self._stage(req, clock, opened)
            output = {"status": 200, "success": True, **answer}
        except LoraMergeError as error:
            if isinstance(error, NotTogether):
                self._failed = str(error)
            output = {
                "status": error.status,
                "reason": error.reason,
                "success": False,
                "message": outcome(error, self.engine),
            }
        except Exception as error:  # the loop must answer: a request that dies here would leave the client waiting
            logger.exception("%s failed", req.operation)
            output = {
                "status": 500,
                "reason": "engine",
                "success": False,
                "message": f"{type(error).__name__}: {error}",
            }
        output |= {
            "payload_opened": opened,
            "digest": clock.digest,
            "snapshot": self._snapshot(),
            "failed": self._failed,
            "staged_update": self._staged.update_id if self._staged is not None else None,
            "staged_bytes": self._staged.nbytes if self._staged is not None else 0,
            "sleeping": self.states.sleeping,
        }
        return OutputBatch(output=output, error=None if output["status"] == 200 else output["message"])

    def handle_stock(self, reqs: list[UpdateWeightFromTensorReqInput]) -> OutputBatch:
        """The scheduler's handler for sglang's own request, which comes by its socket, as by HTTP."""
        try:
            req = self._adopted(reqs[0])
        except LoraMergeError as error:  # of its fields, so that every rank is here
            output = {"success": False, "message": outcome(error, self.engine)}
            return OutputBatch(output=output, error=output["message"])
        answered = self.handle([req])
        told = (*UpdateAnswer.model_fields, "success", "message")
        answered.output = {name: answered.output[name] for name in told if name in answered.output}
        return answered

    def _adopted(self, stock: UpdateWeightFromTensorReqInput) -> MergeReq:
        """sglang's request as one of ours.

        Raises:
            LoraMergeError: of its fields, as by HTTP; or there are replicas, which the socket reaches one by one.
        """
        req = from_stock(stock)
        replicas = self.gpu_worker.server_args.dp_size
        if replicas > 1 and not req.is_full_update:
            raise ConflictError(
                f"this engine has {replicas} replicas, and the scheduler's socket is that of one: POST the update to "
                "/update_weights_from_tensor, which changes all of them or none"
            )
        return req

    def _stage(self, req: MergeReq, clock: Clock, opened: list[bool]) -> dict[str, Any]:
        """Keep a bucket of an update that is not complete, once every rank has found it good."""
        checked = self._agreed(self._check_bucket, req, clock, opened)
        if req.step == "prepare":
            return {"message": "prepared"}
        self._remember(req)
        self._staged, layers, skipped = checked
        module = next(iter(req.target_modules or self._staged.pairs))  # a file says by its names where it goes
        return {
            "message": f"a bucket of {layers} LoRA layers of update {req.update_id!r} is staged; nothing is live yet",
            "weight_version": self.engine.state(module).weight_version,
            "state": "staged",
            "layers": layers,
            "skipped": skipped,
            "timings_ms": clock.milliseconds(),
        }

    def _go_live(self, make_plan: Any, req: MergeReq, clock: Clock, opened: list[bool]) -> dict[str, Any]:
        plan: Plan = self._agreed(make_plan, req, clock, opened)
        if req.step == "prepare":
            return {"message": "prepared"}
        stats = self._phases.commit(plan, clock)
        try:
            self._settle(req, plan, stats)
        except Exception as error:
            raise NotTogether(
                f"the new weights are live, but this rank could not record it: {type(error).__name__}: {error}. "
                "Restart the engine"
            ) from error
        timings = clock.milliseconds()
        self._timings |= {part.module: timings for part in plan.modules}
        return self._live_answer(req, plan, stats, timings)

    def _settle(self, req: MergeReq, plan: Plan, stats: Mapping[str, MergeStats]) -> None:
        """Make what every rank has written the state of this one."""
        self._remember(req, plan)
        losses = {part.module: stats[part.module].rounding_loss for part in plan.modules if part.merged}
        match req.operation:
            case "reset":
                self.engine.settle(plan, None)
            case "rollback":
                self.engine.settle_rollback(plan, losses)
            case _:
                self.engine.settle(plan, req.weight_version, losses)
                if req.update_id is not None:
                    self._staged = None  # live now, or abandoned by another update
                if self._phases.is_first:
                    self._warnings.merged(losses)

    def _live_answer(
        self, req: MergeReq, plan: Plan, stats: Mapping[str, MergeStats], timings: dict[str, float]
    ) -> dict[str, Any]:
        states = {part.module: self.engine.state(part.module) for part in plan.modules}
        modules = {
            part.module: {
                "layers": len(part.layers),
                "rounding_loss": stats[part.module].rounding_loss if part.merged else None,
                "merge_mode": part.merge_mode,
                "kept": states[part.module].versions.layers_beside(part),
                "versions": states[part.module].versions.named_counts,
            }
            for part in plan.modules
        }
        modes = {part.merge_mode for part in plan.modules}
        names = list(modules)
        version = states[names[0]].weight_version if names else None
        base = "base weights are live" if req.adapter is None else f"adapter {req.adapter!r} is taken out"
        again = "; ".join(dict.fromkeys(f"{told_version(state)} is live again" for state in states.values()))
        what = {"reset": base, "rollback": again}
        message = (
            f"{what.get(req.operation, f'{plan.layers} LoRA layers are live')} in {name_some(names) or 'every module'}"
        )
        for name, each in modules.items():
            if each["kept"] and req.operation == "update":
                has = told_version(states[name])
                message += f"; {each['kept']} layers that the request does not name stay live in {name}, now at {has}"
        logger.info("%s: weight_version=%s %s", printable(message, 1000), printable(str(version), 200), timings)
        return {
            "message": message,
            "weight_version": version,
            "layers": plan.layers,
            "skipped": plan.skipped,
            "merge_mode": only(modes) if len(modes) < 2 else "mixed",
            "merge_precision": str(self.engine.precision),
            "base_store": states[names[0]].store.kind if names else None,
            "rounding_loss": sum(stats.values(), MergeStats()).rounding_loss if modes != {"dynamic"} else None,
            "modules": modules,
            "timings_ms": timings,
        }

    def _verify(self, req: MergeReq) -> dict[str, Any]:
        self._phases.share(self._check_alive)
        sent: Expectations = req.expected or {}
        nothing: Expectations = {module: {} for module in sent}  # a module without layers must exist all the same
        expected = {**nothing, **route_layers(sent, self._reading.routes, sent)}
        rows = self.engine.base if req.weights == "base" else self.engine.effective
        share, first = self._phases.share, self._phases.is_first
        return verify(expected, self.states.views(), rows, share, first=first)

    # steps

    def _agreed(self, work: Callable[[MergeReq, Clock], Any], req: MergeReq, clock: Clock, opened: list[bool]) -> Any:
        """The result of work that changes nothing, when it went well on every rank; a prepared one is kept."""
        if req.step == "prepare":
            self._prepared = self._before = None
        if req.step == "finish":
            work = self._take_prepared

        def checked() -> Any:
            self._check_alive()
            result = work(req, clock)
            if req.step == "prepare" and clock.sent is not None:
                clock.digest = clock.sent.exact_digest
            return result

        try:
            result = self._phases.all_or_none(checked, clock, opened)
        finally:
            clock.sent = None  # the sender's memory
        if req.step == "prepare":
            self._prepared = result, clock
        return result

    def _check_alive(self) -> bool:
        """A rank that has failed says so in an agreement, or the others would wait for it.

        Raises:
            NotTogether: it has.
        """
        if self._failed is not None:
            raise NotTogether(self._failed)
        return True

    def _take_prepared(self, _: MergeReq, __: Clock) -> Any:
        """What was prepared, if the engine is still in a state for it: other requests may have come in between."""
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            raise ConflictError("the base weights have changed since the replicas agreed: send the update again")
        result, _clock = prepared
        if isinstance(result, Plan):
            return self._ready(result)
        self.states.refuse_sleep()
        return result

    def _ready(self, plan: Plan) -> Plan:
        """A plan of an earlier request, with weights where it writes to them."""
        self.states.prepare([part.module for part in plan.modules])
        return plan

    def _remember(self, req: MergeReq, plan: Plan | None = None) -> None:
        """Just before a change of one replica of several: what the state is."""
        if req.step == "finish":
            states = {name: replace(state) for name, state in self.engine.states.items()}
            self._before = _Before(states, self._staged, dict(self._timings), plan)

    def _undo(self, clock: Clock, opened: list[bool]) -> dict[str, Any]:
        """Take back this replica's part of a change that another one has refused."""
        before, self._before, self._prepared = self._before, None, None
        if before is not None:
            if (plan := before.plan) is not None:
                self._phases.all_or_none(lambda: self._ready(plan), clock, opened)
                self._phases.revert(plan, "another replica has refused the update")
                self.engine.states = before.states
            self._staged, self._timings = before.staged, before.timings
        return {"message": "nothing is left of the change"}

    # phases

    def _plan_update(self, req: MergeReq, clock: Clock) -> Plan:
        updates = self._read(req, clock)
        with clock.stage("validate"):
            return self.engine.plan(self._with_staged(req, updates))

    def _plan_commit(self, req: MergeReq, clock: Clock) -> Plan:
        staged = self._staged
        if staged is None or staged.update_id != req.update_id:
            raise ConflictError(f"update {req.update_id!r} is not staged here")
        self.states.prepare(staged.pairs)
        with clock.stage("validate"):
            return self.engine.plan(staged.updates())

    def _check_bucket(self, req: MergeReq, clock: Clock) -> tuple[StagedPairs, int, list[str]]:
        """The staged update with this bucket added, how many layers the bucket has, and those it left out."""
        updates = self._read(req, clock)
        with clock.stage("validate"):
            plans = self.engine.check(self._with_staged(req, updates))
            skipped = {plan.module: set(plan.skipped) for plan in plans}
            known = {
                update.module: [pair for pair in update.pairs if pair.layer not in skipped[update.module]]
                for update in updates
            }
            staged = self._staged_for(req).with_bucket(known, self._max_staged_bytes)
        return staged, sum(map(len, known.values())), [layer for plan in plans for layer in plan.skipped]

    def _staged_for(self, req: MergeReq) -> StagedPairs:
        """What is staged of this request's update; another update's is abandoned by it."""
        if self._staged is not None and self._staged.update_id == req.update_id:
            return self._staged
        if req.continues:
            raise ConflictError(f"the buckets of update {req.update_id!r} that were staged are gone; send it again")
        return StagedPairs(req.update_id or "", req.adapter or DEFAULT_ADAPTER, {}, 0)

    def _with_staged(self, req: MergeReq, updates: list[ModuleUpdate]) -> list[ModuleUpdate]:
        """The request's pairs and those of the buckets before it."""
        if req.update_id is None:
            return updates
        staged = self._staged_for(req).pairs
        if not staged:
            return updates
        joined = [replace(update, pairs=[*staged.get(update.module, ()), *update.pairs]) for update in updates]
        named = {update.module for update in updates}
        return joined + [
            ModuleUpdate(module, pairs, whole=True, adapter=req.adapter or DEFAULT_ADAPTER)
            for module, pairs in staged.items()
            if module not in named
        ]

    def _read(self, req: MergeReq, clock: Clock) -> list[ModuleUpdate]:
        """Own payload, or the uploaded file, to pairs by module."""
        staged = self._staged_for(req).pairs if req.update_id is not None else {}
        self.states.prepare([*self._reading.modules(req), *staged])
        return self._reading.updates(req, clock)

    def _plan_reset(self, req: MergeReq, clock: Clock) -> Plan:
        self.states.prepare(self.engine.states if req.target_modules is None else req.target_modules)
        with clock.stage("validate"):
            return self.engine.plan_reset(req.target_modules, req.adapter)

    def _plan_rollback(self, req: MergeReq, clock: Clock) -> Plan:
        self.states.prepare(self.engine.states)
        with clock.stage("validate"):
            return self.engine.plan_rollback()

    def _full_update(self, req: MergeReq, clock: Clock, opened: list[bool]) -> dict[str, Any]:
        """sglang's own full-weight update, opened on every rank before any rank writes.

        What it does to a rank's weights cannot be undone; but every rank's result is heard, so that a failure neither
        hangs nor hides.
        """
        named = self._agreed(self._reading.full_weights, req, clock, opened)
        if req.step == "prepare":
            return {"message": "prepared"}
        try:
            success, message = WeightsUpdater(self.gpu_worker.pipeline).update_weights_from_tensor(
                named_tensors=dict(named), target_modules=req.target_modules
            )
            verdict = Verdict() if success else Verdict(400, "full_update", (message,))
        except Exception as error:
            logger.exception("the full-weight update failed")
            verdict, message = Verdict(500, "full_update", (f"{type(error).__name__}: {error}",)), ""
        raise_if_bad(self._phases.agree(verdict, written=True))
        for module in req.target_modules or []:
            self.engine.forget(module, req.weight_version)
        return {"message": message, "weight_version": req.weight_version}

    # around what sglang does, and what is said of it

    def _snapshot(self) -> dict[str, Any]:
        words = {name: self._state_of(name) for name in self.states.modules()}
        return snapshot(self.engine, words, self._timings)

    def sleep(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Around sglang's way to sleep; what is staged is dropped."""
        self._staged = self._prepared = self._before = None
        return self.states.release(original)

    def wake(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Around sglang's way to wake; a rank whose adapters do not come back has other weights than it says."""
        try:
            return self.states.resume(original)
        except Exception as error:
            if not self.states.sleeping:
                self._failed = f"awake, but not with the adapters that were live: {error}. Restart the engine"
            raise

    def generated(self) -> None:
        """After a generation."""
        views = self.states.views().items()
        self._warnings.generated({name: view.branches.idle for name, view in views if view.branches is not None})

    def versions(self) -> dict[str, str]:
        """What a generation's answer says of every module that has a version, or a mixture of them."""
        states = self.engine.states.items()
        labels = {name: label_of(state.weight_version, state.versions.named_counts) for name, state in states}
        return {name: label for name, label in labels.items() if label is not None}

    def _state_of(self, module: str) -> str:
        if self._failed is not None:
            return "failed"
        if self._staged is not None and module in self._staged.pairs:
            return "staging"
        return held(self.engine, module)

    @contextmanager
    def base_weights_change(self, module: nn.Module) -> Iterator[None]:
        """Around code of sglang's that loads a module: what was planned for the other base is dropped."""
        self._prepared = self._before = None
        with self.states.base_weights_change(module):
            yield


def make_merge_worker(gpu_worker: Any) -> MergeWorker:
    """This process's worker, as the environment says.

    Raises:
        LoraMergeError: a variable has a value that means nothing.
    """
    settings = settings_from()
    return MergeWorker(
        gpu_worker,
        get_replica_group(),
        Precision(settings.precision),
        policy_from(settings),
        settings.agreement_timeout_s,
        settings.max_staged_bytes,
        load_families(),
    )
