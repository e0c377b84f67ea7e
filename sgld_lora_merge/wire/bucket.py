"""Buckets: many tensors flattened into one uint8 tensor."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

import torch

from sgld_lora_merge.errors import Faults, RequestError
from sgld_lora_merge.wire.layout import BucketEntry, Layout, Slot, aligned, each_or_fault, slot_of, slots_of

Item = TypeVar("Item")


class Lazy(Sequence[Item], ABC):
    """A list that is made when an item is asked for; its length is known before."""

    @abstractmethod
    def make(self) -> list[Item]:
        """Make the list."""

    @functools.cached_property
    def made(self) -> list[Item]:
        return self.make()

    @overload
    def __getitem__(self, place: int) -> Item: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Item]: ...
    def __getitem__(self, place: int | slice) -> Item | Sequence[Item]:
        return self.made[place]


@dataclass(frozen=True, eq=False)
class Bucket(Lazy[tuple[str, torch.Tensor]]):
    """Named tensors of one dtype, each at a multiple of 16 bytes: views into the bucket, made when one is asked for.

    Attributes:
        flat: uint8, as long as the layout says.
    """

    flat: torch.Tensor
    layout: Layout

    def make(self) -> list[tuple[str, torch.Tensor]]:
        typed: dict[torch.dtype, torch.Tensor] = {}
        return [(slot.name, _view(self.flat, slot, typed)) for slot in self.layout]

    @property
    def elements(self) -> torch.Tensor:
        """All of it as the tensors' dtype; what lies between them too."""
        assert self.layout.dtype is not None
        return self.flat.view(self.layout.dtype)

    def __len__(self) -> int:
        return len(self.layout.slots)


def flatten(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[torch.Tensor, list[BucketEntry]]:
    """Copy tensors into one uint8 tensor on their device, each at a multiple of 16 bytes.

    Args:
        named_tensors: of any dtype, shape and stride, all on one device.

    Raises:
        ValueError: no tensors, or an empty one; it is named.
        RequestError: a name that is longer than engines read.
    """
    tensors = list(named_tensors)
    if not tensors:
        raise ValueError("a bucket holds at least one tensor")
    entries, offset = [], 0
    for name, tensor in tensors:
        if tensor.numel() == 0:
            raise ValueError(f"{name!r} is empty: shape {tuple(tensor.shape)}")
        entries.append(BucketEntry(name, tensor.shape, tensor.dtype, offset, offset + tensor.nbytes, tensor.nbytes))
        offset += aligned(tensor.nbytes)
    flat = torch.zeros(offset, dtype=torch.uint8, device=tensors[0][1].device)
    typed: dict[torch.dtype, torch.Tensor] = {}
    with torch.no_grad():
        slots = [_view(flat, slot_of(entry), typed) for entry in entries]
        torch._foreach_copy_(slots, [tensor for _, tensor in tensors])
    return flat, entries


def unflatten(flat: torch.Tensor, entries: Sequence[BucketEntry] | Layout) -> Sequence[tuple[str, torch.Tensor]]:
    """Return the tensors of a bucket, as views into it where their offsets allow that; a `Bucket` where it is regular.

    Raises:
        RequestError: with every entry that does not describe bytes of ``flat``.
    """
    if not isinstance(flat, torch.Tensor) or flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
        raise RequestError("flattened_tensor is not a uint8 tensor of one dimension, contiguous")
    if isinstance(entries, Layout):
        fits = max(entries.stop, entries.nbytes) <= flat.numel()
        if entries.dtype is not None and fits and _is_aligned(flat, entries.dtype.itemsize):
            return Bucket(flat[: entries.stop], entries)
        slots = entries.slots
        faults = Faults()
    elif not isinstance(entries, (list, tuple)) or not all(isinstance(entry, BucketEntry) for entry in entries):
        raise RequestError("metadata is not a list of FlattenedTensorMetadata")
    else:
        slots, faults = slots_of(entries)
    typed: dict[torch.dtype, torch.Tensor] = {}

    def tensor(slot: Slot) -> tuple[str, torch.Tensor]:
        if slot.stop > flat.numel():
            raise ValueError(f"[{slot.start}, {slot.stop}) is outside the bucket of {flat.numel()} bytes")
        return slot.name, _view(flat, slot, typed)

    tensors, outside = each_or_fault(slots, tensor)
    if faults or outside:
        raise RequestError(*faults, *outside)
    return tensors


def _view(flat: torch.Tensor, slot: Slot, typed: dict[torch.dtype, torch.Tensor]) -> torch.Tensor:
    """Return a slot's tensor; ``typed`` keeps the bucket in each dtype that was met, since a view takes its time."""
    _, dtype, shape, strides, start, stop = slot
    whole, itemsize = typed.get(dtype), dtype.itemsize
    if start % itemsize or (whole is None and not _is_aligned(flat, itemsize)):
        return flat[start:stop].clone().view(dtype).view(shape)  # a sender that does not align its tensors
    if whole is None:
        whole = typed[dtype] = flat[: flat.numel() // itemsize * itemsize].view(dtype)
    return whole.as_strided(shape, strides, whole.storage_offset() + start // itemsize)


def _is_aligned(flat: torch.Tensor, itemsize: int) -> bool:
    return not (flat.storage_offset() % itemsize or flat.data_ptr() % itemsize)
