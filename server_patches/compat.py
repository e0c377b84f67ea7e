"""The supported versions of sglang, and the check that every patch took."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version

from server_patches.patch import Patch
from sgld_lora_merge.settings import UNTESTED_VARIABLE, settings_from

SUPPORTED = ("0.5.21", "0.5.22", "0.5.23")


def check_version(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why this version of sglang is refused, as a sentence that says what to do; None for a supported version.

    Raises:
        LoraMergeError: a variable of the environment has an invalid value.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return "sglang is not installed: pip install 'sgld-lora-merge[engine]'"
    if settings_from(environ).allow_untested_sglang or found in SUPPORTED:
        return None
    return (
        f"sglang {found} is not supported, {' or '.join(SUPPORTED)} is: install one of those, or set "
        f"{UNTESTED_VARIABLE}=1 to try this one, or exclude the plugin sgld_lora_merge with SGLANG_PLUGINS"
    )


def unapplied(patches: Iterable[Patch], applied: set[str]) -> str | None:
    """Return which patches did not take, as a sentence; None where all did."""
    missing = [patch.target for patch in patches if patch.target not in applied]
    if not missing:
        return None
    return (
        f"these functions of sglang {version('sglang')} could not be changed: {', '.join(missing)}. Weight updates "
        f"would be sglang's own, with its silent failures. Install sglang {' or '.join(SUPPORTED)}, or exclude the "
        "plugin sgld_lora_merge with SGLANG_PLUGINS"
    )
