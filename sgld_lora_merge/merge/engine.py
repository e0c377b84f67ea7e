"""Plan, then commit: the state of merged weights, and the only code that changes them.

    plan      resolves, checks and allocates; may fail, changes nothing that is live
    commit    writes; every large allocation has been made before
    settle    the update is live: it becomes the state
    revert    it is not: the state before it is computed again from W0

Between the steps the caller may agree with other ranks. Whatever happens to a plan that is not settled, the state is
the one before it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.errors import ConflictError, RequestError, name_some
from sgld_lora_merge.merge import kernels
from sgld_lora_merge.merge.base_store import BaseStore, Key, StorePolicy, device_copy, host_copies, memory_of
from sgld_lora_merge.merge.branches import Branch
from sgld_lora_merge.merge.kernels import MergeJob, MergeStats
from sgld_lora_merge.merge.module_view import ModuleView, Offloaded
from sgld_lora_merge.merge.plan import ModulePlan, ModuleState, ModuleUpdate, Plan, TargetJob, Versions
from sgld_lora_merge.merge.plan_reuse import address_of, can_be_reused, keep_plans, reuse
from sgld_lora_merge.merge.planning import (
    MERGEABLE_DTYPES,
    Weights,
    WeightsOnce,
    exchange_adapters,
    plan_module,
    rounds_pairs,
    tied_weight_faults,
)
from sgld_lora_merge.merge.resident import (
    Adapters,
    all_placed,
    make_resident,
    on_host,
    terms_at,
)
from sgld_lora_merge.merge.targets import Target

__all__ = ["MERGEABLE_DTYPES", "MergeEngine", "ModulePlan", "ModuleState", "ModuleUpdate", "Plan"]

logger = logging.getLogger(__name__)


class MergeEngine:
    """Merges updates into the modules of one rank.

    Args:
        modules: module name -> its view; called for every plan, since an engine may replace its modules.
        precision: of every merge.
        policy: where base weights are kept.
    """

    def __init__(
        self,
        modules: Callable[[], Mapping[str, ModuleView]],
        precision: Precision,
        policy: StorePolicy = StorePolicy(),  # noqa: B008  # immutable
    ) -> None:
        self._modules = modules
        self.precision = precision
        self.policy = policy
        self.states: dict[str, ModuleState] = {}

    def state(self, module: str) -> ModuleState:
        """Return what is live in a module; an empty state for one that was never updated."""
        return self.states.get(module) or ModuleState()

    # plan

    def plan(self, updates: Sequence[ModuleUpdate]) -> Plan:
        """Resolve and check every pair against the modules, and allocate all that a commit needs.

        Raises:
            RequestError: with every fault of every module.
        """
        return reuse(updates, self.states, self._modules()) or self._allocate(self.check(updates))

    def check(self, updates: Sequence[ModuleUpdate]) -> list[ModulePlan]:
        """Resolve and check only, for an update that is not complete yet.

        Raises:
            RequestError: with every fault of every module.
        """
        views = self._modules()
        weights = {name: WeightsOnce(view.weight) for name, view in views.items()}
        plans: list[ModulePlan] = []
        named = Counter(update.module for update in updates)
        faults = [f"module {module!r} is named {count} times" for module, count in named.items() if count > 1]
        for update in updates:
            view = views.get(update.module)
            if view is None:
                faults.extend(
                    (f"no module {update.module!r} here; there are {name_some(sorted(views))}", *update.faults)
                )
                continue
            try:
                plans.append(plan_module(update, view, weights[update.module], self.state(update.module).live))
            except RequestError as error:
                faults.extend(f"{update.module}: {fault}" for fault in error.faults)
        faults.extend(tied_weight_faults(plans, self.states, weights))
        if faults:
            raise RequestError(*faults)
        return plans

    def plan_reset(self, modules: Iterable[str] | None = None, adapter: str | None = None) -> Plan:
        """Plan to take one adapter, or all, out of the named modules, or of all.

        Raises:
            RequestError: a module that does not exist.
            ConflictError: the adapter is not live in any of them.
        """
        views = self._modules()
        names = list(self.states) if modules is None else list(dict.fromkeys(modules))
        if unknown := [name for name in names if name not in views]:
            raise RequestError(f"no module {name_some(unknown)} here; there are {name_some(sorted(views))}")
        plans = []
        for name in names:
            live = self.state(name).live
            gone = live.keys() if adapter is None else live.keys() & {adapter}
            if gone:
                plans.append(exchange_adapters(name, live, {other: live[other] for other in live.keys() - gone}))
        if adapter is not None and not plans:
            others = sorted({other for name in names for other in self.state(name).live})
            raise ConflictError(f"no adapter {adapter!r} is live; live are {name_some(others) or 'none'}")
        return self._allocate(plans)

    def plan_rollback(self) -> Plan:
        """Plan to bring back what was live before the last step (an update, or a reset), in all its modules.

        Raises:
            ConflictError: there is no step to take back: none was made, it was taken back, or the base has changed.
        """
        steps = [(name, state) for name, state in self.states.items() if state.previous is not None]
        if not steps:
            raise ConflictError("there is nothing to roll back: one step is kept, and none has been made since")
        return self._allocate([exchange_adapters(name, state.live, state.previous or {}) for name, state in steps])

    def _allocate(self, plans: Sequence[ModulePlan]) -> Plan:
        """Allocate copies of the pairs, W0 of new targets, and scratch for the merge and its undoing."""
        return Plan(tuple(self._with_scratch(self._prepared(plan)) for plan in plans))

    def _with_scratch(self, plan: ModulePlan) -> ModulePlan:
        jobs = _by_device(self._all_jobs(plan))
        return replace(
            plan, scratch={device: kernels.scratch_for(here, self.precision) for device, here in jobs.items()}
        )

    def _prepared(self, plan: ModulePlan) -> ModulePlan:
        """Return the plan with all that its commit and its undoing need but the scratch."""
        view, store = self._modules()[plan.module], self.state(plan.module).store
        weights = WeightsOnce(view.weight)
        device_of = partial(_device_of, weights)
        kept = {
            name: make_resident(adapter, device_of, self.precision, plan.bucket) for name, adapter in plan.after.items()
        }
        after = {name: own.adapter for name, own in kept.items()}
        branches = _branches(view, plan, after)
        offloaded = view.offloaded({target.weight for target in plan.merged})
        new = {t.key: _part(weights[t.weight], t) for t in plan.merged if t.key not in store}
        snapshots, store_reason = self._snapshots(new, store, None if offloaded is None else offloaded.device)
        plan = replace(
            plan,
            after=after,
            bucket=None,
            snapshots=snapshots,
            store_reason=store_reason,
            branches_before={key: branch for key, (branch, _) in branches.items()},
            branches_after={key: branch for key, (_, branch) in branches.items()},
            offloaded=offloaded,
            pairs_rounded=rounds_pairs(plan, weights, self.precision),
        )
        if plan.offloaded is not None:
            return replace(plan, signature=None)
        places = _places(plan.merged, weights.__getitem__, partial(self._base, plan))
        plan = replace(plan, jobs_before=_jobs(plan.before, places), jobs_after=_jobs(plan.after, places))
        copies = [copy for own in kept.values() for copy in own.copies]
        if not can_be_reused(plan, copies):
            return replace(plan, signature=None)
        (own,) = kept.values()
        addresses = {name: address_of(weight) for name, weight in weights.items()}
        return replace(plan, copies=own.copies, memory=own.memory, addresses=addresses)

    def _snapshots(
        self, rows: Mapping[Key, torch.Tensor], store: BaseStore, offloaded_from: torch.device | None
    ) -> tuple[dict[Key, torch.Tensor], str | None]:
        """Copy W0 of new targets to where the policy wants it; return why. Of an offloaded module it is on the host."""
        devices = {part.device for part in rows.values() if part.is_cuda}
        if offloaded_from is not None and offloaded_from.type == "cuda":
            return host_copies(rows, offloaded_from), "the module's weights are on the host"
        if not devices:
            return {key: device_copy(part) for key, part in rows.items()}, None
        device = devices.pop()
        kind, reason = self.policy.decide(sum(part.nbytes for part in rows.values()), memory_of(device))
        logger.info("base weights go to the %s: %s", store.kind or kind, reason)
        if (store.kind or kind) == "host":
            return host_copies(rows, device), reason
        return {key: device_copy(part) for key, part in rows.items()}, reason

    def _all_jobs(self, plan: ModulePlan) -> list[MergeJob]:
        """Return the jobs of commit and revert that need memory; those of offloaded weights have no content yet."""
        if plan.offloaded is None:
            after = {target.key: job for target, job in plan.jobs_after}
            before = ((job, after.get(target.key)) for target, job in plan.jobs_before)
            return [
                *after.values(),
                *(job for job, then in before if then is None or not kernels.share_scratch(job, then)),
            ]
        places = _places(plan.merged, plan.offloaded.blank, partial(self._base, plan))
        return [job for adapters in (plan.before, plan.after) for _, job in _jobs(adapters, places)]

    # commit

    def commit(self, plan: Plan) -> dict[str, MergeStats]:
        """Write the plan; return statistics by module, each target's divided by its number of copies in the replica.

        ``non_finite`` in a result above 0 means that the merged weight overflowed: the caller reverts.
        """
        return self.begin(plan)()

    def begin(self, plan: Plan) -> Callable[[], dict[str, MergeStats]]:
        """Start to write as `commit` does; return a function that waits for it and returns the statistics."""
        begun = {part.module: self._write(part, after=True) for part in plan.modules}
        return lambda: {module: finish() for module, finish in begun.items()}

    def revert(self, plan: Plan) -> None:
        """Undo a commit, also one that stopped half-way: compute what was live before again from W0."""
        for finish in [self._write(part, after=False) for part in plan.modules]:
            finish()

    def settle(self, plan: Plan, weight_version: str | None, losses: Mapping[str, float] | None = None) -> None:
        """Make a committed plan the state, under its version. ``losses``: rounding loss by module.

        One step back is kept, and this is the step, or a further part of the last one: requests of some layers each
        that follow one another under one version are one step.
        """
        if not plan.modules:
            return
        step = weight_version if any(not module.whole for module in plan.modules) else None
        if step is None or all(state.open_step != step for state in self.states.values()):
            for state in self.states.values():
                state.previous, state.previous_versions, state.open_step = None, Versions(), None
        for module in plan.modules:
            state = self.states.setdefault(module.module, ModuleState())
            state.store.adopt(module.snapshots, module.store_reason)
            state.plans = keep_plans(state, module)
            if state.previous is None:
                state.previous, state.previous_versions = module.before, state.versions
            state.live, state.versions, state.open_step = (
                module.after,
                state.versions.after(module, weight_version),
                step,
            )
            state.rounding_loss = (losses or {}).get(module.module)

    def settle_rollback(self, plan: Plan, losses: Mapping[str, float]) -> None:
        """Make a committed rollback the state, under the versions of then; it cannot be rolled back itself."""
        versions = {module.module: self.state(module.module).previous_versions for module in plan.modules}
        self.settle(plan, None, losses)
        for name, then in versions.items():
            state = self.states[name]
            state.versions, state.previous, state.previous_versions = then, None, Versions()

    def _write(self, plan: ModulePlan, *, after: bool) -> Callable[[], MergeStats]:
        view = self._modules()[plan.module]
        for key, branch in (plan.branches_after if after else plan.branches_before).items():
            assert view.branches is not None
            view.branches.set(key, branch)
        if plan.offloaded is None:
            return self._merge(plan, plan.merged, view.weight, plan.jobs_after if after else plan.jobs_before)
        total = MergeStats()
        for weights, targets in _one_by_one(plan.offloaded, plan.merged):
            adapters = plan.after if after else plan.before
            jobs = _jobs(adapters, _places(targets, weights, partial(self._base, plan)))
            total += self._merge(plan, targets, weights, jobs)()  # before the next one takes its memory
        return lambda: total

    def _merge(
        self, plan: ModulePlan, targets: Sequence[Target], weights: Weights, jobs: Sequence[TargetJob]
    ) -> Callable[[], MergeStats]:
        merged = {target.key for target, _ in jobs}
        with torch.inference_mode():
            for target in targets:
                if target.key not in merged:
                    _part(weights(target.weight), target).copy_(self._base(plan, target))
        copies = {id(job): target.copies for target, job in jobs}
        begun = [
            (here, kernels.begin(here, self.precision, plan.scratch[device]))
            for device, here in _by_device([job for _, job in jobs]).items()
        ]

        def finish() -> MergeStats:
            shared = [(stats, copies[id(job)]) for here, done in begun for job, stats in zip(here, done(), strict=True)]
            return MergeStats(
                math.fsum(stats.lost_sq / held for stats, held in shared),
                math.fsum(stats.update_sq / held for stats, held in shared),
                sum(stats.non_finite for stats, _ in shared),
            )

        return finish

    def _base(self, plan: ModulePlan, target: Target) -> torch.Tensor:
        base = plan.snapshots.get(target.key)
        return self.state(plan.module).store[target.key] if base is None else base

    # what is there

    def base(self, module: str, target: Target) -> torch.Tensor:
        """Return W0 of a target, ``[rows, columns]``: from the store where something is merged, else the weight."""
        store = self.state(module).store
        return store[target.key] if target.key in store else _rows(self._modules()[module], target)

    def effective(self, module: str, target: Target) -> torch.Tensor:
        """Return what a target's layer computes with: its weight, or W0 merged with what its branch adds."""
        weight = _rows(self._modules()[module], target)
        terms = terms_at(self.state(module).live, target)
        if not target.dynamic or not terms or not weight.numel():
            return weight
        if weight.dtype not in MERGEABLE_DTYPES:
            raise RequestError(f"what {target.weight!r} computes with has no dtype: the weight is {weight.dtype}")
        merged = torch.empty_like(weight, memory_format=torch.contiguous_format)
        job = MergeJob(merged, weight, terms)
        kernels.merge([job], self.precision, kernels.scratch_for([job], self.precision))
        return merged

    # the base changes

    def restore(self, module: str) -> None:
        """Write W0 back into every live target of a module, before something else reads or changes its weights."""
        state = self.state(module)
        view = self._modules()[module]
        targets = {placed.target.key: placed.target for placed in all_placed(state.live)}
        for target in targets.values():
            if target.dynamic and view.branches is not None:
                view.branches.set(target.key, None)
        merged = [target for target in targets.values() if not target.dynamic]
        offloaded = view.offloaded({target.weight for target in merged})
        with torch.inference_mode():
            for weights, here in [(view.weight, merged)] if offloaded is None else _one_by_one(offloaded, merged):
                for target in here:
                    _part(weights(target.weight), target).copy_(state.store[target.key])

    def suspend(self, module: str) -> None:
        """Write W0 back and drop the store; the adapters stay on the host, for `resume`."""
        self.restore(module)
        state = self.state(module)
        state.store.drop()
        state.plans = ()
        state.live = on_host(state.live)
        state.previous = None if state.previous is None else on_host(state.previous)

    def resume(self, module: str) -> dict[str, MergeStats]:
        """Merge the live adapters again after `suspend`: the same W0 and the same pairs give the same bytes."""
        state = self.state(module)
        plan = self._allocate([exchange_adapters(module, {}, state.live)])
        stats = self.commit(plan)
        state.store.adopt(plan.modules[0].snapshots, plan.modules[0].store_reason)
        state.live = plan.modules[0].after
        return stats

    def forget(self, module: str, weight_version: str | None = None, *, base: str | None = None) -> None:
        """Drop the adapter, its history and W0: the live weights are the base.

        Args:
            weight_version: of the base; None where it has none.
            base: what the base is, in words; None where it is what it was.
        """
        known = self.state(module).base if base is None else base
        self.states[module] = ModuleState(versions=Versions(weight_version), base=known)


