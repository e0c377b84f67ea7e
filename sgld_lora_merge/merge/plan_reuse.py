"""The steps of a run differ in values only: an update takes the memory of one that is done with, and its checks hold.

Three sets of pairs are kept: live, previous, and the one before, which is free. In its memory a plan allocates nothing,
looks at no names and writes no table: the new values are copied, and the jobs are those of then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from sgld_lora_merge.adapter.pairs import BucketPairs
from sgld_lora_merge.merge import kernels
from sgld_lora_merge.merge.plan import ModulePlan, ModuleState, ModuleUpdate, Outline, Plan
from sgld_lora_merge.merge.resident import Copy, all_pairs, refill
from sgld_lora_merge.merge.targets import ModuleView


def outline_of(update: ModuleUpdate) -> Outline:
    """All of an update but its values."""
    if isinstance(update.pairs, BucketPairs):
        return (update.adapter, update.pairs.form)
    pairs = [(p.layer, p.a.shape, p.b.shape, p.a.dtype, p.b.dtype, p.scale, p.kernel) for p in update.pairs]
    return (update.adapter, *pairs)


def address_of(weight: torch.Tensor) -> tuple[torch.device, int]:
    """Where a weight is; one that was moved, or replaced, is elsewhere."""
    return weight.device, weight.data_ptr()


def refilled(
    updates: Sequence[ModuleUpdate], states: Mapping[str, ModuleState], views: Mapping[str, ModuleView]
) -> Plan | None:
    """A plan in the memory of an older one, which is free no more; None where anything but the values differs."""
    spares = [_spare(update, states.get(update.module), views.get(update.module)) for update in updates]
    if not spares or None in spares or len({update.module for update in updates}) < len(updates):
        return None
    plans = []
    for update, spare in zip(updates, spares, strict=True):
        assert spare is not None
        state = states[update.module]
        refill(spare.copies, spare.memory, update.pairs)
        plans.append(replace(spare, before=state.live, jobs_before=state.plans[-1].jobs_after))
        state.plans = state.plans[1:]  # a second plan must not get the same memory
    return Plan(tuple(plans))


def _spare(update: ModuleUpdate, state: ModuleState | None, view: ModuleView | None) -> ModulePlan | None:
    """The plan whose memory an update may take."""
    if state is None or view is None or len(state.plans) < 3 or update.faults or not update.whole:
        return None
    spare, live = state.plans[0], state.plans[-1]
    if spare.outline != outline_of(update) or live.outline != spare.outline or live.addresses != spare.addresses:
        return None
    same = all(address_of(view.weight(name)) == address for name, address in spare.addresses.items())
    return spare if same else None


def may_be_refilled(plan: ModulePlan, copies: Sequence[Copy]) -> bool:
    """Whether nothing else uses a plan's pairs, all of them are merged, and its scratch serves its undoing too."""
    return (
        plan.outline is not None
        and len(plan.after) == 1
        and len(plan.jobs_after) == len(plan.written)
        and {pair.layer for pair in all_pairs(plan.after)} == {copy.layer for copy in copies}
        and all(kernels.alike(job, job) for _, job in plan.jobs_after)
    )


def chained(state: ModuleState, settled: ModulePlan) -> tuple[ModulePlan, ...]:
    """The plans that are kept once one is settled; without what would keep older pairs and base weights alive."""
    if settled.outline is None:
        return ()
    kept = replace(settled, before={}, jobs_before=(), snapshots={}, store_reason=None)
    chained = state.plans if state.plans and state.plans[-1].after is state.live else ()
    return (*chained[-2:], kept)
