"""The bucket layout: many tensors flattened into one uint8 tensor, and a list that says where each one lies.

The list is what sglang's engines read. As JSON text, which only this plugin reads, it takes a tenth of the time, and
none when the bucket before it had the same.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, overload

import torch
from pydantic_core import from_json

from sgld_lora_merge.errors import Faults, RequestError, in_short, shape_in_short
from sgld_lora_merge.wire.limits import MOST_TENSORS, check_json, check_name

ALIGNMENT = 16  # bytes; every dtype of a tensor can be viewed at such an offset, and a kernel can load 128 bits at once
Entry = TypeVar("Entry")
Item = TypeVar("Item")
Result = TypeVar("Result")
MAX_DIMENSIONS = 64  # of a tensor in torch
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bfloat16", "bool", "complex64", "complex128", "float16", "float32", "float64", "float8_e4m3fn",
        "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int8", "int16", "int32", "int64", "uint8", "uint16",
        "uint32", "uint64",
    )
}  # fmt: skip
LONGEST_REMEMBERED = 2**21  # characters of all layouts that are kept for the next buckets
KEPT_LAYOUTS = 8
MOST_REMEMBERED = 2**14  # their slots, which take ten times as much; a bucket of 720 layers has 1440


@dataclass
class BucketEntry:
    """One tensor of a bucket; the fields are those of sglang's ``FlattenedTensorMetadata``.

    Attributes:
        name: the tensor's name.
        shape: its shape.
        dtype: its dtype, or the dtype's name.
        start_idx, end_idx: its bytes in the flattened tensor, half-open.
        numel: its number of **bytes**; the name is sglang's.
    """

    name: str
    shape: Sequence[int]
    dtype: torch.dtype | str
    start_idx: int
    end_idx: int
    numel: int


class Slot(NamedTuple):
    """A tensor's place in a bucket, checked but for the bucket's length.

    Attributes:
        start, stop: its bytes, half-open.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Layout:
    """The slots that a text describes; the same text gives the same object.

    Attributes:
        stop: bytes of a bucket that has all of them.
        nbytes: of all tensors.
        dtype: of all tensors, where they have the same, each lies at a multiple of 16 bytes, and little lies between
            them; else None.
    """

    slots: tuple[Slot, ...]
    stop: int
    nbytes: int
    dtype: torch.dtype | None

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    @functools.cached_property
    def digest(self) -> str:
        """Of the slots, the same in every process."""
        return hashlib.sha256(repr(self.slots).encode()).hexdigest()


class Lazy(Sequence[Item], ABC):
    """A list that is made when something of it is asked for; its length is known before."""

    @abstractmethod
    def make(self) -> list[Item]:
        """The list."""

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
        slots = [_view(flat, _slot(entry), typed) for entry in entries]
        torch._foreach_copy_(slots, [tensor for _, tensor in tensors])
    return flat, entries


def layout_text(entries: Iterable[BucketEntry]) -> str:
    """Entries as JSON: a list of ``[name, dtype, shape, start_idx, end_idx]``."""
    rows = [[e.name, str(e.dtype).removeprefix("torch."), list(e.shape), e.start_idx, e.end_idx] for e in entries]
    return json.dumps(rows, separators=(",", ":"))


def entries_of(layout: object) -> Layout:
    """The tensors that a layout's text describes.

    Raises:
        RequestError: not text, or not such a list; or with every entry that describes no tensor.
    """
    if not isinstance(layout, str):
        raise RequestError(f"layout is a {type(layout).__name__}, not JSON text")
    found = _layouts.get(layout)
    if found is None:
        found = _slots(layout)
        _keep(layout, found)
    return found


# Every update of a run has the same layouts. They are kept before the update is accepted; what is kept is bounded.
_layouts: dict[str, Layout] = {}


def _keep(text: str, layout: Layout) -> None:
    """Keep a layout for the next bucket, in place of the oldest ones."""
    if len(text) > LONGEST_REMEMBERED or len(layout.slots) > MOST_REMEMBERED:
        return
    while _layouts and (
        len(_layouts) >= KEPT_LAYOUTS
        or len(text) + sum(map(len, _layouts)) > LONGEST_REMEMBERED
        or len(layout.slots) + sum(len(each.slots) for each in _layouts.values()) > MOST_REMEMBERED
    ):
        del _layouts[next(iter(_layouts))]
    _layouts[text] = layout


