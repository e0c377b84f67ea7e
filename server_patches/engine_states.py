"""The states sglang can be in: which of them an update has to wait for, and what each does to the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.multimodal_gen.runtime.cache.conditioning import invalidate_conditioning_caches
from sglang.multimodal_gen.runtime.cache.teacache import TeaCacheMixin
from sglang.multimodal_gen.runtime.distributed import get_local_torch_device
from sglang.multimodal_gen.runtime.managers.memory_managers.weight_snapshot import restore_weight_snapshot
from sglang.multimodal_gen.runtime.models.dits.base import BaseDiT
from sglang.multimodal_gen.runtime.post_training.weights_updater import get_updatable_modules
from torch import nn
from torch.distributed.fsdp import FSDPModule

from server_patches.derived import forget_derived
from server_patches.engine_module import EngineModule
from server_patches.kernel_warmup import compile_in_background
from server_patches.offload import is_layerwise, unpark
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.errors import ConflictError, printable
from sgld_lora_merge.merge.base_store import StorePolicy
from sgld_lora_merge.merge.engine import MergeEngine, Plan
from sgld_lora_merge.merge.planning import MERGEABLE_DTYPES

logger = logging.getLogger(__name__)


class EngineStates:
    """The modules of one rank's pipeline, the merges that are in them, and what sglang does to them besides.

    Args:
        gpu_worker: sglang's worker; its pipeline holds the modules.
        replica_size: ranks of the replica.
        precision: of every merge.
        policy: where base weights are kept.
    """

    def __init__(self, gpu_worker: Any, replica_size: int, precision: Precision, policy: StorePolicy) -> None:
        self.gpu_worker = gpu_worker
        self._replica_size = replica_size
        self._views: dict[str, tuple[nn.Module, EngineModule]] = {}
        self.engine = MergeEngine(self.views, precision, policy)
        self._suspended: set[str] = set()

    # modules

    def modules(self) -> dict[str, nn.Module]:
        modules: dict[str, nn.Module] = get_updatable_modules(self.gpu_worker.pipeline)
        return modules

    def views(self) -> dict[str, EngineModule]:
        """A view of every module; kept as long as the module is the same object."""
        args = self.gpu_worker.server_args
        for name, module in self.modules().items():
            if self._views.get(name, (None,))[0] is not module:
                view = EngineModule(
                    module,
                    self._replica_size,
                    mode=args.lora_merge_mode,
                    device=get_local_torch_device(),
                    compiled=bool(args.enable_torch_compile),
                )
                self._views[name] = (module, view)
        return {name: view for name, (_, view) in self._views.items()}

    @property
    def _wrapped(self) -> bool:
        """Whether sglang has put its LoRA wrappers around the layers (--lora-path, /v1/set_lora)."""
        return bool(getattr(self.gpu_worker.pipeline, "lora_initialized", False))

    @property
    def _sglangs_own_in_force(self) -> bool:
        return self._wrapped and bool(self.gpu_worker.pipeline.is_lora_effective("all"))

    @property
    def sleeping(self) -> bool:
        return bool(self.gpu_worker.is_sleeping())

    def compile_ahead(self) -> None:
        """In the background, for what the transformers' weights are."""
        weights = {
            parameter.dtype
            for name, module in self.modules().items()
            if name.startswith("transformer")
            for parameter in module.parameters()
            if parameter.dim() == 2 and parameter.dtype in MERGEABLE_DTYPES
        }
        compile_in_background(get_local_torch_device(), self.engine.precision, weights)

    # before a plan

    def prepare(self, modules: Iterable[str]) -> None:
        """Before every plan: refuse what cannot be changed now, and bring weights to where writes to them last.

        Raises:
            ConflictError: the engine is asleep, or an adapter of sglang's own is in force.
        """
        names = set(modules)
        self.refuse(names)
        for name, module in self.modules().items():
            if name in names:
                _bring_back(module)

    def refuse(self, modules: Collection[str]) -> None:
        """States in which nothing can be changed.

        Raises:
            ConflictError: which one.
        """
        self.refuse_sleep()
        if self._sglangs_own_in_force:
            raise ConflictError(
                "sglang itself has an adapter in force (--lora-path, /v1/set_lora): POST /v1/unmerge_lora_weights first"
            )
        if self._wrapped and any(is_layerwise(module) for name, module in self.modules().items() if name in modules):
            raise ConflictError(
                "sglang has wrapped the layers for an adapter of its own, and streams them from the host: their "
                "wrappers keep a second copy; start the engine without --lora-path or without --dit-layerwise-offload"
            )

    def refuse_sleep(self) -> None:
        if self.sleeping:
            raise ConflictError("the engine is asleep: POST /resume_memory_occupation first")

    # around what changes weights

    @contextmanager
    def weights_change(self, plan: Plan) -> Iterator[None]:
        """Around a write of ours: what sglang does around an update of its own."""
        with self._derived_state_follows([part.module for part in plan.modules]):
            if any(target.dynamic for part in plan.modules for target in part.written):
                drop_graphs = getattr(self.gpu_worker, "_drop_breakable_cuda_graphs", None)  # new in sglang 0.5.23
                if drop_graphs is not None:
                    drop_graphs("low-rank branches change")
            yield

    @contextmanager
    def _derived_state_follows(self, names: Collection[str]) -> Iterator[None]:
        """Caches and all that is computed from weights follow a write, also one that failed. Prompt embeddings survive.

        They follow it, and do not go before it, because a GPU then writes meanwhile.
        """
        try:
            yield
        finally:
            modules = [self.modules()[name] for name in names]
            invalidate_conditioning_caches(modules)
            for module in modules:
                if isinstance(module, TeaCacheMixin):
                    module.reset_teacache_state()
                forget_derived(module)
                if isinstance(module, BaseDiT):
                    module.refresh_weight_derived_caches(weights_path=None)

    @contextmanager
    def base_weights_change(self, module: nn.Module) -> Iterator[None]:
        """Around code of sglang's that loads a module: W0 back first, and no adapter afterwards, whatever it did."""
        names = [name for name, each in self.modules().items() if each is module]
        for name in names:
            if self.engine.state(name).live:
                _bring_back(module)
                self.engine.restore(name)
        try:
            yield
        finally:
            for name in names:
                self.engine.forget(name)

    @contextmanager
    def own_adapters_change(self) -> Iterator[None]:
        """Around code of sglang's that puts adapters of its own in force: it starts from W0.

        Afterwards either its adapters are in force, or it has failed and ours are again.
        """
        names = self._suspend()
        try:
            yield
        finally:
            self._resume(names)

    def take_out(self) -> None:
        """Before sglang takes adapters out: ours too, as a reset does."""
        names = [name for name in self._live() if name not in self._suspended]
        for name in names:
            _bring_back(self.modules()[name])
        plan = self.engine.plan_reset(names)
        with self.weights_change(plan):
            self.engine.commit(plan)
        self.engine.settle(plan, None)

    def release(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Around sglang's way to sleep: it parks W0, and the store's memory is free before it counts what is free."""
        asleep = self.sleeping
        names = [] if asleep else self._suspend()
        result: dict[str, Any] = {}
        try:
            result = original()
            return result
        finally:
            if not asleep and not result.get("sleeping"):
                self._resume(names)

    def resume(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Around sglang's way to wake: the adapters that were live are merged again from their pairs."""
        asleep = self.sleeping
        result = original()
        if asleep and not result.get("sleeping"):
            self._resume(sorted(self._suspended))
        return result

    def _live(self) -> list[str]:
        return [name for name, state in self.engine.states.items() if state.live]

    def _suspend(self) -> list[str]:
        """Give W0 back in every module, unless that is done already; the names of those where it is done now."""
        names = [name for name in self._live() if name not in self._suspended]
        with self._derived_state_follows(names):
            for name in names:
                _bring_back(self.modules()[name])
                self.engine.suspend(name)
                self._suspended.add(name)
        return names

    def _resume(self, names: Collection[str]) -> None:
        """Put our adapters in force again, unless sglang has one of its own in force by now."""
        if names and self._sglangs_own_in_force:
            for name in names:
                version = self.engine.state(name).weight_version
                logger.warning(
                    "%s: an adapter of sglang's own replaces weight_version %s", name, printable(repr(version), 200)
                )
                self.engine.forget(name)
                self._suspended.discard(name)
            return
        with self._derived_state_follows(names):
            for name in names:
                _bring_back(self.modules()[name])
                self.engine.resume(name)
                self._suspended.discard(name)
                version = printable(repr(self.engine.state(name).weight_version), 200)
                logger.info("%s: weight_version %s is live again", name, version)


def _bring_back(module: nn.Module) -> None:
    """Make a module's parameters those that sglang keeps.

    It serves from copies where it parks a module on the host (--dit-cpu-offload), and throws them away; FSDP may have
    left whole weights where its shards are.
    """
    with torch.inference_mode():
        restore_weight_snapshot(module)
    unpark(module)
    if isinstance(module, FSDPModule):  # the whole is one where any part is
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
