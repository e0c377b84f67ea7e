"""An unpickler that can describe tensors and bucket metadata, and nothing else.

Payloads are pickles by torch's ForkingPickler. Every global that one may name is in a table, as an exact (module,
name), and stands for code of this module that checks its arguments; nothing is ever imported by name. The machine is
Python's own pure-Python one, cut down to the opcodes that such pickles have: the C one crashes on a deeply nested key
and takes gigabytes for a large memo index.

It works in two phases. Unpickling builds descriptions only; when the whole payload has turned out to be sound, its
handles are opened and the descriptions become tensors. A payload that is refused for what it says was never opened.

Neither memory nor time may grow beyond what the payload's bytes and its storages account for: every object is charged
against the memory that the payload may take (`limits.Memory`) when its opcode is read, again for each copy, and each
time that it is named; and no tensor is larger than its storage.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple, NoReturn, cast

import torch
from torch.multiprocessing import reductions

from sgld_lora_merge.errors import RequestError, cut, in_short, name_some, shape_in_short
from sgld_lora_merge.wire.cuda_export import check_export
from sgld_lora_merge.wire.layout import DTYPES, MAX_DIMENSIONS, BucketEntry
from sgld_lora_merge.wire.limits import ENTRY_NBYTES, MOST_OPCODES, TENSOR_NBYTES, Memory
from sgld_lora_merge.wire.shared_memory import SegmentOpener

_MAX_INT = 2**63 - 1
_MAX_DEPTH = 6  # of containers in a payload: modules, bucket, list, pair, tensor
_MAX_VIEWS = 4  # bytes of tensors for each byte of storages; more than 1 where tensors are tied
_MAX_SOCKET_PATH = 107  # bytes, sun_path of a Unix socket without its end
# What torch itself exports, so that no other socket is connected to and no other object is mapped.
_MANAGER = re.compile(rb"(/[^\0]*)?/torch-shm-dir-\w+/manager\.sock")
_HANDLE = re.compile(rb"/torch_\d+_\d+_\d+")


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


def load(data: bytes, reader: PayloadReader) -> object:
    """Unpickle one payload, then open its handles, which `reader` records.

    Raises:
        RequestError: not a pickle, a global outside the list, arguments that do not make a tensor, a handle that
            cannot be opened. Nothing of the payload was executed.
    """
    try:
        memory = Memory(len(data))
        described = _Unpickler(data, reader, memory).load()
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


# What unpickling builds


class _SharedMemory(NamedTuple):
    """A storage that torch's ``file_system`` strategy exported."""

    manager: bytes
    handle: bytes
    nbytes: int


class _Inline(NamedTuple):
    """A storage that travels in the payload itself."""

    data: memoryview

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class _Empty(NamedTuple):
    """A storage of no bytes."""

    nbytes: int = 0


class _Typed(NamedTuple):
    """A storage and the dtype it is read with."""

    storage: _SharedMemory | _Inline | _Empty
    dtype: torch.dtype


class _Tensor(NamedTuple):
    """A view on a storage."""

    typed: _Typed
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.typed.dtype.itemsize


class _CudaTensor(NamedTuple):
    """The 15 arguments of ``rebuild_cuda_tensor``, checked."""

    arguments: tuple[Any, ...]


class _Class(NamedTuple):
    """A class that a payload names as an argument; which one does not matter here."""

    name: str


class _Entry:
    """Stands for ``FlattenedTensorMetadata``, which a pickle makes without arguments and then gives its fields."""


class _Descriptor:
    """Stands for multiprocessing's class of a file descriptor."""


# Opcode -> bytes of memory that it takes at most with CPython 3.11: its object, the object's place on the stack, and
# what containers take to grow. Texts and bytes take their own length besides, and that was sent.
_OPCODES = {
    "PROTO": 0, "STOP": 0, "MARK": 80, "NONE": 9, "NEWTRUE": 9, "NEWFALSE": 9, "BININT": 48, "BININT1": 9,
    "BININT2": 48, "LONG1": 64, "BINFLOAT": 40, "BINBYTES": 64, "SHORT_BINBYTES": 64, "BINBYTES8": 64,
    "EMPTY_DICT": 89, "EMPTY_LIST": 81, "EMPTY_TUPLE": 9, "TUPLE": 64, "TUPLE1": 73, "TUPLE2": 73, "TUPLE3": 81,
    "APPEND": 40, "APPENDS": 40, "GLOBAL": 105, "STACK_GLOBAL": 105, "BINGET": 9, "LONG_BINGET": 9, "BINPUT": 124,
    "LONG_BINPUT": 124, "MEMOIZE": 124,
}  # fmt: skip
_TEXT_OPCODES = {"BINUNICODE": 80, "SHORT_BINUNICODE": 80, "BINUNICODE8": 80}
_CALL_NBYTES = 200  # REDUCE, NEWOBJ: the description of a tensor or a storage, or an entry
_FIELD_NBYTES = 100  # an item of a dict
_DICT_NBYTES = 240  # of a dict that has an item
_PART_NBYTES = 24  # a part of a sequence that a call copies
_STREAM_NBYTES = 2**16  # all that the pickles in front of an inline storage may take


