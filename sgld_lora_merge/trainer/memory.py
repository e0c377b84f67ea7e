"""Memory that another process can open."""

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
    """What is allocated inside can be exported: expandable segments cannot be everywhere, so plain ones are used.

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
    """Whether these settings of the allocator ask for expandable segments."""
    return _EXPANDABLE.search(settings) is not None


def allocator_settings() -> str:
    """The CUDA allocator's settings as they are; of a torch that does not tell, those that the process began with."""
    getter = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # torch 2.11 has none
    told = getter() if getter is not None else next(filter(None, map(os.environ.get, VARIABLES)), "")
    return str(told)


def _set(settings: str) -> None:
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    setter(settings)