def _branches(view: ModuleView, plan: ModulePlan, after: Adapters) -> dict[Key, tuple[Branch | None, Branch | None]]:
    """Return what the layers of a plan's dynamic targets add now, and what they will add."""
    branches: dict[Key, tuple[Branch | None, Branch | None]] = {}
    for target in plan.written:
        if target.dynamic and view.branches is not None:
            terms = terms_at(after, target)
            then = view.branches.make(target.rows, terms) if terms else None
            branches[target.key] = view.branches.live(target.key), then
    return branches


def _places(
    targets: Sequence[Target], weights: Weights, base: Callable[[Target], torch.Tensor]
) -> list[tuple[Target, torch.Tensor, torch.Tensor]]:
    """Return targets with their live rows and W0 of these, without targets that have no row on this rank."""
    places = ((target, _part(weights(target.weight), target)) for target in targets if target.rows.size)
    return [(target, out, base(target)) for target, out in places]


def _jobs(adapters: Adapters, places: Sequence[tuple[Target, torch.Tensor, torch.Tensor]]) -> list[TargetJob]:
    """Return the merges of those targets that an adapter has something for."""
    found = ((target, out, base, terms_at(adapters, target)) for target, out, base in places)
    return [(target, MergeJob(out, base, terms)) for target, out, base, terms in found if terms]


