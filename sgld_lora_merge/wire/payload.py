"""Payloads: what one rank of the engine reads of one request.

A payload is base64 of a pickle of ``{module: {"flattened_tensor": uint8 tensor, "metadata": [...]}}`` (a bucket; this
plugin's engines also read ``"layout": text`` in place of the metadata) or of ``{module: [(name, tensor)]}``. Tensors
travel as handles: CUDA IPC with the GPU's UUID, or shared memory on a CPU.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import copyreg
import io
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing import reductions

from sgld_lora_merge.errors import Faults, RequestError, cut, in_short, name_some
from sgld_lora_merge.wire.bucket import flatten, unflatten
from sgld_lora_merge.wire.described import PayloadReader
from sgld_lora_merge.wire.layout import BucketEntry, layout_text, read_layout
from sgld_lora_merge.wire.limits import check_name
from sgld_lora_merge.wire.unpickler import load

FLATTENED_BUCKET = "flattened_bucket"
NamedTensors = Sequence[tuple[str, torch.Tensor]]

# How both sides name a bucket entry on the wire. A stock engine knows sglang's class only; a trainer need not have it.
_SGLANG_ENTRY = b"csglang.srt.weight_sync.tensor_bucket\nFlattenedTensorMetadata\n"
_OUR_ENTRY = b"c" + BucketEntry.__module__.encode() + b"\nBucketEntry\n"
_UUID_SLOT = 6  # of rebuild_cuda_tensor's arguments; sglang's convention too
_COUNTER = slice(11, 13)  # there: the counter of readers that an export has


# sending


def pack(
    modules: Mapping[str, Iterable[tuple[str, torch.Tensor]]], *, compact: bool = False
) -> tuple[str, list[torch.Tensor]]:
    """Flatten each module's tensors into a bucket and export the buckets as handles.

    Args:
        modules: module name -> named tensors, on one device each.
        compact: write the layout as text, which is faster to read; a stock engine cannot read it.

    Returns:
        The base64 payload, and the buckets: keep them until every worker of the engine has answered. An export may be
        opened once, so one payload serves one worker (on a CPU, all workers).
    """
    buckets = {module: flatten(named) for module, named in modules.items()}
    content = {
        module: {"flattened_tensor": flat, **({"layout": layout_text(entries)} if compact else {"metadata": entries})}
        for module, (flat, entries) in buckets.items()
    }
    return encode(content), [flat for flat, _ in buckets.values()]


def encode(content: object) -> str:
    """Encode a pickle with tensors as handles, in base64. CPU tensors are moved into shared memory, in place."""
    buffer = io.BytesIO()
    # protocol 2 writes a class as plain text, once: the only place where sglang's name has to stand
    pickler = pickle.Pickler(buffer, protocol=2)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(content)
    return base64.b64encode(buffer.getvalue().replace(_OUR_ENTRY, _SGLANG_ENTRY, 1)).decode()


def withdraw(payload: str, buffers: Iterable[torch.Tensor]) -> None:
    """Take back an export that no worker has opened, or its memory would never be free; nobody may open it later.

    Args:
        payload, buffers: as `pack` made them.
    """
    for buffer in buffers:
        if buffer.device.type == "cpu":
            buffer.untyped_storage()._shared_decref()
    exports = _OwnExports(io.BytesIO(base64.b64decode(payload)))
    exports.load()
    for arguments in exports.found:
        device, (handle, offset) = arguments[_UUID_SLOT], arguments[_COUNTER]
        torch.UntypedStorage._release_ipc_counter(
            handle, offset, device=torch.device("cuda", cuda_device_index(device))
        )


class _OwnExports(pickle.Unpickler):
    """Reads a payload that this process made, for the arguments of its CUDA exports; it opens nothing."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.found: list[tuple[Any, ...]] = []

    def find_class(self, module: str, name: str) -> Any:
        if name == reductions.rebuild_cuda_tensor.__name__:
            return lambda *arguments: self.found.append(arguments)
        if (module, name) == ("_codecs", "encode"):
            return codecs.encode  # how protocol 2 writes bytes, the counter's handle among them
        return _Ignored


