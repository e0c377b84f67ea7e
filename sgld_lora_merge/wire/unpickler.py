"""An unpickler that can describe tensors and bucket metadata, and nothing else.

Payloads are pickles by torch's ForkingPickler. Every global that one may name is in a table, as an exact (module,
name), and stands for code of `allowed_globals` that checks its arguments; nothing is ever imported by name. The machine
that runs the opcodes is `pickle_machine`.

It works in two phases. Unpickling builds descriptions only; when the whole payload has turned out to be sound, its
handles are opened and the descriptions become tensors. A payload that is refused for what it says was never opened.

Neither memory nor time may grow beyond what the payload's bytes and its storages account for: every object is charged
against the memory that the payload may take (`limits.MemoryBudget`) when its opcode is read, again for each copy, and
each time that it is named; and no tensor is larger than its storage.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import reductions

from sgld_lora_merge.errors import RequestError, cut, in_short
from sgld_lora_merge.wire.allowed_globals import find_global
from sgld_lora_merge.wire.described import (
    CudaTensor,
    DescribedEntry,
    DescribedTensor,
    Inline,
    PayloadReader,
    SharedMemory,
    Typed,
    check_extent,
)
from sgld_lora_merge.wire.layout import BucketEntry
from sgld_lora_merge.wire.limits import ENTRY_NBYTES, TENSOR_NBYTES, MemoryBudget
from sgld_lora_merge.wire.pickle_machine import DICT_NBYTES, ENTRY_FIELDS, FIELD_NBYTES, PickleMachine
from sgld_lora_merge.wire.shared_memory import SegmentOpener

_MAX_DEPTH = 6  # of containers in a payload: modules, bucket, list, pair, tensor
_MAX_VIEWS = 4  # bytes of tensors for each byte of storages; more than 1 where tensors are tied


def load(data: bytes, reader: PayloadReader) -> object:
    """Unpickle one payload, then open its handles, which `reader` records.

    Raises:
        RequestError: not a pickle, a global outside the list, arguments that do not make a tensor, a handle that
            cannot be opened. Nothing of the payload was executed.
    """
    try:
        memory = MemoryBudget(len(data))
        described = _PayloadPickle(data, reader, memory).load()
        checked = _walk(described, _Checker(memory), _MAX_DEPTH, _Copies(len(data), memory))
        return _walk(checked, _Opener(reader), _MAX_DEPTH, _Copies(len(data), memory))
    except RequestError:
        raise
    except KeyError as error:
        raise RequestError(f"the payload is not a readable pickle: opcode {error} is not read") from error
    except MemoryError:
        raise RequestError("the payload asks for more memory than there is") from None
    except Exception as error:  # unpickling hostile bytes can end in any exception
        raise RequestError(
            f"the payload is not a readable pickle: {type(error).__name__}: {cut(str(error))}"
        ) from error


class _PayloadPickle(PickleMachine):
    def __init__(self, data: bytes, reader: PayloadReader, memory: MemoryBudget) -> None:
        super().__init__(io.BytesIO(data), memory)
        self._reader = reader

    def find_class(self, module: str, name: str) -> Any:
        return find_global(module, name, self._reader)


# What checking and opening make of it

_LEAVES = (str, bytes, int, float, bool, torch.dtype, type(None))


class _Copies:
    """How many parts a copy of a payload may have, by its bytes, and what they take.

    Containers in each other would have no end. Where nothing is held twice, each part has a byte of its own.
    """

    def __init__(self, parts: int, memory: MemoryBudget) -> None:
        self._left = parts
        self._memory = memory

    def spend(self, nbytes: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise RequestError("the payload's parts hold each other, or are named too often")
        self._memory.spend(nbytes)


def _walk(content: object, leaf: Callable[[object], object], depth: int, copies: _Copies) -> object:
    """Return the content with everything but dicts, lists and tuples replaced by ``leaf`` of it."""
    if type(content) not in (dict, list, tuple):
        copies.spend(8)
        return leaf(content)
    if depth == 0:
        raise RequestError(f"the payload nests more than {_MAX_DEPTH} containers")
    if isinstance(content, dict):
        copies.spend(DICT_NBYTES + FIELD_NBYTES * len(content))
        return {key: _walk(value, leaf, depth - 1, copies) for key, value in content.items()}
    assert isinstance(content, (list, tuple))
    copies.spend(72)
    return type(content)([_walk(value, leaf, depth - 1, copies) for value in content])


class _Checker:
    """Metadata entries whole, descriptions of tensors and plain values as they are."""

    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self._viewed = self._stored = 0  # bytes
        self._seen: dict[int | bytes, int] = {}  # storage -> bytes

    def __call__(self, part: object) -> object:
        if isinstance(part, DescribedEntry):
            if vars(part).keys() != ENTRY_FIELDS:
                raise RequestError(f"bucket metadata has the fields {sorted(vars(part))}, not {sorted(ENTRY_FIELDS)}")
            self._memory.spend(ENTRY_NBYTES)
            return BucketEntry(**vars(part))
        if isinstance(part, DescribedTensor):
            self._viewed += part.nbytes
            self._memory.spend(TENSOR_NBYTES)
            storage = part.typed.storage
            key = storage.handle if isinstance(storage, SharedMemory) else id(part.typed)
            if key not in self._seen:
                self._seen[key] = storage.nbytes
                self._stored += storage.nbytes
            elif self._seen[key] != storage.nbytes:
                raise RequestError(
                    f"{in_short(key)} is named with {storage.nbytes} bytes and with {self._seen[key]}: shared memory "
                    "has one length"
                )
            if self._viewed > _MAX_VIEWS * self._stored:
                raise RequestError(
                    f"the payload's tensors have {self._viewed} bytes, many times those they are views of"
                )
        elif isinstance(part, CudaTensor):
            self._memory.spend(TENSOR_NBYTES)
        elif not isinstance(part, _LEAVES):
            raise RequestError(f"the payload holds a {type(part).__name__}, not tensors")
        return part


class _Opener:
    """Descriptions to tensors; a storage that several tensors view is opened once."""

    def __init__(self, reader: PayloadReader) -> None:
        self._reader = reader
        self._storages: dict[int, torch.storage.TypedStorage] = {}
        self._segments = SegmentOpener(releases=reader.releases)

    def __call__(self, part: object) -> object:
        if isinstance(part, CudaTensor):
            self._reader.opened = True
            return reductions.rebuild_cuda_tensor(*part.arguments)
        if not isinstance(part, DescribedTensor):
            return part
        storage = self._storages.get(id(part.typed))
        if storage is None:
            storage = self._storages[id(part.typed)] = self._open_storage(part.typed)
        nbytes = storage._untyped_storage.nbytes()
        check_extent(part.size, part.stride, part.offset, storage.dtype.itemsize, nbytes)
        return torch._utils._rebuild_tensor(storage, part.offset, part.size, part.stride)

    def _open_storage(self, typed: Typed) -> torch.storage.TypedStorage:
        match typed.storage:
            case SharedMemory(_, handle, nbytes):
                self._segments.check(handle, nbytes)
                self._reader.opened = True
                untyped = self._segments.open(handle, nbytes)
            case Inline(data):
                untyped = torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()
            case _:
                untyped = torch.UntypedStorage(0)
        return torch.storage.TypedStorage(wrap_storage=untyped, dtype=typed.dtype, _internal=True)
