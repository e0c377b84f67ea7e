"""What a PEFT model tells of an adapter beside its tensors: what pairs cannot carry, and what became of the base."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

NamedModules = Sequence[tuple[str, nn.Module]]

# inits that leave the base weights as they are; the others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) take B @ A off them
_KEEP_BASE = (None, True, False, "gaussian", "orthogonal", "eva")


def keeps_base(init: object) -> bool:
    """Whether this ``init_lora_weights`` leaves the base weights as they are; None is PEFT's default."""
    return (init.lower() if isinstance(init, str) else init) in _KEEP_BASE


def faults_of(modules: NamedModules, adapter: str) -> list[str]:
    """Why the pairs alone would not be the adapter, one sentence each."""
    faults: dict[str, None] = {}  # an ordered set: PEFT keeps a configuration in more than one module
    for name, module in modules:
        own = vars(module)
        if (config := _config(module, adapter)) is not None:
            if (bias := getattr(config, "bias", "none")) != "none":
                faults[f"adapter {adapter!r} trains biases (bias={bias!r}), which are not sent"] = None
            if getattr(config, "trainable_token_indices", None):
                faults[f"adapter {adapter!r} trains tokens of an embedding (trainable_token_indices)"] = None
        if (variant := own.get("lora_variant", {}).get(adapter)) is not None:
            kind = type(variant).__name__.removesuffix("LinearVariant").removesuffix("Variant")
            faults[f"{name!r} of adapter {adapter!r} is {kind}, of which A and B are not all; it is not sent"] = None
        if adapter in own.get("merged_adapters", ()):
            faults[f"adapter {adapter!r} is merged into the trainer's own weights; call unmerge_adapter() first"] = None
    return list(faults)


def init_that_moved_the_base(modules: NamedModules, adapter: str) -> str | None:
    """The ``init_lora_weights`` that took B @ A off the base weights; None where they are the checkpoint's."""
    for _, module in modules:
        init = getattr(_config(module, adapter), "init_lora_weights", True)
        if not keeps_base(init):
            return str(init)
    return None


def _config(module: nn.Module, adapter: str) -> object:
    # not by getattr: what a module lacks, torch looks for in three places and then raises, for each of thousands
    return vars(module).get("peft_config", {}).get(adapter)