def _by_device(jobs: Iterable[MergeJob]) -> dict[torch.device, list[MergeJob]]:
    """Group jobs by device: an engine may keep one module on a GPU and another on the host."""
    groups: dict[torch.device, list[MergeJob]] = {}
    for job in jobs:
        groups.setdefault(job.out.device, []).append(job)
    return groups


def _one_by_one(offloaded: Offloaded, targets: Sequence[Target]) -> Iterator[tuple[Weights, Sequence[Target]]]:
    """Yield writable weights by name, one after the other, and the targets that are in each."""
    for name in dict.fromkeys(target.weight for target in targets):
        here = [target for target in targets if target.weight == name]
        with offloaded.opened(name, [target.rows for target in here]) as weight:
            yield {name: weight}.__getitem__, here
    offloaded.finish()


def _device_of(weights: Mapping[str, torch.Tensor], target: Target) -> torch.device:
    """Return where the pairs of a target are kept: beside the weight that they are merged into."""
    return torch.device("cpu") if target.dynamic else weights[target.weight].device


def _rows(view: ModuleView, target: Target) -> torch.Tensor:
    return _part(view.weight(target.weight), target)


def _part(weight: torch.Tensor, target: Target) -> torch.Tensor:
    return weight[target.rows.start : target.rows.stop]
