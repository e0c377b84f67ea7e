"""What a worker says of itself: to the status, to sglang's list of adapters, and after a failure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from server_patches.verdicts import NotTogether
from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.merge.engine import MergeEngine, ModuleState
from sgld_lora_merge.merge.resident import all_pairs


def outcome(error: LoraMergeError, engine: MergeEngine) -> str:
    """The error, and what the engine serves now."""
    if isinstance(error, NotTogether) or error.reason == "full_update":
        return str(error)
    live = ", ".join(f"{name} at {told_version(state)}" for name, state in engine.states.items() if state.live)
    return f"{error}. Nothing was changed: the engine serves {live or 'the base weights'}"


def told_version(state: ModuleState) -> str:
    """The version of a module in words; of a mixture, every version and how many layers have it."""
    if not state.versions.is_mixed:
        return f"weight_version {state.weight_version!r}"
    return "mixed weight_versions " + ", ".join(f"{name!r} ({n})" for name, n in state.versions.named_counts.items())


def snapshot(
    engine: MergeEngine, states: Mapping[str, str], timings: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Every module as the status route shows it; store sizes are those of rank 0.

    Args:
        states: the word for the state of each module.
        timings: of the last update of each, in milliseconds by stage.
    """
    modules = {}
    for name in sorted(states):
        state = engine.state(name)
        adapters = {each: _shape(all_pairs({each: own})) for each, own in state.live.items()}
        modules[name] = {
            "state": states[name],
            "weight_version": state.weight_version,
            "versions": state.versions.named_counts,
            **(next(iter(adapters.values())) if len(adapters) == 1 else _shape(state.pairs)),
            "adapters": adapters,
            "merge_precision": str(engine.precision),
            "base_store": state.store.kind,
            "base_store_bytes": state.store.nbytes,
            "base_store_reason": state.store.reason,
            "rounding_loss": state.rounding_loss,
            "timings_ms": timings.get(name, {}),
        }
    return modules


def held(engine: MergeEngine, module: str) -> str:
    """How a module holds what is live: "base" for nothing, "merged", or "dynamic" where no weight is merged."""
    live = engine.state(module).live.values()
    dynamic = {placed.target.dynamic for adapter in live for placed in adapter.values()}
    return "base" if not dynamic else "dynamic" if dynamic == {True} else "merged"


def tell_adapters(status: dict[str, Any], engine: MergeEngine) -> None:
    """Add what is live to sglang's own list of adapters, in its terms."""
    for module, state in engine.states.items():
        entries = status["active"].setdefault(module, []) if state.live else []
        for adapter in sorted(state.live):
            merged = held(engine, module) == "merged"
            own = {"nickname": adapter, "path": None}
            entries.append(
                own
                | {"nicknames": [adapter], "merged": merged, "mode": "merged" if merged else "unmerged"}
                | {"strength": 1.0, "strengths": [1.0], "weight_version": state.weight_version}
            )
            if own not in status["loaded_adapters"]:
                status["loaded_adapters"].append(own)


def _shape(pairs: Collection[Pair]) -> dict[str, Any]:
    return {
        "layers": len({pair.layer for pair in pairs}),
        "rank": only({pair.rank for pair in pairs}),
        "scale": only({pair.scale for pair in pairs}),
    }


def only(values: set[Any]) -> Any:
    """The value that all layers share; a sorted list where they differ; None where there are none."""
    return next(iter(values)) if len(values) == 1 else sorted(values) or None
