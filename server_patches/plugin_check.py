"""Check whether an engine started here would have the plugin in force. Runs in its own process, without a model.

python -m server_patches.plugin_check      one line of JSON: the version of sglang, and a problem by stage
"""

from __future__ import annotations

import json
import logging
from importlib.metadata import PackageNotFoundError, entry_points, version

from server_patches.compat import check_version
from server_patches.patch import patches
from sgld_lora_merge.errors import LoraMergeError

GROUP = "sglang.multimodal_gen.plugins"
NAME = "sgld_lora_merge"


def check_plugin() -> dict[str, str | None]:
    """Return sglang's ``version``, and for ``sglang`` and ``plugin`` the problem and what to do, or None."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = None
    try:
        problem = check_version()
    except LoraMergeError as error:  # a variable of the environment, which would stop the start
        return {"version": found, "sglang": None, "plugin": str(error)}
    return {"version": found, "sglang": problem, "plugin": _plugin() if problem is None else None}


def _plugin() -> str | None:
    if NAME not in {entry_point.name for entry_point in entry_points(group=GROUP)}:
        return "sglang cannot find the plugin: pip install sgld-lora-merge into the environment of sglang"
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, apply_plugin_hooks

    try:
        apply_plugin_hooks()
    except SystemExit as stopped:
        return str(stopped.code).removeprefix("sgld-lora-merge: ")
    if any(patch.target not in HookRegistry._patched for patch in patches()):
        return f"sglang leaves the plugin out: put {NAME} into SGLANG_PLUGINS, or unset it"
    return None


if __name__ == "__main__":
    logging.disable()  # what sglang says of a hook that fails is in the answer
    print(json.dumps(check_plugin()))
