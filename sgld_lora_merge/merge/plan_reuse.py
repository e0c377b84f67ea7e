"""Reuse the buffers and the validation of the plan before last when only tensor values changed.

Every update of a run has the same signature: the same names, shapes, dtypes and scales. Its way is short:

    wire.layout            the layout's text is known: its slots are those of the bucket before it
    adapter.known_pairs    names and scales are known: only the values are checked, in one pass
    `reuse` (here)         the plan before last is free: the bucket is copied into its buffers as a whole
    kernels                the jobs are those of that plan, and so is the table on the device

Three sets of pairs are kept: the live one, the previous one, and the one before it, which is free. A plan that reuses
it allocates nothing, looks at no name and writes no table. Whatever differs goes the long way, `MergeEngine.check`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from sgld_lora_merge.adapter.known_pairs import BucketPairs
from sgld_lora_merge.merge import kernels
from sgld_lora_merge.merge.module_view import ModuleView
from sgld_lora_merge.merge.plan import ModulePlan, ModuleState, ModuleUpdate, Plan, Signature
from sgld_lora_merge.merge.resident import Copy, all_pairs, fill


def signature_of(update: ModuleUpdate) -> Signature:
    """Return all of an update but its values."""
    if isinstance(update.pairs, BucketPairs):
        return (update.adapter, update.pairs.signature)
    pairs = [(p.layer, p.a.shape, p.b.shape, p.a.dtype, p.b.dtype, p.scale, p.kernel) for p in update.pairs]
    return (update.adapter, *pairs)


def address_of(weight: torch.Tensor) -> tuple[torch.device, int]:
    """Return where a weight is; a weight that was moved or replaced is elsewhere."""
    return weight.device, weight.data_ptr()


def reuse(
    updates: Sequence[ModuleUpdate], states: Mapping[str, ModuleState], views: Mapping[str, ModuleView]
) -> Plan | None:
    """Return a plan in the buffers of an older one, which is free no more; None where anything but values differs."""
    frees = [_free_plan(update, states.get(update.module), views.get(update.module)) for update in updates]
    if not frees or None in frees or len({update.module for update in updates}) < len(updates):
        return None
    plans = []
    for update, free in zip(updates, frees, strict=True):
        assert free is not None
        state = states[update.module]
        fill(free.copies, free.memory, update.pairs)
        plans.append(replace(free, before=state.live, jobs_before=state.plans[-1].jobs_after))
        state.plans = state.plans[1:]  # a second plan must not get the same memory
    return Plan(tuple(plans))


def _free_plan(update: ModuleUpdate, state: ModuleState | None, view: ModuleView | None) -> ModulePlan | None:
    """Return the plan that an update may reuse; None where there is none."""
    if state is None or view is None or len(state.plans) < 3 or update.faults or not update.whole:
        return None
    free, live = state.plans[0], state.plans[-1]
    if free.signature != signature_of(update) or live.signature != free.signature or live.addresses != free.addresses:
        return None
    same = all(address_of(view.weight(name)) == address for name, address in free.addresses.items())
    return free if same else None


def can_be_reused(plan: ModulePlan, copies: Sequence[Copy]) -> bool:
    """Return whether nothing else uses a plan's pairs, all are merged, and its scratch serves its undoing too."""
    return (
        plan.signature is not None
        and len(plan.after) == 1
        and len(plan.jobs_after) == len(plan.written)
        and {pair.layer for pair in all_pairs(plan.after)} == {copy.layer for copy in copies}
        and all(kernels.share_scratch(job, job) for _, job in plan.jobs_after)
    )


def keep_plans(state: ModuleState, settled: ModulePlan) -> tuple[ModulePlan, ...]:
    """Return the plans to keep once one is settled, without what would keep older pairs and base weights alive."""
    if settled.signature is None:
        return ()
    kept = replace(settled, before={}, jobs_before=(), snapshots={}, store_reason=None)
    before = state.plans if state.plans and state.plans[-1].after is state.live else ()
    return (*before[-2:], kept)
