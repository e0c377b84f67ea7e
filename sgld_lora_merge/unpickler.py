"""An unpickler that can build tensors and bucket metadata, and nothing else.

Payloads are pickles by torch's ForkingPickler. Every global that one may name is in `_ALLOWED`, as an exact (module,
name), and stands for code of this module that checks its arguments; nothing is ever imported by name. What the table
hands to the pickle machine is sealed: its BUILD opcode sets attributes on any object, and must not reach a torch class.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.multiprocessing import reductions

from sgld_lora_merge.bucket import BucketEntry
from sgld_lora_merge.errors import RequestError

_TENSOR, _PARAMETER, _TYPED, _UNTYPED = "torch.Tensor", "torch.nn.Parameter", "TypedStorage", "UntypedStorage"
_MAX_INT = 2**63 - 1


def load(data: bytes, reader: PayloadReader) -> object:
    """Unpickle one payload; handles in it are opened, which `reader` records.

    Raises:
        RequestError: not a pickle, a global outside the list, arguments that do not make a tensor, a handle that
            cannot be opened. Nothing of the payload was executed.
    """
    try:
        return _Unpickler(io.BytesIO(data), reader).load()
    except RequestError:
        raise
    except MemoryError:
        raise RequestError("the payload asks for more memory than there is") from None
    except Exception as error:  # unpickling hostile bytes can end in any exception
        raise RequestError(f"the payload is not a readable pickle: {type(error).__name__}: {error}") from error


class PayloadReader:
    """How handles are opened on this worker, and whether one was.

    Args:
        device_index: physical GPU UUID -> index of the device in this process; raises `RequestError` if there is none.
        shared: other workers read the same payload, so that an export which may be opened once must not be in it.
    """

    def __init__(self, device_index: Callable[[str], int], *, shared: bool = False) -> None:
        self.opened = False
        self._device_index = device_index
        self._shared = shared

    def rebuild_cuda_tensor(self, *args: Any) -> torch.Tensor:
        """Open a CUDA IPC export; slot 6 holds the exporting GPU's UUID, or an index on a machine of one GPU."""
        if self._shared:
            raise RequestError(
                "one CUDA payload for several workers: an IPC export may be opened once, so send one payload per rank "
                "in serialized_named_tensors"
            )
        if len(args) != 15:
            raise RequestError(f"rebuild_cuda_tensor takes 15 arguments, the payload gives {len(args)}")
        _, size, stride, offset, _, dtype, device, handle, nbytes, *_ = args
        size, stride, offset = _extent(size, stride, offset, _dtype(dtype).itemsize, _count(nbytes))
        index = self._device_index(device) if isinstance(device, str) else _count(device)
        self.opened = True
        # torch's own function, with classes of our choosing
        arguments = (torch.Tensor, size, stride, offset, torch.storage.TypedStorage, dtype, index, handle, nbytes,
                     args[9], False, *args[11:])  # fmt: skip
        tensor: torch.Tensor = reductions.rebuild_cuda_tensor(*arguments)
        return tensor

    def rebuild_storage_filename(
        self, kind: object, manager: object, handle: object, nbytes: object, dtype: object = None
    ) -> torch.UntypedStorage:
        """Open shared memory that torch's ``file_system`` strategy exported."""
        if not isinstance(manager, bytes) or not isinstance(handle, bytes):
            raise RequestError("rebuild_storage_filename takes names as bytes")
        self.opened = True
        storage: torch.UntypedStorage = reductions.rebuild_storage_filename(
            torch.UntypedStorage, manager, handle, _count(nbytes)
        )
        return storage


class _Sealed:
    """A callable whose attributes a pickle cannot set."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise RequestError(f"the payload sets the attribute {name!r} of a function")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, reader: PayloadReader) -> None:
        super().__init__(file)
        self._opening = {
            ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): _Sealed(reader.rebuild_cuda_tensor),
            ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): _Sealed(reader.rebuild_cuda_tensor),
            ("torch.multiprocessing.reductions", "rebuild_storage_filename"): _Sealed(reader.rebuild_storage_filename),
        }

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        found = self._opening.get(key) or _ALLOWED.get(key)
        if found is None:
            raise RequestError(f"the payload names {module}.{name}, which is outside the allow-list")
        return found


# What the list stands for


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INT:
        raise RequestError(f"{value!r} is not a size")
    return value


def _dtype(value: object) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise RequestError(f"{value!r} is not a dtype")
    return value


def _size(value: object = ()) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)):
        raise RequestError(f"{value!r} is not a shape")
    return tuple(_count(item) for item in value)


def _extent(
    size: object, stride: object, offset: object, itemsize: int, nbytes: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, stride and offset that stay inside a storage; torch would grow the storage instead."""
    sizes, strides, first = _size(size), _size(stride), _count(offset)
    if len(sizes) != len(strides):
        raise RequestError(f"shape {sizes} and stride {strides} differ in length")
    last = first + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) if all(sizes) else first - 1
    if (last + 1) * itemsize > nbytes:
        raise RequestError(
            f"shape {sizes} at offset {first} needs {(last + 1) * itemsize} bytes, its storage has {nbytes}"
        )
    return sizes, strides, first


