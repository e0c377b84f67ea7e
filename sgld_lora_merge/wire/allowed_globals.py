"""The allow-list: every global that a payload may name, and the code of ours that stands for it.

Nothing is imported by name. Each function checks its arguments and returns a description; it opens nothing.
"""

from __future__ import annotations

import functools
import io
import pickle
import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from sgld_lora_merge.errors import RequestError, in_short
from sgld_lora_merge.wire.cuda_export import check_export
from sgld_lora_merge.wire.described import (
    CudaTensor,
    DescribedEntry,
    DescribedTensor,
    Empty,
    FileDescriptor,
    Inline,
    NamedClass,
    PayloadReader,
    SharedMemory,
    Typed,
    check_extent,
    refuse_file_descriptor,
)
from sgld_lora_merge.wire.layout import DTYPES, MAX_DIMENSIONS
from sgld_lora_merge.wire.limits import MemoryBudget
from sgld_lora_merge.wire.pickle_machine import PickleMachine

_MAX_INT = 2**63 - 1
_MAX_SOCKET_PATH = 107  # bytes, sun_path of a Unix socket without its end
# What torch itself exports, so that no other socket is connected to and no other object is mapped.
_MANAGER = re.compile(rb"(/[^\0]*)?/torch-shm-dir-\w+/manager\.sock")
_HANDLE = re.compile(rb"/torch_\d+_\d+_\d+")
_STREAM_NBYTES = 2**16  # all that the pickles in front of an inline storage may take


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


def _cuda_tensor(reader: PayloadReader, *arguments: object) -> CudaTensor:
    """Return a CUDA IPC export; slot 6 holds the exporting GPU's UUID, or an index on a machine of one GPU."""
    if reader.shared:
        raise RequestError(
            "one CUDA payload for several workers: an IPC export may be opened once, so send one payload per rank in "
            "serialized_named_tensors"
        )
    if len(arguments) != 15:
        raise RequestError(f"rebuild_cuda_tensor takes 15 arguments, the payload gives {len(arguments)}")
    _, size, stride, offset, _, dtype, device, handle, nbytes, storage_offset, _, *event = arguments
    size, stride, offset, dtype = _size(size), _size(stride), _count(offset), _dtype(dtype)
    check_extent(size, stride, offset, dtype.itemsize, _count(nbytes))
    index = reader.device_index(device) if isinstance(device, str) else _count(device)
    check_export(handle, _count(nbytes), _count(storage_offset), *event)
    # torch's own function reads them, with classes of our choosing
    return CudaTensor(
        (torch.Tensor, size, stride, offset, torch.storage.TypedStorage, dtype, index, handle, nbytes,
         storage_offset, False, *event)
    )  # fmt: skip


def _shared_memory(_: object, manager: object, handle: object, nbytes: object, *__: object) -> SharedMemory:
    if not isinstance(manager, bytes) or not isinstance(handle, bytes):
        raise RequestError("rebuild_storage_filename takes names as bytes")
    if len(manager) > _MAX_SOCKET_PATH or len(handle) > _MAX_SOCKET_PATH:
        raise RequestError("rebuild_storage_filename takes names of at most 107 bytes")
    if _MANAGER.fullmatch(manager) is None or _HANDLE.fullmatch(handle) is None:
        raise RequestError(
            f"{in_short(manager)} and {in_short(handle)} are not names of shared memory that torch exports"
        )
    return SharedMemory(manager, handle, _count(nbytes))


def _tensor_on(typed: object, offset: object, size: object, stride: object) -> DescribedTensor:
    if not isinstance(typed, Typed):
        raise RequestError(f"a tensor needs a typed storage, not {type(typed).__name__}")
    tensor = DescribedTensor(typed, _count(offset), _size(size), _size(stride))
    check_extent(tensor.size, tensor.stride, tensor.offset, typed.dtype.itemsize, typed.storage.nbytes)
    return tensor


def _rebuild_tensor(_: object, typed: object, metadata: object) -> DescribedTensor:
    if type(metadata) is not tuple or len(metadata) != 4:
        raise RequestError("rebuild_tensor takes (offset, size, stride, requires_grad)")
    return _tensor_on(typed, *metadata[:3])


