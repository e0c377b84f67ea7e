"""The layout of a bucket: which tensor lies where.

The list of `BucketEntry` is what sglang's engines read. As JSON text, which only this plugin reads, it takes a tenth of
the time, and none when the bucket before it had the same layout: the first step of `merge.plan_reuse`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from pydantic_core import from_json

from sgld_lora_merge.errors import Faults, RequestError, in_short, shape_in_short
from sgld_lora_merge.wire.limits import MOST_TENSORS, check_json, check_name

ALIGNMENT = 16  # bytes; every dtype of a tensor can be viewed at such an offset, and a kernel can load 128 bits at once
Entry = TypeVar("Entry")
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


def layout_text(entries: Iterable[BucketEntry]) -> str:
    """Write entries as JSON: a list of ``[name, dtype, shape, start_idx, end_idx]``."""
    rows = [[e.name, str(e.dtype).removeprefix("torch."), list(e.shape), e.start_idx, e.end_idx] for e in entries]
    return json.dumps(rows, separators=(",", ":"))


def read_layout(layout: object) -> Layout:
    """Read a layout's text.

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
        raise RequestError(f"layout is not a JSON list of [name, dtype, shape, start_idx, end_idx]: {error}") from error
    slots, faults = slots_of(entries)
    if faults:
        raise RequestError(*faults)
    sizes = [slot.stop - slot.start for slot in slots]
    stop, dtypes = max((slot.stop for slot in slots), default=0), {slot.dtype for slot in slots}
    filled = sum(map(aligned, sizes))
    regular = len(dtypes) == 1 and stop <= filled and not any(slot.start % ALIGNMENT for slot in slots)
    return Layout(slots, stop, sum(sizes), dtypes.pop() if regular else None)


def slots_of(entries: Sequence[BucketEntry]) -> tuple[tuple[Slot, ...], Faults]:
    """Return the slots of entries, and a sentence for every entry that is none or that overlaps another one."""
    slots, faults = each_or_fault(entries, slot_of)
    last = None
    for slot in sorted((slot for slot in slots if slot.stop > slot.start), key=lambda slot: (slot.start, slot.stop)):
        if last is not None and slot.start < last.stop:
            mine, other = f"[{slot.start}, {slot.stop})", f"[{last.start}, {last.stop})"
            faults.append(f"metadata of {in_short(slot.name)}: {mine} overlaps {in_short(last.name)}, {other}")
        if last is None or slot.stop > last.stop:
            last = slot
    return tuple(slots), faults


def each_or_fault(entries: Sequence[Entry], act: Callable[[Entry], Result]) -> tuple[list[Result], Faults]:
    """Return the results for those entries that have one, and a sentence for each of the others."""
    results, faults = [], Faults()
    for position, entry in enumerate(entries):
        try:
            results.append(act(entry))
        except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError, RequestError) as error:
            name = getattr(entry, "name", None)
            faults.append(f"metadata of {in_short(name) if isinstance(name, str) else f'entry {position}'}: {error}")
    return results, faults


def slot_of(entry: BucketEntry) -> Slot:
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


def aligned(nbytes: int) -> int:
    """Return the bytes that a tensor of so many bytes takes in a bucket."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _dtype(value: object) -> torch.dtype:
    dtype = DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{in_short(value)} is not a dtype")
    return dtype
