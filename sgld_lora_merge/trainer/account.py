"""Whether what a sync carries is all that was trained: what it would leave behind, by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

from torch import nn

from sgld_lora_merge.errors import name_some
from sgld_lora_merge.trainer.names import PeftLoRAKeyMapper, is_adapter_key, unwrapped

NamedModules = Sequence[tuple[str, nn.Module]]


def is_allowed(name: str, patterns: Sequence[str]) -> bool:
    """Return whether the user knows that the engine does not get this parameter.

    Args:
        name: of a parameter, without wrappers.
        patterns: as of a shell, for whole names: ``*.norm.weight``.
    """
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def unsent_faults(modules: NamedModules, mapper: PeftLoRAKeyMapper, allow_unsynced: Sequence[str]) -> list[str]:
    """Return why pairs of one adapter are less than what the optimiser changes; [] where they are all of it.

    An adapter that is not active in any layer does not count: nothing of it is in the policy.
    """
    active = {name for _, module in modules for name in active_adapters(module)}
    others = [] if mapper.adapter in active else [PeftLoRAKeyMapper(name) for name in sorted(active)]
    unsent = [
        name
        for name in map(unwrapped, _trained(modules))
        if not mapper.is_lora_key(name)
        and (not is_adapter_key(name) or any(other.is_lora_key(name) for other in others))
        and not is_allowed(name, allow_unsynced)
    ]
    if not unsent:
        return []
    return [
        f"{len(unsent)} parameters are trained and not sent: {name_some(unsent)}. Freeze them (requires_grad_(False)), "
        "let the trainer merge and send every weight (--use-lora alone), or name those that the engine may lack in "
        "allow_unsynced="
    ]


def several_active(modules: NamedModules, adapter: str) -> list[str]:
    """Return a fault where the forward adds other adapters to this one; [] where it adds none."""
    for _, module in modules:
        active = active_adapters(module)
        if adapter in active and (others := [name for name in active if name != adapter]):
            return [
                f"adapters {name_some(others)} are active beside {adapter!r}, and the forward adds them all: call "
                f"set_adapter({adapter!r}), or make one of them with PEFT's add_weighted_adapter(..., "
                "combination_type='cat') and send that one"
            ]
    return []


def active_adapters(module: nn.Module) -> list[str]:
    """Return the adapters that a layer of PEFT adds to its output; [] for any other module."""
    active = vars(module).get("_active_adapter", [])
    return [active] if isinstance(active, str) else list(active)


def _trained(modules: NamedModules) -> Iterator[str]:
    """Return the names of all parameters with a gradient."""
    for name, module in modules:
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                yield f"{name}.{own}" if name else own
