"""Read PEFT's configuration of an adapter: what A and B alone cannot carry, and the scale of each layer.

The fields are those of PEFT 0.19's ``LoraConfig``. A field of a later PEFT whose name begins with ``use_`` is refused
when it is set: it changes what A and B mean, in a way that is not known here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgld_lora_merge.adapter.precision import checked_scale
from sgld_lora_merge.errors import in_short

# field -> what it makes of the adapter
_VARIANTS = {
    "use_dora": "DoRA, which scales each column of the merged weight",
    "alora_invocation_tokens": "aLoRA, which acts on some tokens only",
    "layer_replication": "LoRA on layers that the base model does not have",
    "use_qalora": "QALoRA, whose A is pooled",
    "use_bdlora": "BD-LoRA, whose matrices are block-diagonal",
    "arrow_config": "Arrow, which routes each token to another adapter",
    "target_parameters": "LoRA on parameters that are not weights of layers",
    "trainable_token_indices": "trained tokens of an embedding",
    "modules_to_save": "modules that are trained whole",
    "lora_bias": "LoRA with biases",
}
_KNOWN_FLAGS = {"use_rslora"}
# inits that leave the base weights as they are; the others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) take B @ A off them
_KEEP_BASE = (None, True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class PeftScales:
    """What PEFT's config says of ranks and scales.

    Attributes:
        alpha: of every layer that no pattern is for.
        alpha_pattern: regular expression for the end of a layer's name -> alpha.
        rank: of every layer that no pattern is for; None where the config does not say.
        rank_pattern: as ``alpha_pattern``, for ranks.
        rank_stabilized: the scale is ``alpha / sqrt(rank)`` (rsLoRA) instead of ``alpha / rank``.
    """

    alpha: float
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool
    rank: int | None = None
    rank_pattern: Mapping[str, int] | None = None

    def of(self, layer: str, rank: int) -> float:
        """Return the whole scale of a layer; the first pattern that matches says its alpha, as in PEFT."""
        alpha = _first_match(self.alpha_pattern, layer, self.alpha)
        return checked_scale(alpha / (math.sqrt(rank) if self.rank_stabilized else rank), f"alpha {alpha} of {layer!r}")

    def rank_fault(self, layer: str, rank: int) -> str | None:
        """Return why a pair of this rank is not the one that the config describes; None where it is."""
        expected = _first_match(self.rank_pattern or {}, layer, self.rank)
        if expected in (None, rank):
            return None
        return (
            f"{layer!r} has rank {rank}, its config says {expected}, and the scale is alpha / rank: correct r, "
            "rank_pattern and lora_alpha of the config to what was trained"
        )


def variant_faults(config: Mapping[str, Any]) -> list[str]:
    """Return why A and B alone would not be the adapter of a configuration, one sentence each."""
    faults = [f"{field}={in_short(config[field])}: {what}" for field, what in _VARIANTS.items() if config.get(field)]
    if (bias := config.get("bias", "none")) not in (None, "none"):
        faults.append(f"bias={in_short(bias)}: biases that are trained")
    known = _VARIANTS.keys() | _KNOWN_FLAGS
    faults += [
        f"{field}={in_short(value)}: a kind of LoRA that is not known here"
        for field, value in config.items()
        if field.startswith("use_") and field not in known and value
    ]
    return faults


def keeps_base(init: object) -> bool:
    """Return whether this ``init_lora_weights`` leaves the base weights as they are; None is PEFT's default."""
    return (init.lower() if isinstance(init, str) else init) in _KEEP_BASE


def _first_match(patterns: Mapping[str, Any], layer: str, default: Any) -> Any:
    matching = (own for key, own in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", layer))
    return next(matching, default)
