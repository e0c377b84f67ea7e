"""Where the pristine base weight W0 lives: one copy of the rows that are targets, and of no others."""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from sgld_lora_merge.settings import BASE_STORE_VARIABLE, Settings

logger = logging.getLogger(__name__)

RESERVE_SHARE = 0.1  # of the device's memory, where no reserve is named

Key = tuple[str, int]
Kind = Literal["device", "host"]
Choice = Literal["auto", "device", "host"]
GIB = 2**30


class BaseStore:
    """W0 of one module: beside the live weights on their device, or in pinned host memory.

    A snapshot is taken when a section first becomes a target, while the live weight still is its base; after that the
    merged weight is always computed from the snapshot.

    Attributes:
        reason: why it is where it is; None for an empty store.
    """

    def __init__(self) -> None:
        self._base: dict[Key, torch.Tensor] = {}
        self.reason: str | None = None

    def __contains__(self, key: Key) -> bool:
        return key in self._base

    def __getitem__(self, key: Key) -> torch.Tensor:
        return self._base[key]

    @property
    def nbytes(self) -> int:
        return sum(base.nbytes for base in self._base.values())

    @property
    def kind(self) -> Kind | None:
        """What the answer and the status call the store: ``device`` or ``host``; None for an empty one."""
        if not self._base:
            return None
        return "device" if any(base.is_cuda for base in self._base.values()) else "host"

    def adopt(self, snapshots: Mapping[Key, torch.Tensor], reason: str | None = None) -> None:
        """Keep copies that `device_copy` or `host_copies` made; the store owns them from now on."""
        self._base.update(snapshots)
        if snapshots and reason is not None:
            self.reason = reason

    def drop(self) -> None:
        """Forget every base weight: something else has changed the live weights for good."""
        self._base.clear()
        self.reason = None


@dataclass(frozen=True)
class DeviceMemory:
    """A device's memory, in bytes.

    Attributes:
        total: of the device.
        free: what this process could still take, its allocator's cache included, and no other process holds.
        peak: how much more than now was once allocated, by a generation as a rule.
    """

    total: int
    free: int
    peak: int


@dataclass(frozen=True)
class StorePolicy:
    """Where new snapshots go.

    Attributes:
        choice: ``device``, ``host``, or ``auto``: on the device while ``reserve_bytes`` stay free there, and what the
            process once needed more than now besides.
        reserve_bytes: None for a tenth of the device's memory.
    """

    choice: Choice = "auto"
    reserve_bytes: int | None = None

    def decide(self, nbytes: int, memory: DeviceMemory) -> tuple[Kind, str]:
        """Return where ``nbytes`` of W0 go, and a sentence that says why."""
        if self.choice != "auto":
            return self.choice, f"{BASE_STORE_VARIABLE}={self.choice}"
        reserve = int(memory.total * RESERVE_SHARE) if self.reserve_bytes is None else self.reserve_bytes
        needed = nbytes + reserve + memory.peak
        kind: Kind = "device" if memory.free >= needed else "host"
        why = (
            f"auto: {memory.free / GIB:.1f} GiB are free on the device, {nbytes / GIB:.1f} GiB are for base weights, "
            f"{reserve / GIB:.1f} GiB stay in reserve and {memory.peak / GIB:.1f} GiB for a generation"
        )
        return kind, why


def policy_from(settings: Settings) -> StorePolicy:
    """Return the policy that the settings ask for."""
    return StorePolicy(settings.base_store, settings.base_reserve_bytes)


def memory_of(device: torch.device) -> DeviceMemory:
    """Return the memory of a GPU as it is now."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - allocated
    return DeviceMemory(total, free + cached, torch.cuda.max_memory_allocated(device) - allocated)


def device_copy(rows: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of live rows that still hold the base weight, on their own device."""
    return rows.detach().clone(memory_format=torch.contiguous_format)


def host_copies(rows: Mapping[Key, torch.Tensor], device: torch.device) -> dict[Key, torch.Tensor]:
    """Return contiguous copies of live rows in host memory that the device can copy from at the speed of its link."""
    offsets, total = {}, 0
    for key, part in rows.items():
        offsets[key], total = total, total + -(-part.nbytes // 256) * 256
    memory = _pinned(total, device)
    copies = {}
    for key, part in rows.items():
        place = memory[offsets[key] : offsets[key] + part.nbytes].view(part.dtype).view(part.shape)
        copies[key] = place.copy_(part.detach(), non_blocking=True)
    torch.cuda.synchronize(device)
    return copies


def _pinned(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return pinned bytes, as many as were asked for: torch's own allocator rounds up to a power of two.

    They are unpinned before they are unmapped, when the last tensor that uses them is gone.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(region, dtype=torch.uint8)
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    with torch.cuda.device(device):
        failure = int(runtime.cudaHostRegister(address, nbytes, 0))
    if failure:
        logger.warning("%.1f GiB of host memory cannot be pinned (CUDA error %d): slow merges", nbytes / GIB, failure)
    else:
        weakref.finalize(region, runtime.cudaHostUnregister, address).atexit = False
    return memory