def _rebuild_tensor_v2(typed: object, offset: object, size: object, stride: object, *_: object) -> DescribedTensor:
    return _tensor_on(typed, offset, size, stride)


def _rebuild_parameter(data: object, *_: object) -> DescribedTensor | CudaTensor:
    if not isinstance(data, (DescribedTensor, CudaTensor)):
        raise RequestError(f"a parameter needs a tensor, not {type(data).__name__}")
    return data


def _rebuild_typed_storage(storage: object, dtype: object) -> Typed:
    if not isinstance(storage, (SharedMemory, Empty)):
        raise RequestError(f"a typed storage needs an untyped one, not {type(storage).__name__}")
    return Typed(storage, _dtype(dtype))


def _rebuild_storage_empty(_: object) -> Empty:
    return Empty()


class _StorageStream(PickleMachine):
    """The pickles in front of an inline storage's bytes; what they say of it is a persistent id."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, MemoryBudget(0, _STREAM_NBYTES))

    def find_class(self, module: str, name: str) -> Any:
        dtype = _STORAGES.get((module, name))
        if dtype is None:
            raise RequestError(f"an inline storage names {module}.{name}, which is outside the allow-list")
        return dtype

    def _keep_id(self) -> None:
        """Run BINPERSID: the id is all there is."""

    dispatch: ClassVar[dict[int, Callable[..., Any]]] = {**PickleMachine.dispatch, pickle.BINPERSID[0]: _keep_id}


def _load_from_bytes(data: object) -> Typed:
    """Return a storage in the format of `torch.save` that storages are pickled in: five pickles, a count, the bytes.

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
    return Typed(Inline(own), dtype)


def _ordered(items: object = ()) -> dict[str, Any]:
    if type(items) not in (list, tuple):
        raise RequestError("an ordered dict is made of a list of items")
    if not all(type(item) in (list, tuple) and len(item) == 2 and type(item[0]) is str for item in items):  # type: ignore[attr-defined]
        raise RequestError("a dict in the payload has keys that are not names")
    return dict(items)  # type: ignore[call-overload, no-any-return]


def _encode(text: object, encoding: object) -> bytes:
    """Make bytes as pickle protocol 2 writes them."""
    if not isinstance(text, str) or encoding != "latin1":
        raise RequestError("only latin1 bytes are read")
    return text.encode("latin1")


def _no_bytes(*arguments: object) -> bytes:
    """Make bytes of no length, as pickle protocol 2 writes them."""
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
    ("torch", "Tensor"): NamedClass("torch.Tensor"),
    ("torch.nn.parameter", "Parameter"): NamedClass("torch.nn.Parameter"),
    ("torch", "Size"): _size,
    ("torch.storage", "TypedStorage"): NamedClass("torch.TypedStorage"),
    ("torch.storage", "UntypedStorage"): NamedClass("torch.UntypedStorage"),
    ("torch", "UntypedStorage"): NamedClass("torch.UntypedStorage"),
    ("torch.storage", "_load_from_bytes"): _load_from_bytes,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.multiprocessing.reductions", "rebuild_tensor"): _rebuild_tensor,
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"): _rebuild_typed_storage,
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"): _shared_memory,
    ("torch.multiprocessing.reductions", "rebuild_storage_empty"): _rebuild_storage_empty,
    ("torch.multiprocessing.reductions", "rebuild_storage_fd"): refuse_file_descriptor,
    ("multiprocessing.resource_sharer", "DupFd"): FileDescriptor,
    ("collections", "OrderedDict"): _ordered,
    ("_codecs", "encode"): _encode,
    ("builtins", "bytes"): _no_bytes,
    ("__builtin__", "bytes"): _no_bytes,  # as protocol 2 spells it
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): DescribedEntry,
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}


def find_global(module: str, name: str, reader: PayloadReader) -> Any:
    """Return what stands for a global that a payload names.

    Raises:
        RequestError: it is not in the list.
    """
    if (module, name) in _CUDA_EXPORTS:
        return functools.partial(_cuda_tensor, reader)
    found = _ALLOWED.get((module, name))
    if found is None:
        raise RequestError(f"the payload names {module}.{name}, which is outside the allow-list")
    return found