def _tensor_on(storage: object, offset: object, size: object, stride: object) -> torch.Tensor:
    if not isinstance(storage, torch.storage.TypedStorage):
        raise RequestError(f"a tensor needs a typed storage, not {type(storage).__name__}")
    sizes, strides, first = _extent(size, stride, offset, storage.dtype.itemsize, storage._untyped_storage.nbytes())
    tensor: torch.Tensor = torch._utils._rebuild_tensor(storage, first, sizes, strides)
    return tensor


def _rebuild_tensor(cls: object, storage: object, metadata: object) -> torch.Tensor:
    if not isinstance(metadata, tuple) or len(metadata) != 4:
        raise RequestError("rebuild_tensor takes (offset, size, stride, requires_grad)")
    offset, size, stride, _ = metadata
    return _tensor_on(storage, offset, size, stride)


def _rebuild_tensor_v2(storage: object, offset: object, size: object, stride: object, *_: object) -> torch.Tensor:
    return _tensor_on(storage, offset, size, stride)


def _rebuild_parameter(data: object, *_: object) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        raise RequestError(f"a parameter needs a tensor, not {type(data).__name__}")
    return data


def _rebuild_typed_storage(storage: object, dtype: object) -> torch.storage.TypedStorage:
    if not isinstance(storage, torch.UntypedStorage):
        raise RequestError(f"a typed storage needs an untyped one, not {type(storage).__name__}")
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=_dtype(dtype), _internal=True)


def _rebuild_storage_empty(_: object) -> torch.UntypedStorage:
    return torch.UntypedStorage(0)


def _rebuild_storage_fd(*_: object) -> NoReturn:
    raise RequestError(
        "the payload shares memory by file descriptor, which an unrelated process cannot open: send with "
        'torch.multiprocessing.set_sharing_strategy("file_system")'
    )


def _load_storage(data: object) -> torch.storage.TypedStorage:
    """A storage sent inline; torch's own helper would unpickle without limits."""
    if not isinstance(data, bytes):
        raise RequestError("an inline storage needs bytes")
    storage = torch.load(io.BytesIO(data), weights_only=True)
    if not isinstance(storage, torch.storage.TypedStorage):
        raise RequestError(f"an inline storage is expected, not {type(storage).__name__}")
    return storage


def _ordered(items: object = ()) -> dict[Any, Any]:
    if not isinstance(items, (list, tuple)):
        raise RequestError("an ordered dict is made of a list of items")
    return dict(items)


def _encode(text: object, encoding: object) -> bytes:
    """How pickle protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise RequestError("only latin1 bytes are read")
    return text.encode("latin1")


def _bytes(*args: object) -> bytes:
    if args:
        raise RequestError("bytes from arguments are not read")
    return b""


_DTYPE_NAMES = (
    "bfloat16", "bool", "complex64", "complex128", "float16", "float32", "float64", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int8", "int16", "int32", "int64", "uint8", "uint16",
    "uint32", "uint64",
)  # fmt: skip

_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch", "Tensor"): _TENSOR,
    ("torch.nn.parameter", "Parameter"): _PARAMETER,
    ("torch", "Size"): _Sealed(_size),
    ("torch.storage", "TypedStorage"): _TYPED,
    ("torch.storage", "UntypedStorage"): _UNTYPED,
    ("torch", "UntypedStorage"): _UNTYPED,
    ("torch.storage", "_load_from_bytes"): _Sealed(_load_storage),
    ("torch._utils", "_rebuild_tensor_v2"): _Sealed(_rebuild_tensor_v2),
    ("torch._utils", "_rebuild_parameter"): _Sealed(_rebuild_parameter),
    ("torch.multiprocessing.reductions", "rebuild_tensor"): _Sealed(_rebuild_tensor),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"): _Sealed(_rebuild_typed_storage),
    ("torch.multiprocessing.reductions", "rebuild_storage_empty"): _Sealed(_rebuild_storage_empty),
    ("torch.multiprocessing.reductions", "rebuild_storage_fd"): _Sealed(_rebuild_storage_fd),
    ("multiprocessing.resource_sharer", "DupFd"): _Sealed(_rebuild_storage_fd),
    ("collections", "OrderedDict"): _Sealed(_ordered),
    ("_codecs", "encode"): _Sealed(_encode),
    ("builtins", "bytes"): _Sealed(_bytes),
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): BucketEntry,
    **{("torch", name): getattr(torch, name) for name in _DTYPE_NAMES},
}
