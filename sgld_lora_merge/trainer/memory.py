"""Memory that another process can open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exportable_memory(device: torch.device) -> Iterator[None]:
    """What is allocated inside can be exported: expandable segments cannot be everywhere, so plain ones are used."""
    settings = torch._C._accelerator_getAllocatorSettings() if device.type == "cuda" else ""
    if "expandable_segments:True" not in settings.replace(" ", ""):
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)
