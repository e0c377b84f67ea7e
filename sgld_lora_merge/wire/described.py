"""What a payload describes before any of its handles is opened, and how handles are opened on this worker."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from sgld_lora_merge.errors import RequestError, in_short, shape_in_short


class PayloadReader:
    """How handles are opened on this worker, and whether any was.

    Args:
        device_index: physical GPU UUID -> index of the device in this process; raises `RequestError` if there is none.
        shared: other workers read the same payload, so that an export which may be opened once must not be in it.
        releases: this worker takes over the reference to shared memory that its sender has counted for a reader; with
            a shared payload exactly one worker does, or the memory goes before the others have opened it, or never.
    """

    def __init__(self, device_index: Callable[[str], int], *, shared: bool = False, releases: bool = True) -> None:
        self.opened = False
        self.device_index = device_index
        self.shared = shared
        self.releases = releases


class SharedMemory(NamedTuple):
    """A storage that torch's ``file_system`` strategy exported."""

    manager: bytes
    handle: bytes
    nbytes: int


class Inline(NamedTuple):
    """A storage that travels in the payload itself."""

    data: memoryview

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class Empty(NamedTuple):
    """A storage of no bytes."""

    nbytes: int = 0


class Typed(NamedTuple):
    """A storage and the dtype it is read with."""

    storage: SharedMemory | Inline | Empty
    dtype: torch.dtype


class DescribedTensor(NamedTuple):
    """A view on a storage."""

    typed: Typed
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.typed.dtype.itemsize


class CudaTensor(NamedTuple):
    """The 15 arguments of ``rebuild_cuda_tensor``, checked."""

    arguments: tuple[Any, ...]


class NamedClass(NamedTuple):
    """A class that a payload names as an argument; which one does not matter here."""

    name: str


class DescribedEntry:
    """Stands for ``FlattenedTensorMetadata``, which a pickle makes without arguments and then gives its fields."""


class FileDescriptor:
    """Stands for multiprocessing's class of a file descriptor."""


def refuse_file_descriptor(*_: object) -> NoReturn:
    raise RequestError(
        "the payload shares memory by file descriptor, which an unrelated process cannot open: send with "
        'torch.multiprocessing.set_sharing_strategy("file_system")'
    )


def check_extent(size: tuple[int, ...], stride: tuple[int, ...], offset: int, itemsize: int, nbytes: int) -> None:
    """A view must stay inside its storage; torch would grow the storage instead. Nor may it repeat elements of it:

    a stride of 0 makes a tensor of any size from one element.
    """
    if len(size) != len(stride):
        raise RequestError(f"shape {shape_in_short(size)} and stride {shape_in_short(stride)} differ in length")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else offset - 1
    if (last + 1) * itemsize > nbytes:
        shown = in_short((last + 1) * itemsize)
        raise RequestError(f"shape {shape_in_short(size)} at {offset} needs {shown} bytes, its storage has {nbytes}")
    if math.prod(size) * itemsize > nbytes:
        raise RequestError(
            f"shape {shape_in_short(size)} with stride {shape_in_short(stride)} repeats elements of a storage of "
            f"{nbytes} bytes"
        )
