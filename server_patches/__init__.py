"""The engine plugin: what sgld-lora-merge changes in sglang-diffusion, and no arithmetic.

sglang finds `register` by its entry point, in the HTTP process and in every worker.
"""

from __future__ import annotations

import logging
import os

from server_patches import compat, hooks

logger = logging.getLogger(__name__)


def register() -> None:
    """Register all hooks; stop the process where this sglang is not supported, or where a hook then does not take."""
    if (problem := compat.check_version()) is not None:
        hooks.stop(problem)
    if os.environ.get(compat.UNTESTED_VARIABLE) == "1":
        logger.warning("%s=1: the version of sglang is not checked", compat.UNTESTED_VARIABLE)

    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    for patch in compat.patches():
        HookRegistry.register(patch.target, patch.hook, HookType[patch.kind])
    apply_hooks = HookRegistry.apply_hooks

    def apply_and_check() -> None:
        apply_hooks()
        if (problem := compat.unapplied(HookRegistry._patched)) is not None:
            hooks.stop(problem)

    # sglang only logs a hook that it cannot apply; this is the moment when all of them have been tried
    HookRegistry.apply_hooks = staticmethod(apply_and_check)