def _slots(layout: str) -> Layout:
    check_json(layout, "the layout")
    try:
        found = from_json(layout)
        if len(found) > MOST_TENSORS:
            raise RequestError(f"the layout has {len(found)} entries, at most {MOST_TENSORS} are read")
        rows = [(name, dtype, shape, start, stop) for name, dtype, shape, start, stop in found]
        entries = [BucketEntry(n, shape, dtype, start, stop, stop - start) for n, dtype, shape, start, stop in rows]
    except (ValueError, TypeError) as error:
        told = f"layout is not a JSON list of [name, dtype, shape, start_idx, end_idx]: {error}"
        raise RequestError(told) from error
    slots, faults = _slots_of(entries)
    if faults:
        raise RequestError(*faults)
    sizes = [slot.stop - slot.start for slot in slots]
    stop, dtypes = max((slot.stop for slot in slots), default=0), {slot.dtype for slot in slots}
    filled = sum(map(aligned, sizes))
    regular = len(dtypes) == 1 and stop <= filled and not any(slot.start % ALIGNMENT for slot in slots)
    return Layout(slots, stop, sum(sizes), dtypes.pop() if regular else None)


def unflatten(flat: torch.Tensor, entries: Sequence[BucketEntry] | Layout) -> Sequence[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, as views into it where their offsets allow that; a `Bucket` where it is a regular one.

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
        slots, faults = _slots_of(entries)
    typed: dict[torch.dtype, torch.Tensor] = {}

    def tensor(slot: Slot) -> tuple[str, torch.Tensor]:
        if slot.stop > flat.numel():
            raise ValueError(f"[{slot.start}, {slot.stop}) is outside the bucket of {flat.numel()} bytes")
        return slot.name, _view(flat, slot, typed)

    tensors, outside = _each(slots, tensor)
    if faults or outside:
        raise RequestError(*faults, *outside)
    return tensors


def _slots_of(entries: Sequence[BucketEntry]) -> tuple[tuple[Slot, ...], Faults]:
    """The slots of entries, and a sentence for every entry that is none or that overlaps another one."""
    slots, faults = _each(entries, _slot)
    last = None
    for slot in sorted((slot for slot in slots if slot.stop > slot.start), key=lambda slot: (slot.start, slot.stop)):
        if last is not None and slot.start < last.stop:
            mine, other = f"[{slot.start}, {slot.stop})", f"[{last.start}, {last.stop})"
            faults.append(f"metadata of {in_short(slot.name)}: {mine} overlaps {in_short(last.name)}, {other}")
        if last is None or slot.stop > last.stop:
            last = slot
    return tuple(slots), faults


def _each(entries: Sequence[Entry], act: Callable[[Entry], Result]) -> tuple[list[Result], Faults]:
    """The results for those entries that have one, and a sentence for each of the others."""
    results, faults = [], Faults()
    for position, entry in enumerate(entries):
        try:
            results.append(act(entry))
        except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError, RequestError) as error:
            name = getattr(entry, "name", None)
            faults.append(f"metadata of {in_short(name) if isinstance(name, str) else f'entry {position}'}: {error}")
    return results, faults


def _slot(entry: BucketEntry) -> Slot:
    if not isinstance(entry.name, str):
        raise TypeError(f"the name is a {type(entry.name).__name__}, not a string")
    check_name(entry.name)
    dtype = _dtype(entry.dtype)
    # before it is copied: entries may share one shape of any length
    if isinstance(entry.shape, (list, tuple)) and len(entry.shape) > MAX_DIMENSIONS:
        raise ValueError(f"the shape has {len(entry.shape)} dimensions, torch has at most {MAX_DIMENSIONS}")
    shape, start, stop = tuple(entry.shape), entry.start_idx, entry.end_idx
    for value in (*shape, start, stop):
        if not isinstance(value, int) or not 0 <= value < 2**63:
            raise ValueError("shape, start_idx and end_idx are to be integers from 0 that fit 64 bits")
    needed = math.prod(shape) * dtype.itemsize
    if stop - start != needed:
        taken = f"shape {shape_in_short(shape)} of {dtype} takes {in_short(needed)} bytes"
        raise ValueError(f"{taken}, [{start}, {stop}) has {stop - start}")
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return Slot(entry.name, dtype, shape, tuple(strides), start, stop)


def _view(flat: torch.Tensor, slot: Slot, typed: dict[torch.dtype, torch.Tensor]) -> torch.Tensor:
    """A slot's tensor; ``typed`` has the bucket as the dtypes that were met, since each view of it takes its time."""
    _, dtype, shape, strides, start, stop = slot
    whole, itemsize = typed.get(dtype), dtype.itemsize
    if start % itemsize or (whole is None and not _is_aligned(flat, itemsize)):
        return flat[start:stop].clone().view(dtype).view(shape)  # a sender that does not align its tensors
    if whole is None:
        whole = typed[dtype] = flat[: flat.numel() // itemsize * itemsize].view(dtype)
    return whole.as_strided(shape, strides, whole.storage_offset() + start // itemsize)


def aligned(nbytes: int) -> int:
    """Bytes that a tensor of so many takes in a bucket."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _is_aligned(flat: torch.Tensor, itemsize: int) -> bool:
    return not (flat.storage_offset() % itemsize or flat.data_ptr() % itemsize)


def _dtype(value: object) -> torch.dtype:
    dtype = DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{in_short(value)} is not a dtype")
    return dtype
