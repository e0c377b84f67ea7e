"""The workers' side: every rank plans, the ranks agree, all commit, and they agree once more.

    verdict   own payload -> pairs -> plan; whatever goes wrong becomes a verdict, never an exception
    agree     all ranks of the replica hear all verdicts; one bad one and no rank writes
    commit    every rank writes
    agree     an overflow or an exception on one rank: all compute the state before again

Requests run one at a time in the scheduler's loop, so nothing here interleaves with a generation.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from sglang.multimodal_gen.runtime.distributed.parallel_state import get_replica_group, get_world_group
from sglang.multimodal_gen.runtime.managers.memory_managers.layerwise_offload import is_layerwise_offloaded_module
from sglang.multimodal_gen.runtime.managers.memory_managers.weight_snapshot import restore_weight_snapshot
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch
from sglang.multimodal_gen.runtime.post_training.weights_updater import WeightsUpdater, get_updatable_modules
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from torch import nn

from server_patches.checking import Expectations, verify
from server_patches.clock import Clock
from server_patches.layers import EngineModule
from server_patches.phases import Phases
from server_patches.requests import MergeReq
from server_patches.settings import positive_number
from server_patches.verdicts import NotTogether, Verdict, raise_if_bad
from sgld_lora_merge.adapter_file import read_adapter
from sgld_lora_merge.engine import MergeEngine, ModuleUpdate, Plan
from sgld_lora_merge.errors import ConflictError, LoraMergeError, RequestError, name_some
from sgld_lora_merge.families import Family, family_of, load_families, route, route_layers
from sgld_lora_merge.kernels import MergeStats
from sgld_lora_merge.pairs import pair_up
from sgld_lora_merge.payload import NamedTensors, cuda_device_index, decode, named_tensors, normalised_uuid
from sgld_lora_merge.precision import Precision, precision_from_environment
from sgld_lora_merge.protocol import DEFAULT_MODULE, LORA_MERGE
from sgld_lora_merge.staging import MAX_STAGED_VARIABLE, StagedPairs
from sgld_lora_merge.unpickler import PayloadReader

logger = logging.getLogger(__name__)

TIMEOUT_VARIABLE = "SGLD_LORA_AGREEMENT_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 300.0
DEFAULT_MAX_STAGED_MB = 16384.0


class MergeWorker:
    """One rank's side of every request of ours.

    Args:
        gpu_worker: sglang's worker; its pipeline holds the modules.
        replica: the ranks that serve one request together.
        precision: of every merge.
        timeout_s: how long a rank waits for the others.
        max_staged_bytes: of one update's buckets, on this rank.
        families: whose routes say to which module a tensor with a prefix belongs.
    """

    def __init__(
        self,
        gpu_worker: Any,
        replica: Any,
        precision: Precision,
        timeout_s: float,
        max_staged_bytes: int,
        families: Mapping[str, Family],
    ) -> None:
        self.gpu_worker = gpu_worker
        self.engine = MergeEngine(self._views, precision)
        self._replica = replica
        self._phases = Phases(self.engine, self._modules, replica, timeout_s)
        self._max_staged_bytes = max_staged_bytes
        self._families = families
        self._staged: StagedPairs | None = None
        self._cached_views: dict[str, tuple[nn.Module, EngineModule]] = {}
        self._timings: dict[str, dict[str, float]] = {}
        self._failed: str | None = None

    # requests

    def handle(self, reqs: list[MergeReq]) -> OutputBatch:
        """The scheduler's handler for `MergeReq`; answers whatever happens."""
        req = reqs[0]
        clock = Clock()
        opened: list[bool] = [False] * self._replica.world_size
        try:
            if self._failed is not None:
                raise NotTogether(self._failed)
            match req.operation:
                case "status":
                    answer: dict[str, Any] = {"message": "ok"}
                case "verify":
                    answer = self._verify(req.expected or {})
                case "reset":
                    answer = self._go_live(self._plan_reset, req, clock, opened)
                case "rollback":
                    answer = self._go_live(self._plan_rollback, req, clock, opened)
                case "commit":
                    answer = self._go_live(self._plan_commit, req, clock, opened)
                    self._staged = None
                case "abort":
                    self._staged = None
                    answer = {"message": f"update {req.update_id!r} is aborted"}
                case _ if req.weight_update_mode != LORA_MERGE:
                    answer = self._full_update(req, clock, opened)
                case _ if req.goes_live:
                    answer = self._go_live(self._plan_update, req, clock, opened)
                    if self._staged is not None and req.update_id is not None:
                        self._staged = None  # merged with this bucket, or abandoned by it
                case _:
                    answer = self._stage(req, clock, opened)
            output = {"status": 200, "success": True, **answer}
        except LoraMergeError as error:
            if isinstance(error, NotTogether):
                self._failed = str(error)
            output = {"status": error.status, "reason": error.reason, "success": False, "message": self._outcome(error)}
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
            "snapshot": self.snapshot(),
            "failed": self._failed,
            "staged_bytes": self._staged.nbytes if self._staged is not None else 0,
        }
        return OutputBatch(output=output, error=None if output["status"] == 200 else output["message"])

    def _stage(self, req: MergeReq, clock: Clock, opened: list[bool]) -> dict[str, Any]:
        """Keep a bucket of an update that is not complete, once every rank has found it good."""
        checked = self._phases.all_or_none(lambda: self._check_bucket(req, clock), clock, opened)
        self._staged, layers, skipped = checked
        module = next(iter(req.target_modules or []))
        return {
            "message": f"a bucket of {layers} LoRA layers of update {req.update_id!r} is staged; nothing is live yet",
            "weight_version": self.engine.state(module).weight_version,
            "state": "staged",
            "layers": layers,
            "skipped": skipped,
            "timings_ms": clock.milliseconds(),
        }

    def _go_live(self, make_plan: Any, req: MergeReq, clock: Clock, opened: list[bool]) -> dict[str, Any]:
        plan: Plan = self._phases.all_or_none(lambda: make_plan(req, clock), clock, opened)
        stats = self._phases.commit(plan, clock)
        losses = {module: each.rounding_loss for module, each in stats.items()}
        match req.operation:
            case "reset":
                self.engine.settle(plan, None)
            case "rollback":
                self.engine.settle_rollback(plan, losses)
            case _:
                self.engine.settle(plan, req.weight_version, losses)
        timings = clock.milliseconds()
        self._timings |= {part.module: timings for part in plan.modules}
        return self._live_answer(req, plan, stats, timings)

    def _live_answer(
        self, req: MergeReq, plan: Plan, stats: Mapping[str, MergeStats], timings: dict[str, float]
    ) -> dict[str, Any]:
        modules = {
            part.module: {
                "layers": len(part.layers),
                "rounding_loss": stats[part.module].rounding_loss,
                "merge_mode": "merge",
            }
            for part in plan.modules
        }
        names = list(modules)
        version = self.engine.state(names[0]).weight_version if names else None
        what = {"reset": "base weights are live", "rollback": f"weight_version {version!r} is live again"}
        message = (
            f"{what.get(req.operation, f'{plan.layers} LoRA layers are live')} in {name_some(names) or 'every module'}"
        )
        logger.info("%s: weight_version=%s %s", message, version, timings)
        return {
            "message": message,
            "weight_version": version,
            "layers": plan.layers,
            "skipped": plan.skipped,
            "merge_mode": "merge",
            "merge_precision": str(self.engine.precision),
            "base_store": self.engine.state(names[0]).store.kind if names else None,
            "rounding_loss": sum(stats.values(), MergeStats()).rounding_loss,
            "modules": modules,
            "timings_ms": timings,
        }

    def _verify(self, sent: Expectations) -> dict[str, Any]:
        nothing: Expectations = {module: {} for module in sent}  # a module without layers must exist all the same
        expected = {**nothing, **route_layers(sent, self._routes(), sent)}
        return verify(expected, self._views(), self._phases.gather_all, first=self._phases.is_first)

    # phases

    def _plan_update(self, req: MergeReq, clock: Clock) -> Plan:
        updates = self._read(req, clock)
        with clock.stage("validate"):
            return self.engine.plan(self._with_staged(req, updates))

    def _plan_commit(self, req: MergeReq, clock: Clock) -> Plan:
        staged = self._staged
        if staged is None or staged.update_id != req.update_id:
            raise ConflictError(f"update {req.update_id!r} is not staged here")
        self._prepare(staged.pairs)
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
        return StagedPairs(req.update_id or "", {}, 0)

    def _with_staged(self, req: MergeReq, updates: list[ModuleUpdate]) -> list[ModuleUpdate]:
        """The request's pairs and those of the buckets before it."""
        if req.update_id is None:
            return updates
        staged = self._staged_for(req).pairs
        joined = [replace(update, pairs=[*staged.get(update.module, ()), *update.pairs]) for update in updates]
        named = {update.module for update in updates}
        return joined + [
            ModuleUpdate(module, pairs, whole=True) for module, pairs in staged.items() if module not in named
        ]

    def _read(self, req: MergeReq, clock: Clock) -> list[ModuleUpdate]:
        """Own payload, or the uploaded file, to pairs by module."""
        staged = self._staged_for(req).pairs if req.update_id is not None else {}
        self._prepare([*(req.target_modules or [DEFAULT_MODULE, *self._routes().values()]), *staged])
        with clock.stage("deserialize"):
            by_module, scaling = self._open(req, clock)
        with clock.stage("validate"):
            updates = []
            views = self._views()
            for name, named in by_module.items():
                pairing = pair_up(
                    named,
                    alpha=req.lora_alpha,
                    rank=req.lora_rank,
                    layer_scaling=scaling.get(name),
                    alpha_required=req.upload_path is not None,
                )
                faults = list(pairing.faults)
                if name in views and not faults:
                    faults += views[name].objections(pairing.pairs)
                whole = req.update_id is not None or req.upload_path is not None
                updates.append(ModuleUpdate(name, pairing.pairs, whole, req.allow_partial, faults))
            return updates

    def _open(
        self, req: MergeReq, clock: Clock
    ) -> tuple[Mapping[str, NamedTensors], Mapping[str, Mapping[str, float]]]:
        """Named tensors and layer scaling, both by the module that they are for."""
        routes = self._routes()
        sent, sent_scaling = self._open_as_sent(req, clock, routes.values())
        named = route(sent, routes, req.target_modules)
        scaling = route_layers(sent_scaling, routes, req.target_modules)
        modules = req.target_modules or [*dict.fromkeys((*named, *scaling))] or [DEFAULT_MODULE]
        # a module for which nothing came stays, to be refused together with all that is wrong
        return {module: named.get(module, []) for module in modules}, scaling

    def _open_as_sent(
        self, req: MergeReq, clock: Clock, routed: Collection[str]
    ) -> tuple[Mapping[str, NamedTensors], Mapping[str, Mapping[str, float]]]:
        """Named tensors and layer scaling, both by the module whose list they are in."""
        modules = req.target_modules or [DEFAULT_MODULE]
        if req.upload_path is not None:
            (module,) = modules
            named, scaling = read_adapter(req.upload_path)
            clock.opened = True
            return {module: named}, {module: scaling}
        shared = len(req.serialized_named_tensors) < self._replica.world_size
        reader = PayloadReader(cuda_device_index, shared=shared, releases=self._phases.is_first or not shared)
        try:
            content = decode(self._own_payload(req), reader)
            reader.opened = True  # tensors may also have come inline, without a handle
        finally:
            clock.opened = reader.opened
        return named_tensors(content, req.load_format, modules, routed), req.layer_scaling or {}

    def _plan_reset(self, req: MergeReq, clock: Clock) -> Plan:
        self._prepare(self.engine.states if req.target_modules is None else req.target_modules)
        with clock.stage("validate"):
            return self.engine.plan_reset(req.target_modules)

    def _plan_rollback(self, req: MergeReq, clock: Clock) -> Plan:
        self._prepare(self.engine.states)
        with clock.stage("validate"):
            return self.engine.plan_rollback()

    def _full_update(self, req: MergeReq, clock: Clock, opened: list[bool]) -> dict[str, Any]:
        """sglang's own full-weight update, opened on every rank before any rank writes.

        What it does to a rank's weights cannot be undone; but every rank's result is heard, so that a failure neither
        hangs nor hides.
        """
        content = self._phases.all_or_none(lambda: self._open_full(req, clock), clock, opened)
        try:
            success, message = WeightsUpdater(self.gpu_worker.pipeline).update_weights_from_tensor(
                named_tensors=content, load_format=req.load_format, target_modules=req.target_modules
            )
            verdict = Verdict() if success else Verdict(400, "full_update", (message,))
        except Exception as error:
            logger.exception("the full-weight update failed")
            verdict, message = Verdict(500, "full_update", (f"{type(error).__name__}: {error}",)), ""
        raise_if_bad(self._phases.agree(verdict, written=True))
        for module in req.target_modules or []:
            self.engine.forget(module, req.weight_version)
        return {"message": message, "weight_version": req.weight_version}

    def _open_full(self, req: MergeReq, clock: Clock) -> Any:
        self._refuse_sleep()
        payload = self._own_payload(req)
        monkey_patch_torch_reductions()  # sglang's convention for the GPU of a handle
        try:
            content = MultiprocessingSerializer.deserialize(payload)
        except Exception as error:  # whatever a hostile or broken pickle ends in
            raise RequestError(f"Failed to deserialize serialized_named_tensors: {error}") from error
        clock.opened = True
        return content

    # the engine's state

    def _modules(self) -> dict[str, nn.Module]:
        modules: dict[str, nn.Module] = get_updatable_modules(self.gpu_worker.pipeline)
        return modules

    def _views(self) -> dict[str, EngineModule]:
        """A view of every module; kept as long as the module is the same object."""
        for name, module in self._modules().items():
            if self._cached_views.get(name, (None,))[0] is not module:
                self._cached_views[name] = (module, EngineModule(module, self._replica.world_size))
        return {name: view for name, (_, view) in self._cached_views.items()}

    def _routes(self) -> Mapping[str, str]:
        """Prefix of tensor names -> module, as the loaded transformer's family has them."""
        family = family_of(type(self._modules().get(DEFAULT_MODULE)), self._families)
        return {} if family is None else family.routes

    def _refuse_sleep(self) -> None:
        if self.gpu_worker.is_sleeping():
            raise ConflictError("the engine is asleep: POST /resume_memory_occupation first")

    def _prepare(self, modules: Iterable[str]) -> None:
        """Before every plan: refuse what cannot be merged, and bring weights to where writes to them last.

        An engine that parks a module on the host (--dit-cpu-offload) serves from a copy, which it throws away.
        """
        names = set(modules)
        self._refuse_states(names)
        for name, module in self._modules().items():
            if name in names:
                _restore(module)

    def _refuse_states(self, modules: Collection[str]) -> None:
        """States of the engine in which merging is not built or not defined."""
        self._refuse_sleep()
        args, pipeline = self.gpu_worker.server_args, self.gpu_worker.pipeline
        if getattr(pipeline, "lora_initialized", False):
            raise ConflictError(
                "sglang itself has wrapped the layers for an adapter of its own (--lora-path or /v1/set_lora); "
                "start the engine without one"
            )
        if args.lora_merge_mode == "dynamic":
            raise RequestError("--lora-merge-mode dynamic is not built yet; start the engine with merge or auto")
        offloaded = [
            name
            for name, module in self._modules().items()
            if name in modules and is_layerwise_offloaded_module(module)
        ]
        if offloaded:
            raise RequestError(
                f"{name_some(offloaded)} is offloaded layer by layer, which is not built yet; start the engine with "
                "--dit-layerwise-offload false"
            )

    def _own_payload(self, req: MergeReq) -> str:
        """The payload that this rank reads; by GPU where the request says so, else by rank."""
        payloads, uuids = req.serialized_named_tensors, req.payload_gpu_uuids
        if uuids is not None and torch.cuda.is_available():
            own = normalised_uuid(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
            for uuid, payload in zip(uuids, payloads, strict=True):
                if normalised_uuid(uuid) == own:
                    return str(payload)
            raise RequestError(f"no payload was exported from this worker's GPU {own}; payload_gpu_uuids has {uuids}")
        if len(payloads) == 1:
            return str(payloads[0])
        world = get_world_group()
        if len(payloads) != world.world_size:
            raise RequestError(
                f"serialized_named_tensors has {len(payloads)} payloads; one is needed, or one for each of "
                f"{world.world_size} workers"
            )
        return str(payloads[world.rank_in_group])

    def _outcome(self, error: LoraMergeError) -> str:
        """The error, and what the engine serves now."""
        if isinstance(error, NotTogether) or error.reason == "full_update":
            return str(error)
        versions = {name: state.weight_version for name, state in self.engine.states.items() if state.live}
        live = ", ".join(f"{name} at weight_version {version!r}" for name, version in versions.items())
        return f"{error}. Nothing was changed: the engine serves {live or 'the base weights'}"

    def snapshot(self) -> dict[str, Any]:
        """Every module's state as the status route shows it; store sizes are those of rank 0."""
        modules = {}
        for name in sorted(self._modules()):
            state = self.engine.state(name)
            pairs = state.pairs
            modules[name] = {
                "state": self._state_of(name),
                "weight_version": state.weight_version,
                "layers": len({pair.layer for pair in pairs}),
                "rank": _only({pair.rank for pair in pairs}),
                "scale": _only({pair.scale for pair in pairs}),
                "merge_precision": str(self.engine.precision),
                "base_store": state.store.kind if state.store.nbytes else None,
                "base_store_bytes": state.store.nbytes,
                "rounding_loss": state.rounding_loss,
                "timings_ms": self._timings.get(name, {}),
            }
        return modules

    def versions(self) -> dict[str, str]:
        """The version of every module that has one."""
        states = self.engine.states.items()
        return {name: state.weight_version for name, state in states if state.weight_version is not None}

    def _state_of(self, module: str) -> str:
        if self._failed is not None:
            return "failed"
        if self._staged is not None and module in self._staged.pairs:
            return "staging"
        return "merged" if self.engine.state(module).live else "base"

    @contextmanager
    def base_weights_change(self, module: nn.Module) -> Iterator[None]:
        """Around code of sglang's that loads a module: W0 back first, and no adapter afterwards, whatever it did."""
        names = [name for name, each in self._modules().items() if each is module]
        for name in names:
            if self.engine.state(name).live:
                _restore(module)
                self.engine.restore(name)
        try:
            yield
        finally:
            for name in names:
                self.engine.forget(name)

    def give_base_back(self) -> None:
        """Before sglang wraps layers for an adapter of its own: base weights everywhere, no adapter of ours."""
        for module in self._modules().values():
            with self.base_weights_change(module):
                pass


def make_merge_worker(gpu_worker: Any) -> MergeWorker:
    """This process's worker, as the environment says.

    Raises:
        LoraMergeError: a variable has a value that means nothing.
    """
    return MergeWorker(
        gpu_worker,
        get_replica_group(),
        precision_from_environment(),
        positive_number(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S, "seconds"),
        int(positive_number(MAX_STAGED_VARIABLE, DEFAULT_MAX_STAGED_MB, "MiB") * 2**20),
        load_families(),
    )


def _restore(module: nn.Module) -> None:
    """Make a module's parameters those that sglang keeps, if it serves from a copy of them."""
    with torch.inference_mode():
        restore_weight_snapshot(module)


def _only(values: set[Any]) -> Any:
    """The value that all layers share; a sorted list where they differ; None where there are none."""
    return next(iter(values)) if len(values) == 1 else sorted(values) or None