def _code(name: str) -> int:
    return cast(int, getattr(pickle, name)[0])


def _strict_text(opcode: Callable[[Any], None]) -> Callable[[Any], None]:
    """The opcode, but for lone surrogates, with which no answer could name the text."""

    def read(unpickler: _Unpickler) -> None:
        opcode(unpickler)
        unpickler.stack[-1].encode()

    return read


class _Unpickler(pickle._Unpickler):
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, reader: PayloadReader, memory: Memory) -> None:
        file = io.BytesIO(data)
        super().__init__(file)
        self._file = file
        self._memory = memory
        self._cuda_tensor = functools.partial(_cuda_tensor, reader)

    def load(self) -> Any:
        """Run the opcodes, each of which is charged before it is run.

        Frames are not kept apart: their bytes follow each other in the payload, which is in memory.
        """
        self.read, self.readline = self._file.read, self._file.readline
        self.metastack: list[Any] = []
        self.stack = []
        self.append = self.stack.append
        self.proto = 0
        dispatch, costs, memory, read = self.dispatch, _COSTS, self._memory, self._file.read
        try:
            for _ in range(MOST_OPCODES):
                if not (key := read(1)):
                    raise EOFError("it ends without STOP")
                opcode = key[0]
                memory.left -= costs[opcode]
                if memory.left < 0:
                    raise memory.exceeded()
                dispatch[opcode](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]  # as Python's own loop ends
            return stop.value
        raise RequestError(f"the payload has more than {MOST_OPCODES} opcodes")

    def _skip_frame(self) -> None:
        """FRAME: its length tells nothing that is needed."""
        self.read(8)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CUDA_EXPORTS:
            return self._cuda_tensor
        found = _ALLOWED.get((module, name))
        if found is None:
            raise RequestError(f"the payload names {module}.{name}, which is outside the allow-list")
        return found

    def _call(self) -> None:
        """REDUCE: what the call may copy is paid for."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple:
            raise RequestError("the payload calls something without a tuple of arguments")
        for part in arguments:
            if type(part) in (str, bytes):
                self._memory.spend(len(part))
            elif type(part) in (tuple, list):
                self._memory.spend(_PART_NBYTES * len(part))
        made = function(*arguments)
        if type(made) is dict:
            self._memory.spend(_DICT_NBYTES + _FIELD_NBYTES * len(made))
        elif type(made) is _Tensor:
            self._memory.spend(2 * _PART_NBYTES * len(made.size))
        self.append(made)

    def _make(self) -> None:
        """NEWOBJ: of a class, only the two that pickles of ours and of sglang's instantiate."""
        arguments, cls = self.stack.pop(), self.stack.pop()
        if cls is _Descriptor:
            _rebuild_storage_fd()
        if cls is not _Entry or arguments != ():
            raise RequestError("the payload makes an object of another class than FlattenedTensorMetadata")
        self.append(_Entry())

    def _give_fields(self) -> None:
        """BUILD: the fields of one metadata entry, and no state of anything else."""
        state, entry = self.stack.pop(), self.stack[-1]
        if type(entry) is not _Entry or type(state) is not dict:
            raise RequestError(f"the payload sets attributes of a {type(entry).__name__}")
        if unknown := sorted(state.keys() - _ENTRY_FIELDS):
            raise RequestError(f"bucket metadata has fields that are unknown: {name_some(unknown)}")
        self._memory.spend(_DICT_NBYTES)
        vars(entry).update(state)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or not all(type(key) is str for key in items[::2]):
            raise RequestError("a dict in the payload has keys that are not names")
        self._memory.spend((0 if target else _DICT_NBYTES) + _FIELD_NBYTES * (len(items) // 2))
        target.update(zip(items[::2], items[1::2], strict=True))

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _set_marked_items(self) -> None:
        self._set_items(self.pop_mark())

    dispatch: ClassVar[dict[int, Callable[..., Any]]] = {
        **{code: pickle._Unpickler.dispatch[code] for code in map(_code, _OPCODES)},
        **{code: _strict_text(pickle._Unpickler.dispatch[code]) for code in map(_code, _TEXT_OPCODES)},
        pickle.FRAME[0]: _skip_frame,
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _make,
        pickle.BUILD[0]: _give_fields,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_marked_items,
    }


_COSTS = [0] * 256
for _name, _cost in (_OPCODES | _TEXT_OPCODES).items():
    _COSTS[_code(_name)] = _cost
for _code_called in (pickle.REDUCE[0], pickle.NEWOBJ[0], pickle.BINPERSID[0]):
    _COSTS[_code_called] = _CALL_NBYTES


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INT:
        raise RequestError(f"{in_short(value)} is not a size")
    return value


def _dtype(value: object) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise RequestError(f"{in_short(value)} is not a dtype")
    return value


def _size(value: object = ()) -> tuple[int, ...]:
    if type(value) not in (tuple, list):
        raise RequestError(f"{in_short(value)} is not a shape")
    if len(value) > MAX_DIMENSIONS:  # type: ignore[arg-type]
        raise RequestError(f"a shape has {len(value)} dimensions, torch has at most {MAX_DIMENSIONS}")  # type: ignore[arg-type]
    return tuple(_count(item) for item in value)  # type: ignore[attr-defined]


def _check_extent(size: tuple[int, ...], stride: tuple[int, ...], offset: int, itemsize: int, nbytes: int) -> None:
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


def _cuda_tensor(reader: PayloadReader, *arguments: object) -> _CudaTensor:
    """A CUDA IPC export; slot 6 holds the exporting GPU's UUID, or an index on a machine of one GPU."""
    if reader.shared:
        raise RequestError(
            "one CUDA payload for several workers: an IPC export may be opened once, so send one payload per rank in "
            "serialized_named_tensors"
        )
    if len(arguments) != 15:
        raise RequestError(f"rebuild_cuda_tensor takes 15 arguments, the payload gives {len(arguments)}")
    _, size, stride, offset, _, dtype, device, handle, nbytes, storage_offset, _, *event = arguments
    size, stride, offset, dtype = _size(size), _size(stride), _count(offset), _dtype(dtype)
    _check_extent(size, stride, offset, dtype.itemsize, _count(nbytes))
    index = reader.device_index(device) if isinstance(device, str) else _count(device)
    check_export(handle, _count(nbytes), _count(storage_offset), *event)
    # torch's own function reads them, with classes of our choosing
    return _CudaTensor(
        (torch.Tensor, size, stride, offset, torch.storage.TypedStorage, dtype, index, handle, nbytes,
         storage_offset, False, *event)
    )  # fmt: skip


def _shared_memory(_: object, manager: object, handle: object, nbytes: object, *__: object) -> _SharedMemory:
    if not isinstance(manager, bytes) or not isinstance(handle, bytes):
        raise RequestError("rebuild_storage_filename takes names as bytes")
    if len(manager) > _MAX_SOCKET_PATH or len(handle) > _MAX_SOCKET_PATH:
        raise RequestError("rebuild_storage_filename takes names of at most 107 bytes")
    if _MANAGER.fullmatch(manager) is None or _HANDLE.fullmatch(handle) is None:
        raise RequestError(
            f"{in_short(manager)} and {in_short(handle)} are not names of shared memory that torch exports"
        )
    return _SharedMemory(manager, handle, _count(nbytes))


def _tensor_on(typed: object, offset: object, size: object, stride: object) -> _Tensor:
    if not isinstance(typed, _Typed):
        raise RequestError(f"a tensor needs a typed storage, not {type(typed).__name__}")
    tensor = _Tensor(typed, _count(offset), _size(size), _size(stride))
    _check_extent(tensor.size, tensor.stride, tensor.offset, typed.dtype.itemsize, typed.storage.nbytes)
    return tensor


def _rebuild_tensor(_: object, typed: object, metadata: object) -> _Tensor:
    if type(metadata) is not tuple or len(metadata) != 4:
        raise RequestError("rebuild_tensor takes (offset, size, stride, requires_grad)")
    return _tensor_on(typed, *metadata[:3])


def _rebuild_tensor_v2(typed: object, offset: object, size: object, stride: object, *_: object) -> _Tensor:
    return _tensor_on(typed, offset, size, stride)


def _rebuild_parameter(data: object, *_: object) -> _Tensor | _CudaTensor:
    if not isinstance(data, (_Tensor, _CudaTensor)):
        raise RequestError(f"a parameter needs a tensor, not {type(data).__name__}")
    return data


def _rebuild_typed_storage(storage: object, dtype: object) -> _Typed:
    if not isinstance(storage, (_SharedMemory, _Empty)):
        raise RequestError(f"a typed storage needs an untyped one, not {type(storage).__name__}")
    return _Typed(storage, _dtype(dtype))


def _rebuild_storage_empty(_: object) -> _Empty:
    return _Empty()


def _rebuild_storage_fd(*_: object) -> NoReturn:
    raise RequestError(
        "the payload shares memory by file descriptor, which an unrelated process cannot open: send with "
        'torch.multiprocessing.set_sharing_strategy("file_system")'
    )


class _StorageStream(_Unpickler):
    """The pickles in front of an inline storage's bytes; what they say of it is a persistent id."""

    def __init__(self, stream: io.BytesIO) -> None:
        super(_Unpickler, self).__init__(stream)
        self._file = stream
        self._memory = Memory(0, _STREAM_NBYTES)

    def find_class(self, module: str, name: str) -> Any:
        dtype = _STORAGES.get((module, name))
        if dtype is None:
            raise RequestError(f"an inline storage names {module}.{name}, which is outside the allow-list")
        return dtype

    def _keep_id(self) -> None:
        """BINPERSID: the id is all there is."""

    dispatch: ClassVar[dict[int, Callable[..., Any]]] = {**_Unpickler.dispatch, pickle.BINPERSID[0]: _keep_id}


def _load_from_bytes(data: object) -> _Typed:
    """A storage in the format of `torch.save` that storages are pickled in: five pickles, a count, the bytes.

    Read here and not by `torch.load`, which also reads compressed archives and allocates what a stream claims.
    """
    if not isinstance(data, bytes):
        raise RequestError("an inline storage needs bytes")
    if not data.startswith(_STREAM_START):
        raise RequestError("an inline storage is not in the format that torch pickles storages in")
    stream = io.BytesIO(data)
    _, _, _, described, keys = (_StorageStream(stream).load() for _ in range(5))
    if type(described) is not tuple or len(described) != 6 or described[0] != "storage" or keys != [described[2]]:
        raise RequestError("an inline storage is expected, and one alone")
    dtype, own = _dtype(described[1]), memoryview(data)[stream.tell() + 8 :]
    if int.from_bytes(stream.read(8), "little") * dtype.itemsize != own.nbytes or own.nbytes == 0:
        raise RequestError(f"an inline storage of {dtype} has {own.nbytes} bytes, and says that it has others")
    return _Typed(_Inline(own), dtype)


def _ordered(items: object = ()) -> dict[str, Any]:
    if type(items) not in (list, tuple):
        raise RequestError("an ordered dict is made of a list of items")
    if not all(type(item) in (list, tuple) and len(item) == 2 and type(item[0]) is str for item in items):  # type: ignore[attr-defined]
        raise RequestError("a dict in the payload has keys that are not names")
    return dict(items)  # type: ignore[call-overload, no-any-return]


def _encode(text: object, encoding: object) -> bytes:
    """How pickle protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise RequestError("only latin1 bytes are read")
    return text.encode("latin1")


def _no_bytes(*arguments: object) -> bytes:
    """How pickle protocol 2 writes bytes of no length."""
    if arguments:
        raise RequestError("bytes from arguments are not read")
    return b""


_STREAM_START = pickle.dumps(torch.serialization.MAGIC_NUMBER, 2) + pickle.dumps(
    torch.serialization.PROTOCOL_VERSION, 2
)
_STORAGES = {
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "BoolStorage"): torch.bool,
    ("torch", "ByteStorage"): torch.uint8,
    ("torch", "CharStorage"): torch.int8,
    ("torch", "ComplexDoubleStorage"): torch.complex128,
    ("torch", "ComplexFloatStorage"): torch.complex64,
    ("torch", "DoubleStorage"): torch.float64,
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "IntStorage"): torch.int32,
    ("torch", "LongStorage"): torch.int64,
    ("torch", "ShortStorage"): torch.int16,
}

_CUDA_EXPORTS = {
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"),
}

_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch", "Tensor"): _Class("torch.Tensor"),
    ("torch.nn.parameter", "Parameter"): _Class("torch.nn.Parameter"),
    ("torch", "Size"): _size,
    ("torch.storage", "TypedStorage"): _Class("torch.TypedStorage"),
    ("torch.storage", "UntypedStorage"): _Class("torch.UntypedStorage"),
    ("torch", "UntypedStorage"): _Class("torch.UntypedStorage"),
    ("torch.storage", "_load_from_bytes"): _load_from_bytes,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.multiprocessing.reductions", "rebuild_tensor"): _rebuild_tensor,
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"): _rebuild_typed_storage,
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"): _shared_memory,
    ("torch.multiprocessing.reductions", "rebuild_storage_empty"): _rebuild_storage_empty,
    ("torch.multiprocessing.reductions", "rebuild_storage_fd"): _rebuild_storage_fd,
    ("multiprocessing.resource_sharer", "DupFd"): _Descriptor,
    ("collections", "OrderedDict"): _ordered,
    ("_codecs", "encode"): _encode,
    ("builtins", "bytes"): _no_bytes,
    ("__builtin__", "bytes"): _no_bytes,  # as protocol 2 spells it
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): _Entry,
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}


# What checking and opening make of it

_LEAVES = (str, bytes, int, float, bool, torch.dtype, type(None))
_ENTRY_FIELDS = {field.name for field in fields(BucketEntry)}


class _Copies:
    """How many parts a copy of a payload may have, by its bytes, and what they take.

    Containers in each other would have no end. Where nothing is held twice, each part has a byte of its own.
    """

    def __init__(self, parts: int, memory: Memory) -> None:
        self._left = parts
        self._memory = memory

    def spend(self, nbytes: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise RequestError("the payload's parts hold each other, or are named too often")
        self._memory.spend(nbytes)


def _walk(content: object, leaf: Callable[[object], object], depth: int, copies: _Copies) -> object:
    """The content with everything but dicts, lists and tuples replaced by ``leaf`` of it."""
    if type(content) not in (dict, list, tuple):
        copies.spend(8)
        return leaf(content)
    if depth == 0:
        raise RequestError(f"the payload nests more than {_MAX_DEPTH} containers")
    if isinstance(content, dict):
        copies.spend(_DICT_NBYTES + _FIELD_NBYTES * len(content))
        return {key: _walk(value, leaf, depth - 1, copies) for key, value in content.items()}
    assert isinstance(content, (list, tuple))
    copies.spend(72)
    return type(content)([_walk(value, leaf, depth - 1, copies) for value in content])


class _Checker:
    """Metadata entries whole, descriptions of tensors and plain values as they are."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._viewed = self._stored = 0  # bytes
        self._seen: dict[int | bytes, int] = {}  # storage -> bytes

    def __call__(self, part: object) -> object:
        if isinstance(part, _Entry):
            if vars(part).keys() != _ENTRY_FIELDS:
                raise RequestError(f"bucket metadata has the fields {sorted(vars(part))}, not {sorted(_ENTRY_FIELDS)}")
            self._memory.spend(ENTRY_NBYTES)
            return BucketEntry(**vars(part))
        if isinstance(part, _Tensor):
            self._viewed += part.nbytes
            self._memory.spend(TENSOR_NBYTES)
            storage = part.typed.storage
            key = storage.handle if isinstance(storage, _SharedMemory) else id(part.typed)
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
        elif isinstance(part, _CudaTensor):
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
        if isinstance(part, _CudaTensor):
            self._reader.opened = True
            return reductions.rebuild_cuda_tensor(*part.arguments)
        if not isinstance(part, _Tensor):
            return part
        storage = self._storages.get(id(part.typed))
        if storage is None:
            storage = self._storages[id(part.typed)] = self._open_storage(part.typed)
        nbytes = storage._untyped_storage.nbytes()
        _check_extent(part.size, part.stride, part.offset, storage.dtype.itemsize, nbytes)
        return torch._utils._rebuild_tensor(storage, part.offset, part.size, part.stride)

    def _open_storage(self, typed: _Typed) -> torch.storage.TypedStorage:
        match typed.storage:
            case _SharedMemory():
                self._segments.check(*typed.storage)
                self._reader.opened = True
                untyped = self._segments.open(*typed.storage)
            case _Inline(data):
                untyped = torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()
            case _:
                untyped = torch.UntypedStorage(0)
        return torch.storage.TypedStorage(wrap_storage=untyped, dtype=typed.dtype, _internal=True)
