"""Declare a change to sglang: ``@patch(function, ...)`` stands on the hook that runs in its place, or around it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn, TypeVar

RUNTIME = "sglang.multimodal_gen.runtime."
MODULES = ("server_patches.http_patches", "server_patches.worker_patches")

Hook = TypeVar("Hook", bound=Callable[..., Any])


@dataclass(frozen=True)
class Patch:
    """One function of sglang's that a hook changes.

    Attributes:
        target: its dotted name.
        kind: sglang's `HookType`, by name: "BEFORE" and "AFTER" see arguments and result, "AROUND" calls the original.
        hook: what runs.
        why: what is wrong without it.
        until: when it can be deleted.
    """

    target: str
    kind: str
    hook: Callable[..., Any]
    why: str
    until: str


_declared: dict[str, Patch] = {}


def patch(*functions: str, kind: str, why: str, until: str) -> Callable[[Hook], Hook]:
    """Declare what a hook changes; the arguments are those of `Patch`.

    Args:
        functions: dotted names under `RUNTIME`, which the same hook changes for the same reason.

    Raises:
        ValueError: another hook changes one of them.
    """

    def declare(hook: Hook) -> Hook:
        for function in functions:
            if function in _declared:
                raise ValueError(f"{function} is changed by {_declared[function].hook.__name__} and {hook.__name__}")
            _declared[function] = Patch(RUNTIME + function, kind, hook, why, until)
        return hook

    return declare


def patches() -> tuple[Patch, ...]:
    """Return every change to sglang. sglang's runtime is imported when the hooks run, not here."""
    for module in MODULES:
        import_module(module)
    return tuple(_declared.values())


def stop(sentence: str) -> NoReturn:
    """End this process: an engine without the plugin would ignore updates silently.

    ``SystemExit``, because sglang logs a plugin's other exceptions and starts without it.
    """
    sys.exit(f"sgld-lora-merge: {sentence}")
