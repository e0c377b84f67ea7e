"""Plan an update of one module: resolve its layers, check that everything fits, decide what is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise

import torch

from sgld_lora_merge.adapter import names
from sgld_lora_merge.adapter.known_pairs import BucketPairs
from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.errors import RequestError, name_some
from sgld_lora_merge.merge.base_store import Key
from sgld_lora_merge.merge.module_view import ModuleView
from sgld_lora_merge.merge.plan import ModulePlan, ModuleState, ModuleUpdate
from sgld_lora_merge.merge.plan_reuse import signature_of
from sgld_lora_merge.merge.resident import Adapters, Placed, all_placed
from sgld_lora_merge.merge.targets import CannotLand, Landing

MERGEABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Weights = Callable[[str], torch.Tensor]


class WeightsOnce(dict[str, torch.Tensor]):
    """Weights by name, each looked up once: a plan needs them again and again."""

    def __init__(self, weight: Weights) -> None:
        self._weight = weight

    def __missing__(self, name: str) -> torch.Tensor:
        weight = self[name] = self._weight(name)
        return weight


def plan_module(update: ModuleUpdate, view: ModuleView, weights: WeightsOnce, before: Adapters) -> ModulePlan:
    """Resolve and check one module's part of an update; nothing is allocated.

    Args:
        weights: the live weights of the module.
        before: its live adapters.

    Raises:
        RequestError: with every fault.
    """
    faults = list(update.faults)
    skipped: list[str] = []
    placed: dict[Key, Placed] = {}
    for pair in update.pairs:
        try:
            landing = view.land(pair.layer)
        except CannotLand as error:
            faults.append(f"{pair.layer!r} cannot be merged: {error}")
            continue
        if landing is None:
            skipped.append(pair.layer)
            continue
        faults.extend(misfit_faults(pair, landing, weights))
        for target in landing.targets:
            if (other := placed.get(target.key)) is not None:
                faults.append(f"{pair.layer!r} and {other.pair.layer!r} land on the same rows of {target.weight!r}")
            placed[target.key] = Placed(pair, target)
    if skipped and not (update.allow_partial and placed):
        nearest = name_some(_nearest_layers(skipped, view.layers()))
        faults.append(f"unknown layers {name_some(skipped)}; the engine's nearest are {nearest}")
        faults.extend([names.KOHYA_ADVICE] * any(map(names.is_flattened, skipped)))
    if faults:
        raise RequestError(*faults)
    own = before.get(update.adapter, {})
    gone = [old.target for key, old in own.items() if update.whole and key not in placed]
    kept = {} if update.whole else own
    return ModulePlan(
        module=update.module,
        before=before,
        after={**before, update.adapter: {**kept, **placed}},
        written=(*(new.target for new in placed.values()), *gone),
        adapter=update.adapter,
        whole=update.whole,
        bucket=update.pairs.bucket if isinstance(update.pairs, BucketPairs) else None,
        signature=signature_of(update) if update.whole and not skipped else None,
        layers=tuple(sorted({new.pair.layer for new in placed.values()})),
        skipped=tuple(skipped),
    )


def tied_weight_faults(
    plans: Sequence[ModulePlan], states: Mapping[str, ModuleState], weights: Mapping[str, WeightsOnce]
) -> list[str]:
    """Return faults for targets that share memory with another one, in this update or live (tied weights).

    The second one's W0 would be a weight into which the first one is merged.
    """
    held = {(name, placed.target.key): placed for name, state in states.items() for placed in all_placed(state.live)}
    held |= {(plan.module, placed.target.key): placed for plan in plans for placed in all_placed(plan.after)}
    extents = []
    for (module, _), placed in held.items():
        target = placed.target
        if module not in weights or target.dynamic or not target.rows.size:
            continue
        weight = weights[module][target.weight]
        step, itemsize = weight.stride(0), weight.element_size()
        start = weight.data_ptr() + target.rows.start * step * itemsize
        # strided rows may interleave with others without touching them: their first element stands for them
        nbytes = target.rows.size * step * itemsize if weight.is_contiguous() else itemsize
        extents.append((str(weight.device), start, start + nbytes, module, placed))
    extents.sort(key=lambda extent: extent[:3])
    return [
        f"{_in_words(one)} and {_in_words(two)} share the same memory: tied weights cannot hold two updates"
        for one, two in pairwise(extents)
        if one[0] == two[0] and two[1] < one[2]
    ]


def exchange_adapters(module: str, before: Adapters, after: Adapters) -> ModulePlan:
    """Plan to put some adapters in place of others, all resident already; what both have in common is not written."""
    changed = [name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)]
    touched = [placed for name in changed for side in (before, after) for placed in side.get(name, {}).values()]
    targets = {placed.target.key: placed.target for placed in touched}
    layers = sorted({placed.pair.layer for placed in all_placed(after)})
    return ModulePlan(module, before, after, tuple(targets.values()), layers=tuple(layers))


def rounds_pairs(plan: ModulePlan, weights: Mapping[str, torch.Tensor], precision: Precision) -> bool:
    """Return whether A or B of a pair that goes live is rounded before it is multiplied.

    FP16 mode casts both to the dtype of the weight. FP32 mode takes them as they are, and so does a branch.
    """
    if precision is Precision.FP32:
        return False
    live = {id(placed) for placed in all_placed(plan.before)}
    new = [each for each in all_placed(plan.after) if id(each) not in live and not each.target.dynamic]
    dtypes = {(side.dtype, weights[each.target.weight].dtype) for each in new for side in (each.pair.a, each.pair.b)}
    return any(torch.promote_types(side, weight) != weight for side, weight in dtypes)


def _in_words(extent: tuple[str, int, int, str, Placed]) -> str:
    module, placed = extent[3:]
    return f"{placed.pair.layer!r} ({module} {placed.target.weight!r})"


def misfit_faults(pair: Pair, landing: Landing, weights: WeightsOnce) -> list[str]:
    """Return why a pair does not fit its layer."""
    faults = []
    if _extents(pair.kernel) != _extents(landing.kernel):
        faults.append(f"{pair.layer!r}: the pair is {_kind(pair.kernel)}, the layer is {_kind(landing.kernel)}")
    if pair.a.shape[1] != landing.in_features:
        faults.append(
            f"{pair.layer!r}: lora_A {tuple(pair.a.shape)} has {pair.a.shape[1]} columns, the layer takes "
            f"{landing.in_features} inputs"
        )
    if pair.b.shape[0] != landing.out_features:
        faults.append(
            f"{pair.layer!r}: lora_B {tuple(pair.b.shape)} has {pair.b.shape[0]} rows, the layer gives "
            f"{landing.out_features} outputs"
        )
    for name in {target.weight for target in landing.targets if not target.dynamic}:
        if (dtype := weights[name].dtype) not in MERGEABLE_DTYPES:
            faults.append(f"{pair.layer!r} cannot be merged: its weight {name!r} has dtype {dtype}")
    return faults


def _extents(kernel: tuple[int, ...]) -> tuple[int, ...]:
    """Return a kernel; () for one of ones, since such a convolution is a linear layer."""
    return kernel if math.prod(kernel) > 1 else ()


def _kind(kernel: tuple[int, ...]) -> str:
    return f"a convolution's with kernel {kernel}" if kernel else "a linear layer's"


def _nearest_layers(unknown: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return known layers that look most like the first of the unknown ones."""
    close = (name for layer in unknown[:3] for name in get_close_matches(layer, known, n=4, cutoff=0.0))
    return list(dict.fromkeys(close))
