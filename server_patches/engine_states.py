"""The states of sglang: those in which an update is refused, and what each does to the weights."""

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

FROM_DISK, FULL_WEIGHTS = "loaded from disk", "full weights"  # what a base that sglang has written is called


class EngineStates:
    """Holds the modules of one rank's pipeline and their merges, and follows what sglang does to them.

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
        self._new_base = FROM_DISK

    # modules

    def modules(self) -> dict[str, nn.Module]:
        modules: dict[str, nn.Module] = get_updatable_modules(self.gpu_worker.pipeline)
        return modules

    def views(self) -> dict[str, EngineModule]:
        """Return a view of every module; a view is kept as long as its module is the same object."""
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
    def _has_lora_wrappers(self) -> bool:
        """Whether sglang has put its LoRA wrappers around the layers (--lora-path, /v1/set_lora)."""
        return bool(getattr(self.gpu_worker.pipeline, "lora_initialized", False))

    @property
    def _sglang_adapter_active(self) -> bool:
        return self._has_lora_wrappers and bool(self.gpu_worker.pipeline.is_lora_effective("all"))

    @property
    def sleeping(self) -> bool:
        return bool(self.gpu_worker.is_sleeping())

    def compile_ahead(self) -> None:
        """Compile the merge kernel in the background, for the dtypes of the transformers' weights."""
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
        """Refuse what cannot be changed now, and restore parameters so that writes last. Call before every plan.

        Raises:
            ConflictError: the engine is asleep, or an adapter of sglang's own is in force.
        """
        names = set(modules)
        self.refuse(names)
        for name, module in self.modules().items():
            if name in names:
                _restore_parameters(module)

    def refuse(self, modules: Collection[str]) -> None:
        """Refuse in a state in which nothing can be changed.

        Raises:
            ConflictError: which one.
        """
        self.refuse_sleep()
        if self._sglang_adapter_active:
            raise ConflictError(
                "sglang itself has an adapter in force (--lora-path, /v1/set_lora): POST /v1/unmerge_lora_weights first"
            )
        if self._has_lora_wrappers and any(
            is_layerwise(module) for name, module in self.modules().items() if name in modules
        ):
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
        """Surround a write of the plugin with what sglang does around an update of its own."""
        with self._derived_state_renewed([part.module for part in plan.modules]):
            if any(target.dynamic for part in plan.modules for target in part.written):
                drop_graphs = getattr(self.gpu_worker, "_drop_breakable_cuda_graphs", None)  # new in sglang 0.5.23
                if drop_graphs is not None:
                    drop_graphs("low-rank branches change")
            yield

    @contextmanager
    def _derived_state_renewed(self, names: Collection[str]) -> Iterator[None]:
        """Empty caches of what is computed from weights after a write, also a failed one. Prompt embeddings are kept.

        It happens after the block and not before it, so that the GPU writes meanwhile.
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
        """Surround sglang's code that loads a module: restore W0 first; afterwards the module has no adapter."""
        names = [name for name, each in self.modules().items() if each is module]
        self._restore(names)
        try:
            yield
        finally:
            for name in names:
                self.engine.forget(name, base=self._new_base)

    @contextmanager
    def full_weights_change(self) -> Iterator[None]:
        """Surround sglang's update of full weights: what it loads comes from a sender, not from disk."""
        self._new_base = FULL_WEIGHTS
        try:
            yield
        finally:
            self._new_base = FROM_DISK

    def follow_full_update(self, modules: Collection[str], weight_version: str | None) -> None:
        """Give modules a new base on this rank, now that a full update has ended on all ranks, also a failed one.

        Args:
            modules: those that any rank has begun to write; this one may not have come to them.
            weight_version: None also where the update has failed, since a part of the weights may be older.
        """
        base = FULL_WEIGHTS if weight_version is None else f"{FULL_WEIGHTS}, version {weight_version!r}"
        with self._derived_state_renewed(modules):
            self._restore(modules)
        for name in modules:
            self.engine.forget(name, weight_version, base=base)

    def _restore(self, names: Collection[str]) -> None:
        """Write W0 back into modules that hold an adapter."""
        for name in names:
            if self.engine.state(name).live:
                _restore_parameters(self.modules()[name])
                self.engine.restore(name)

    @contextmanager
    def own_adapters_change(self) -> Iterator[None]:
        """Surround sglang's code that puts its own adapters in force, which must start from W0.

        Afterwards either its adapters are in force, or it has failed and ours are again.
        """
        names = self._suspend()
        try:
            yield
        finally:
            self._resume(names)

    def remove_adapters(self) -> None:
        """Remove the plugin's adapters, as a reset does; call before sglang removes its own."""
        names = [name for name in self._live_modules() if name not in self._suspended]
        for name in names:
            _restore_parameters(self.modules()[name])
        plan = self.engine.plan_reset(names)
        with self.weights_change(plan):
            self.engine.commit(plan)
        self.engine.settle(plan, None)

    def release(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Let sglang sleep with W0 in its modules; the store's memory is freed before sglang counts what is free."""
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
        """Let sglang wake up, and merge the adapters that were live again, from their pairs."""
        asleep = self.sleeping
        result = original()
        if asleep and not result.get("sleeping"):
            self._resume(sorted(self._suspended))
        return result

    def _live_modules(self) -> list[str]:
        return [name for name, state in self.engine.states.items() if state.live]

    def _suspend(self) -> list[str]:
        """Restore W0 in every module that is not suspended yet; return the names of these modules."""
        names = [name for name in self._live_modules() if name not in self._suspended]
        with self._derived_state_renewed(names):
            for name in names:
                _restore_parameters(self.modules()[name])
                self.engine.suspend(name)
                self._suspended.add(name)
        return names

    def _resume(self, names: Collection[str]) -> None:
        """Merge the plugin's adapters again, unless sglang has an adapter of its own in force by now."""
        if names and self._sglang_adapter_active:
            for name in names:
                version = self.engine.state(name).weight_version
                logger.warning(
                    "%s: an adapter of sglang's own replaces weight_version %s", name, printable(repr(version), 200)
                )
                self.engine.forget(name)
                self._suspended.discard(name)
            return
        with self._derived_state_renewed(names):
            for name in names:
                _restore_parameters(self.modules()[name])
                self.engine.resume(name)
                self._suspended.discard(name)
                version = printable(repr(self.engine.state(name).weight_version), 200)
                logger.info("%s: weight_version %s is live again", name, version)


def _restore_parameters(module: nn.Module) -> None:
    """Make a module's parameters the ones that sglang keeps.

    It serves from copies where it parks a module on the host (--dit-cpu-offload), and throws them away; FSDP may have
    left whole weights where its shards are.
    """
    with torch.inference_mode():
        restore_weight_snapshot(module)
    unpark(module)
    if isinstance(module, FSDPModule):  # where any part is an FSDPModule, the whole module is one
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