class _Ignored:
    """Whatever else a payload is made of."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    rebuild, arguments = reductions.reduce_tensor(tensor.detach())
    if rebuild is reductions.rebuild_cuda_tensor:
        uuid = str(torch.cuda.get_device_properties(arguments[_UUID_SLOT]).uuid)
        arguments = (*arguments[:_UUID_SLOT], uuid, *arguments[_UUID_SLOT + 1 :])
    return rebuild, arguments


def _reduce_storage(storage: torch.UntypedStorage) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    manager, handle, nbytes = storage._share_filename_cpu_()
    storage._shared_incref()  # taken by the one process that opens the handle
    return reductions.rebuild_storage_filename, (torch.UntypedStorage, manager, handle, nbytes)


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    **copyreg.dispatch_table,
    torch.Tensor: _reduce_tensor,
    torch.nn.Parameter: lambda parameter: _reduce_tensor(parameter.data),
    torch.storage.TypedStorage: reductions.reduce_typed_storage,
    torch.UntypedStorage: _reduce_storage,
}


# receiving


def decode(payload: str, reader: PayloadReader) -> object:
    """Decode base64, then let the allow-listed unpickler open the handles.

    Raises:
        RequestError: malformed base64 or pickle, or a global outside the allow-list.
    """
    try:
        data = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"serialized_named_tensors is not base64: {cut(str(error))}") from error
    return load(data, reader)


def named_tensors(
    content: object, load_format: str | None, modules: Sequence[str], routed: Collection[str] = ()
) -> dict[str, NamedTensors]:
    """Return what a payload holds for each of the request's modules.

    Args:
        routed: modules whose tensors may be in another one's list, under a prefix; they need no list of their own.

    Raises:
        RequestError: modules that are missing or were not announced, or content of another form than ``load_format``.
    """
    if isinstance(content, (list, tuple)) and len(modules) == 1:
        content = {modules[0]: content}
    if not isinstance(content, dict):
        raise RequestError(f"the payload is a {type(content).__name__}, not a dict of modules")
    names = [str(name) for name in content]
    faults = Faults(
        f"the payload has nothing for module {in_short(name)}; it has {name_some(names)}"
        for name in modules
        if name not in content and name not in routed
    )
    if extra := [name for name in names if name not in modules]:
        faults.append(f"the payload has modules that target_modules does not name: {name_some(extra)}")
    if faults:
        raise RequestError(*faults)
    read = _read_bucket if load_format == FLATTENED_BUCKET else _read_list
    named: dict[str, NamedTensors] = {}
    for module in filter(content.__contains__, modules):
        try:
            named[module] = read(content[module])
        except RequestError as error:
            faults.extend(f"{module}: {fault}" for fault in error.faults)
    if faults:
        raise RequestError(*faults)
    return named


def _read_bucket(content: object) -> NamedTensors:
    if isinstance(content, dict) and {"flattened_tensor", "layout"} <= content.keys():
        return unflatten(content["flattened_tensor"], read_layout(content["layout"]))
    if not isinstance(content, dict) or not {"flattened_tensor", "metadata"} <= content.keys():
        raise RequestError('load_format "flattened_bucket" needs "flattened_tensor" and "metadata"')
    return unflatten(content["flattened_tensor"], content["metadata"])


def _read_list(content: object) -> NamedTensors:
    if isinstance(content, dict):
        raise RequestError('the payload holds a dict; did you mean load_format "flattened_bucket"?')
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"the payload holds a {type(content).__name__}, not a list of (name, tensor)")
    faults = Faults()
    for position, item in enumerate(content):
        if not isinstance(item, (list, tuple)) or len(item) != 2 or not isinstance(item[0], str):
            faults.append(f"the payload's list has an item that is not (name, tensor): number {position}")
            continue
        if not isinstance(item[1], torch.Tensor):
            faults.append(f"{in_short(item[0])} is a {type(item[1]).__name__}, not a tensor")
        try:
            check_name(item[0])
        except RequestError as error:
            faults.extend(error.faults)
    if faults:
        raise RequestError(*faults)
    return [(name, tensor) for name, tensor in content]


def normalised_uuid(uuid: str) -> str:
    """Return a GPU UUID as torch prints it: without NVML's ``GPU-`` or ``MIG-``, in lower case."""
    return uuid.removeprefix("MIG-").removeprefix("GPU-").lower()


def cuda_device_index(uuid: str) -> int:
    """Return index in this process of the GPU with that UUID.

    Raises:
        RequestError: this process does not see it; the message holds the UUIDs that it sees.
    """
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    for index, candidate in enumerate(seen):
        if normalised_uuid(candidate) == normalised_uuid(uuid):
            return index
    raise RequestError(
        f"the payload was exported from GPU {cut(uuid)}, which this worker does not see; it sees {seen or 'none'}"
    )
