"""Read what a PEFT model says of an adapter beside its tensors: what pairs cannot carry, and whether the base moved."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sgld_lora_merge.adapter.formats import keeps_base

NamedModules = Sequence[tuple[str, nn.Module]]


def faults_of(modules: NamedModules, adapter: str) -> list[str]:
    """Return why the pairs alone would not be the adapter, one sentence each."""
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
    """Return the ``init_lora_weights`` that took B @ A off the base weights; None where they are the checkpoint's."""
    for _, module in modules:
        init = getattr(_config(module, adapter), "init_lora_weights", True)
        if not keeps_base(init):
            return str(init)
    return None


def _config(module: nn.Module, adapter: str) -> object:
    # not by getattr: what a module lacks, torch looks for in three places and then raises, for each of thousands
    return vars(module).get("peft_config", {}).get(adapter)
