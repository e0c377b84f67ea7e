"""The engine plugin: what sgld-lora-merge changes in sglang-diffusion, and no arithmetic.

sglang finds `register` by its entry point, in the HTTP process and in every worker.
"""

from __future__ import annotations

import logging

from server_patches.compat import check_version, unapplied
from server_patches.patch import patches, stop
from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.settings import UNTESTED_VARIABLE, settings_from

logger = logging.getLogger(__name__)


def register() -> None:
    """Register all hooks with sglang.

    Stop the process if a variable is invalid, if this sglang is not supported, or if a hook does not take.
    """
    try:
        settings = settings_from()
    except LoraMergeError as error:
        stop(str(error))
    if (problem := check_version()) is not None:
        stop(problem)
    if settings.allow_untested_sglang:
        logger.warning("%s=1: the version of sglang is not checked", UNTESTED_VARIABLE)

    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    declared = patches()
    for patch in declared:
        HookRegistry.register(patch.target, patch.hook, HookType[patch.kind])
    apply_hooks = HookRegistry.apply_hooks

    def apply_and_check() -> None:
        apply_hooks()
        if (problem := unapplied(declared, HookRegistry._patched)) is not None:
            stop(problem)

    # sglang only logs a hook that it cannot apply; this is the moment when all of them have been tried
    HookRegistry.apply_hooks = staticmethod(apply_and_check)
