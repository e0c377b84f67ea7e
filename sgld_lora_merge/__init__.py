"""Exact LoRA merges for a running rollout engine: pairs in, merged weights live, or nothing changed.

The engine plugin is the package ``server_patches``, which sglang-diffusion finds by its entry point. This package holds
what both sides share and imports nothing of sglang.
"""

from sgld_lora_merge.adapter.pairing import pair_up
from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.precision import Precision, precision_from_environment
from sgld_lora_merge.errors import ConflictError, LoraMergeError, RequestError
from sgld_lora_merge.merge.engine import MergeEngine, ModuleUpdate
from sgld_lora_merge.merge.fingerprint import payload_fingerprint
from sgld_lora_merge.merge.module_view import LinearModule, ModuleView
from sgld_lora_merge.merge.spans import Span
from sgld_lora_merge.merge.targets import Landing, Target
from sgld_lora_merge.wire.payload import pack

__all__ = [
    "ConflictError",
    "Landing",
    "LinearModule",
    "LoraMergeError",
    "MergeEngine",
    "ModuleUpdate",
    "ModuleView",
    "Pair",
    "Precision",
    "RequestError",
    "Span",
    "Target",
    "pack",
    "pair_up",
    "payload_fingerprint",
    "precision_from_environment",
]
