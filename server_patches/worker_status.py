"""What a worker reports: in answers, in the status, in sglang's list of adapters, and after a failure."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from server_patches.rank_result import RanksDiverged
from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.errors import LoraMergeError, name_some, printable
from sgld_lora_merge.merge.engine import MergeEngine, ModuleState, Plan
from sgld_lora_merge.merge.kernels import MergeStats
from sgld_lora_merge.merge.plan import LOADED
from sgld_lora_merge.merge.resident import all_pairs

logger = logging.getLogger(__name__)


def failure_message(error: LoraMergeError, engine: MergeEngine) -> str:
    """Return the error in words, and which versions the engine serves now."""
    if isinstance(error, RanksDiverged) or error.reason == "full_update":
        return str(error)
    live = ", ".join(f"{name} at {version_in_words(state)}" for name, state in engine.states.items() if state.live)
    return f"{error}. Nothing was changed: the engine serves {live or 'the base weights'}"


def live_answer(
    engine: MergeEngine,
    plan: Plan,
    stats: Mapping[str, MergeStats],
    timings: dict[str, float],
    done: str,
    *,
    mention_kept: bool,
) -> dict[str, Any]:
    """Return the answer to a change that is live now, and log it.

    Args:
        stats: of all ranks, by module.
        timings: milliseconds by stage.
        done: the first words of the message; the names of the modules follow.
        mention_kept: add to the message how many layers keep another version.
    """
    states = {part.module: engine.state(part.module) for part in plan.modules}
    modules = {
        part.module: {
            "layers": len(part.layers),
            "rounding_loss": stats[part.module].rounding_loss if part.merged else None,
            "merge_mode": part.merge_mode,
            "pairs_rounded": part.pairs_rounded,
            "kept": states[part.module].versions.layers_beside(part),
            "versions": states[part.module].versions.named_counts,
            "base": states[part.module].base,
        }
        for part in plan.modules
    }
    modes = {part.merge_mode for part in plan.modules}
    names = list(modules)
    version = states[names[0]].weight_version if names else None
    message = f"{done} in {name_some(names) or 'every module'}"
    for name, each in modules.items():
        if each["kept"] and mention_kept:
            has = version_in_words(states[name])
            message += f"; {each['kept']} layers that the request does not name stay live in {name}, now at {has}"
    if rounded := [part.module for part in plan.modules if part.pairs_rounded]:
        message += f"; in {name_some(rounded)} A or B was first rounded to the weights' dtype"
    for part in plan.modules:
        base = states[part.module].base
        if base != LOADED and part.adapter is not None:  # an update
            message += f"; {part.module}'s base weights are {base}, not those that the engine started with"
    logger.info("%s: weight_version=%s %s", printable(message, 1000), printable(str(version), 200), timings)
    return {
        "message": message,
        "weight_version": version,
        "layers": plan.layers,
        "skipped": plan.skipped,
        "merge_mode": value_of_all(modes) if len(modes) < 2 else "mixed",
        "merge_precision": str(engine.precision),
        "base_store": states[names[0]].store.kind if names else None,
        "rounding_loss": sum(stats.values(), MergeStats()).rounding_loss if modes != {"dynamic"} else None,
        "pairs_rounded": bool(rounded),
        "modules": modules,
        "timings_ms": timings,
    }


def version_in_words(state: ModuleState) -> str:
    """Return the version of a module in words; of a mixture, every version and how many layers have it."""
    if not state.versions.is_mixed:
        return f"weight_version {state.weight_version!r}"
    return "mixed weight_versions " + ", ".join(f"{name!r} ({n})" for name, n in state.versions.named_counts.items())


def snapshot(
    engine: MergeEngine, states: Mapping[str, str], timings: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Return every module as the status route shows it; store sizes are those of rank 0.

    Args:
        states: the word for each module's state.
        timings: milliseconds by stage of each module's last update.
    """
    modules = {}
    for name in sorted(states):
        state = engine.state(name)
        adapters = {each: _layers_rank_scale(all_pairs({each: own})) for each, own in state.live.items()}
        modules[name] = {
            "state": states[name],
            "weight_version": state.weight_version,
            "versions": state.versions.named_counts,
            "base": state.base,
            **(next(iter(adapters.values())) if len(adapters) == 1 else _layers_rank_scale(state.pairs)),
            "adapters": adapters,
            "merge_precision": str(engine.precision),
            "base_store": state.store.kind,
            "base_store_bytes": state.store.nbytes,
            "base_store_reason": state.store.reason,
            "rounding_loss": state.rounding_loss,
            "timings_ms": timings.get(name, {}),
        }
    return modules


def merge_state_of(engine: MergeEngine, module: str) -> str:
    """Return how a module holds what is live: "base" for nothing, "merged", "dynamic" where no weight is merged."""
    live = engine.state(module).live.values()
    dynamic = {placed.target.dynamic for adapter in live for placed in adapter.values()}
    return "base" if not dynamic else "dynamic" if dynamic == {True} else "merged"


def list_adapters(status: dict[str, Any], engine: MergeEngine) -> None:
    """Add what is live to sglang's own list of adapters, in its terms."""
    for module, state in engine.states.items():
        entries = status["active"].setdefault(module, []) if state.live else []
        for adapter in sorted(state.live):
            merged = merge_state_of(engine, module) == "merged"
            own = {"nickname": adapter, "path": None}
            entries.append(
                own
                | {"nicknames": [adapter], "merged": merged, "mode": "merged" if merged else "unmerged"}
                | {"strength": 1.0, "strengths": [1.0], "weight_version": state.weight_version}
            )
            if own not in status["loaded_adapters"]:
                status["loaded_adapters"].append(own)


def _layers_rank_scale(pairs: Collection[Pair]) -> dict[str, Any]:
    return {
        "layers": len({pair.layer for pair in pairs}),
        "rank": value_of_all({pair.rank for pair in pairs}),
        "scale": value_of_all({pair.scale for pair in pairs}),
    }


def value_of_all(values: set[Any]) -> Any:
    """Return the value that all layers share; a sorted list where they differ; None where there are none."""
    return next(iter(values)) if len(values) == 1 else sorted(values) or None
