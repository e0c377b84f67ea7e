"""Allocate memory that another process can open."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_EXPANDABLE = re.compile(r"(expandable_segments\s*:\s*)true", re.IGNORECASE)


@contextmanager
def exportable_memory(device: torch.device) -> Iterator[None]:
    """Allocate without expandable segments inside, which cannot be exported everywhere.

    All settings are written, since torch resets those that it is not given.
    """
    settings = allocator_settings() if device.type == "cuda" else ""
    if not are_expandable(settings):
        yield
        return
    _set(_EXPANDABLE.sub(r"\1False", settings))
    try:
        yield
    finally:
        _set(settings)


def are_expandable(settings: str) -> bool:
    """Return whether these settings of the allocator ask for expandable segments."""
    return _EXPANDABLE.search(settings) is not None


def allocator_settings() -> str:
    """Return the CUDA allocator's settings; with a torch that cannot say, those that the process began with."""
    getter = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # torch 2.11 has none
    if getter is not None:
        return str(getter())
    return next(filter(None, map(os.environ.get, VARIABLES)), "")


def _set(settings: str) -> None:
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    setter(settings)
