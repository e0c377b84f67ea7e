"""Whether what a sync carries is all that was trained: what it would leave behind, by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from sgld_lora_merge.errors import name_some
from sgld_lora_merge.merge.targets import CONVOLUTIONS
from sgld_lora_merge.trainer.names import PeftLoRAKeyMapper, is_adapter_key, unwrapped

NamedModules = Sequence[tuple[str, nn.Module]]
# what PEFT puts into its layers, and into the model
_OF_PEFT = {"peft_config", "scaling", "merged_adapters", "_active_adapter", "lora_variant"}


@dataclass(frozen=True, eq=False)
class Survey:
    """The modules of a model, by what a sync asks of them. Made once, and again when a module came or went.

    Attributes:
        modules: all of them; they stay alive, so that none takes the place of another unseen.
        of_peft: those that know something of adapters.
        weights: name of the weight, without wrappers, of each linear layer and convolution that is no adapter's.
        parameters: name, without wrappers, owner and name there of every parameter.
    """

    modules: Sequence[nn.Module]
    of_peft: NamedModules
    weights: NamedModules
    parameters: Sequence[tuple[str, nn.Module, str]]

    def fits(self, model: nn.Module) -> bool:
        """Return whether the model still has these modules."""
        return list(map(id, model.modules())) == list(map(id, self.modules))


def survey(model: nn.Module) -> Survey:
    """Look at every module of a model."""
    named = list(model.named_modules())
    of_peft = [(name, module) for name, module in named if _OF_PEFT & vars(module).keys()]
    rows = (nn.Linear, *CONVOLUTIONS)
    linear = [(unwrapped(f"{name}.weight"), module) for name, module in named if isinstance(module, rows)]
    weights = [(name, module) for name, module in linear if not is_adapter_key(name)]
    parameters = [
        (unwrapped(f"{name}.{own}" if name else own), module, own)
        for name, module in named
        for own in module._parameters
    ]
    return Survey([module for _, module in named], of_peft, weights, parameters)


def is_allowed(name: str, patterns: Sequence[str]) -> bool:
    """Return whether the user knows that the engine does not get this parameter.

    Args:
        name: of a parameter, without wrappers.
        patterns: as of a shell, for whole names: ``*.norm.weight``.
    """
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def unsent_faults(surveyed: Survey, mapper: PeftLoRAKeyMapper, allow_unsynced: Sequence[str]) -> list[str]:
    """Return why pairs of one adapter are less than what the optimiser changes; [] where they are all of it.

    An adapter that is not active in any layer does not count: nothing of it is in the policy.
    """
    trained = [
        name
        for name, module, own in surveyed.parameters
        if (parameter := module._parameters[own]) is not None and parameter.requires_grad
    ]
    active = {name for _, module in surveyed.of_peft for name in active_adapters(module)}
    others = [] if mapper.adapter in active else [PeftLoRAKeyMapper(name) for name in sorted(active)]
    unsent = [
        name
        for name in trained
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


def several_active(of_peft: NamedModules, adapter: str) -> list[str]:
    """Return a fault where the forward adds other adapters to this one; [] where it adds none."""
    for _, module in of_peft:
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
