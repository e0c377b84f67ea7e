"""Payloads that nobody honest sends, put together from opcodes: public families of gadgets, and bombs.

Each is a whole pickle, as it is after base64.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import torch

from sgld_lora_merge.wire.layout import BucketEntry

REDUCTIONS = "torch.multiprocessing.reductions"
ENTRY = ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")


# what pickles are made of


def pickled(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def named(module: str, attribute: str) -> bytes:
    """GLOBAL."""
    return f"c{module}\n{attribute}\n".encode()


def stacked(module: str, attribute: str) -> bytes:
    """STACK_GLOBAL, which walks dotted names."""
    return b"".join(b"\x8c" + bytes([len(each)]) + each.encode() for each in (module, attribute)) + b"\x93"


def value(plain: Any) -> bytes:
    return pickle.dumps(plain, protocol=2)[2:-1]


def tuple_of(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def call(module: str, attribute: str, *arguments: bytes) -> bytes:
    """REDUCE."""
    return named(module, attribute) + tuple_of(*arguments) + b"R"


def put(part: bytes, index: int) -> bytes:
    return part + b"r" + index.to_bytes(4, "little")


def get(index: int) -> bytes:
    return b"j" + index.to_bytes(4, "little")


def tensor(storage: bytes, size: Any = (8,), stride: Any = (1,), offset: int = 0) -> bytes:
    return call(
        "torch._utils", "_rebuild_tensor_v2", storage, value(offset), value(size), value(stride), value(False), b"N"
    )


def storage(stream: bytes) -> bytes:
    return call("torch.storage", "_load_from_bytes", value(stream))


def stream_of(elements: torch.Tensor) -> bytes:
    """A storage as torch pickles it."""
    buffer = io.BytesIO()
    typed = torch.storage.TypedStorage(wrap_storage=elements.untyped_storage(), dtype=elements.dtype, _internal=True)
    torch.save(typed, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


class Inline:
    """A tensor that travels in its payload."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        own = self.tensor
        arguments = (_Stream(own), 0, tuple(own.shape), own.stride(), False, None)
        return torch._utils._rebuild_tensor_v2, arguments


class _Stream:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return torch.storage._load_from_bytes, (stream_of(self.tensor),)


def inline(content: Any, protocol: int) -> bytes:
    """A good payload without any handle; entries have sglang's name, which must be as long as ours on protocol 4."""
    written = pickle.dumps(content, protocol=protocol)
    ours = BucketEntry.__module__, BucketEntry.__name__
    for old, new in zip(ours, ENTRY, strict=True):
        if protocol == 2:
            written = written.replace(old.encode() + b"\n", new.encode() + b"\n")
        else:
            short = bytes([len(old)]) + old.encode()
            written = written.replace(b"\x8c" + short, b"\x8c" + bytes([len(new)]) + new.encode())
    if protocol > 2 and written[2:3] == b"\x95":  # the frame has another length now
        written = written[:2] + written[11:]
    return written


def exports() -> list[bytes]:
    """Handles as torch writes them, of a GPU and of shared memory that is gone; and what else the allow-list has."""
    extent = map(value, ((2, 4), (4, 1), 0))
    handle = map(value, ("GPU-1", b"\3c" + bytes(64), 64, 0, False, b"/torch_1_2_3", 0, bytes(64), False))
    gpu = named("torch", "Tensor"), *extent, named("torch.storage", "TypedStorage"), named("torch", "float32"), *handle
    data = call(REDUCTIONS, "rebuild_cuda_tensor", *gpu)
    parameter = call("torch._utils", "_rebuild_parameter", data, value(False), call("collections", "OrderedDict"))
    gone = _shared(b"/tmp/torch-shm-dir-abcdef/manager.sock", b"/torch_1_2_3", 1)
    listed = b"](" + b"".join(tuple_of(value(f"l.lora_{side}"), parameter) for side in "AB") + b"e"
    module = call("collections", "OrderedDict", b"](" + tuple_of(value("transformer"), listed) + b"e")
    nothing = call("builtins", "bytes")
    return [pickled(data), pickled(module), pickled(gone), pickled(nothing)]


def _shared(manager: bytes, handle: bytes, nbytes: int) -> bytes:
    """A tensor in shared memory."""
    names = b"ctorch\nUntypedStorage\n"
    opened = call(REDUCTIONS, "rebuild_storage_filename", names, value(manager), value(handle), value(nbytes))
    typed = call(REDUCTIONS, "rebuild_typed_storage", opened, named("torch", "uint8"))
    extent = tuple_of(value(0), value((1,)), value((1,)), value(False))
    return call(REDUCTIONS, "rebuild_tensor", named("torch", "Tensor"), typed, extent)


# families


def payloads(canary: str) -> dict[str, bytes]:
    """Family -> payload; one that is read as the pickle module would read it makes the file ``canary`` or worse."""
    touch = f"touch {canary}"
    make = f"open({canary!r}, 'w')"
    return {**_calls(canary, touch, make), **_opcodes(touch), **_streams(touch), **_bombs(), **_tensors()}


def _calls(canary: str, touch: str, make: str) -> dict[str, bytes]:
    calls = [
        ("os", "system", touch), ("posix", "system", touch), ("nt", "system", touch), ("os", "popen", touch),
        ("os", "execv", "/bin/sh", ["sh", "-c", touch]), ("subprocess", "Popen", ["touch", canary]),
        ("subprocess", "check_output", ["touch", canary]), ("commands", "getoutput", touch), ("pty", "spawn", touch),
        ("builtins", "eval", make), ("builtins", "exec", make), ("__builtin__", "eval", make),
        ("builtins", "open", canary, "w"), ("io", "open", canary, "w"), ("builtins", "__import__", "os"),
        ("builtins", "getattr", "x", "__class__"), ("builtins", "setattr", "x", "y", 1), ("builtins", "breakpoint"),
        ("builtins", "compile", make, "x", "exec"), ("builtins", "globals"), ("builtins", "bytearray", 2**40),
        ("builtins", "range", 2**60), ("builtins", "list", []), ("builtins", "dict", []), ("builtins", "type", "x"),
        ("importlib", "import_module", "os"), ("imp", "load_source", "x", canary), ("runpy", "run_path", canary),
        ("code", "interact"), ("timeit", "timeit", make), ("pdb", "run", make), ("profile", "run", make),
        ("cProfile", "run", make), ("bdb", "Bdb"), ("doctest", "debug_script", make), ("ctypes", "CDLL", canary),
        ("operator", "attrgetter", "x"), ("operator", "methodcaller", "x"), ("functools", "partial", 1),
        ("functools", "reduce", 1, []), ("itertools", "repeat", 1), ("itertools", "chain", []),
        ("types", "FunctionType", 1), ("types", "CodeType", 1), ("types", "SimpleNamespace"),
        ("copyreg", "_reconstructor", 1, 2, 3), ("copyreg", "__newobj__", 1), ("pickle", "loads", b"N."),
        ("_pickle", "loads", b"N."), ("marshal", "loads", b"N"), ("dill", "loads", b"N."), ("joblib", "load", canary),
        ("cloudpickle", "loads", b"N."), ("shelve", "open", canary), ("shutil", "rmtree", canary),
        ("socket", "create_connection", ["127.0.0.1", 9]), ("urllib.request", "urlopen", "file:///etc/passwd"),
        ("webbrowser", "open", canary), ("asyncio.subprocess", "create_subprocess_shell", touch),
        ("multiprocessing.reduction", "_rebuild_socket", 1), ("multiprocessing.util", "spawnv_passfds", b"x", [], []),
        ("torch", "load", canary), ("torch.serialization", "load", canary), ("torch", "save", 1, canary),
        ("torch.hub", "load", canary, "x"), ("torch.jit", "load", canary), ("torch", "ones", 2**40),
        ("torch", "FloatTensor", 2**40), ("torch", "set_default_dtype", 1),
        ("torch.utils.cpp_extension", "load", "x", []), ("torch._dynamo", "optimize"),
        ("torch._tensor", "_rebuild_from_type_v2", 1), ("torch.storage", "UntypedStorage.from_file", canary),
        ("numpy", "ndarray", 1), ("numpy", "fromfile", canary), ("numpy", "load", canary),
        ("numpy.core.multiarray", "_reconstruct", 1), ("numpy._core.multiarray", "_reconstruct", 1),
        ("numpy.testing._private.utils", "runstring", make, {}), ("pandas.io.pickle", "read_pickle", canary),
        ("sglang.srt.utils.common", "dynamic_import", "os.system"), ("sgld_lora_merge.wire.unpickler", "load", b"N."),
        ("transformers", "AutoModel.from_pretrained", canary), ("safetensors.torch", "load_file", canary),
    ]  # fmt: skip
    by_name = {f"{module}.{name}": pickled(call(module, name, *map(value, args))) for module, name, *args in calls}
    dotted = [
        ("torch", "nn.modules.module.os.system"), ("torch", "serialization.os.system"), ("torch", "Tensor.__class__"),
        ("collections", "OrderedDict.__reduce__"), ("torch.storage", "UntypedStorage.from_file"),
    ]  # fmt: skip
    walks = {f"nested {m}.{n}": b"\x80\x04" + stacked(m, n) + tuple_of(value(touch)) + b"R." for m, n in dotted}
    return by_name | walks


def _opcodes(touch: str) -> dict[str, bytes]:
    text = b"U" + bytes([len(touch)]) + touch.encode()
    return {
        "opcode STACK_GLOBAL": b"\x80\x04" + stacked("os", "system") + text + b"\x85R.",
        "opcode OBJ": b"\x80\x02(cos\nsystem\n" + text + b"o.",
        "opcode INST": b"\x80\x02(" + text + b"ios\nsystem\n.",
        "opcode NEWOBJ": b"\x80\x02cos\nsystem\n" + text + b"\x85\x81.",
        "opcode NEWOBJ_EX": b"\x80\x04cos\nsystem\n" + text + b"\x85}\x92.",
        "opcode BUILD": pickled(named(*ENTRY), value({"__setstate__": 1}), b"b"),
        "opcode EXT1": b"\x80\x02\x82\x01.",
        "opcode PERSID": b"Pos.system\n.",
        "opcode BINPERSID": pickled(value("x"), b"Q"),
        "opcode NEXT_BUFFER": b"\x80\x05\x97.",
        "protocol 0": b"cos\nsystem\n(S'" + touch.encode() + b"'\ntR.",
        "protocol 200": b"\x80\xc8N.",
    }


def _streams(touch: str) -> dict[str, bytes]:
    """Pickles within inline storages."""
    front = [torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {"little_endian": True}]
    header = b"".join(pickle.dumps(item, 2) for item in front)
    claim = pickled(tuple_of(value("storage"), named("torch", "FloatStorage"), value("0"), value("cpu"),
                             value(2**40), b"N"), b"Q")  # fmt: skip
    keys = pickle.dumps(["0"], 2)
    archive = io.BytesIO()
    torch.save({"x": torch.zeros(2**24)}, archive)
    packed = io.BytesIO()
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            new.writestr(item.filename, old.read(item))
    return {
        "stream that calls": pickled(tensor(storage(header + pickled(call("os", "system", value(touch)))))),
        "stream that claims 4 TiB": pickled(tensor(storage(header + claim + keys + (2**40).to_bytes(8, "little")))),
        "stream, archive of 64 MiB of zeros": pickled(tensor(storage(packed.getvalue()))),
        "stream of nothing": pickled(tensor(storage(b""))),
    }


def _bombs() -> dict[str, bytes]:
    doubling = put(b"]", 0) + b"".join(put(b"](" + get(i) * 60 + b"e", i + 1) for i in range(5))
    text = put(value("x" * 2**20), 10) + put(value("latin1"), 11)
    copies = (named("_codecs", "encode") + get(10) + get(11) + b"\x86R") * 2**16
    items = put(value([("x", 1)] * 2**16), 12)
    wide = put(b"(" + b"K\x01" * 2**16 + b"t", 13)
    state = put(value({f"f{i}": i for i in range(2**12)}), 14)
    shape = b"(" + value(2**62) * 2**17 + b"t"
    hostile_repr = doubling + named("torch", "Size") + b"(" + get(5) + b"tR"
    return {
        "depth: a million tuples as a key": pickled(b"}N" + b"\x85" * 10**6 + b"K\x01s"),
        "depth: a million lists": pickled(b"]" * 10**6 + b"a" * (10**6 - 1)),
        "memo: lists that hold each other 60^5 times": pickled(doubling),
        "memo: the same in a message": pickled(hostile_repr),
        "memo: the same as a dtype": pickled(doubling + call(REDUCTIONS, "rebuild_typed_storage",
                                             call(REDUCTIONS, "rebuild_storage_empty", b"N"), get(5))),
        "memo: a list of itself": pickled(put(b"]", 0) + get(0) + b"a"),
        "memo: an index of 2^31": pickled(b"Nr" + (2**31).to_bytes(4, "little")),
        "memo: 1 MiB encoded 65536 times": pickled(text + b"(" + copies + b"t"),
        "memo: a dict of 65536 items 4096 times": pickled(
            items + b"(" + (named("collections", "OrderedDict") + get(12) + b"\x85R") * 2**12 + b"t"),
        "memo: 65536 arguments 4096 times": pickled(
            wide + b"(" + (named("torch", "Size") + get(13) + b"R") * 2**12 + b"t"),
        "memo: 4096 fields given 4096 times": pickled(
            state + b"(" + (named(*ENTRY) + b")\x81" + get(14) + b"b") * 2**12 + b"t"),
        "length of 2^62 bytes": b"\x80\x05\x8e" + (2**62).to_bytes(8, "little") + b".",
        "length of a text of 2^62": b"\x80\x05\x8d" + (2**62).to_bytes(8, "little") + b".",
        "frame of 2^60": b"\x80\x04\x95" + (2**60).to_bytes(8, "little") + b"N.",
        "shape of 131072 dimensions": pickled(call("torch", "Size", shape)),
        "lone surrogate": pickled(b"X\x03\x00\x00\x00\xed\xa0\x80"),
    }  # fmt: skip


def _tensors() -> dict[str, bytes]:
    """Tensors that are not what their storages hold."""
    own = storage(stream_of(torch.ones(8)))
    again = put(tensor(own), 20)
    return {
        "stride 0: 2^40 elements of 8": pickled(tensor(own, (2**20, 2**20), (0, 0))),
        "beyond its storage": pickled(tensor(own, (9,))),
        "negative stride": pickled(tensor(own, (8,), (-1,))),
        "one tensor under 100000 names": pickled(b"(" + again + get(20) * 10**5 + b"t"),
        "shared memory: another file": pickled(
            _shared(b"/tmp/torch-shm-dir-abc/manager.sock", b"/../../etc/passwd", 1)
        ),
        "shared memory: another socket": pickled(_shared(b"/var/run/docker.sock", b"/torch_1_2_3", 1)),
        "shared memory: a long socket": pickled(_shared(b"x" * 300, b"/torch_1_2_3", 1)),
        "shared memory: gone": pickled(_shared(b"/tmp/torch-shm-dir-abcdef/manager.sock", b"/torch_1_2_3", 2**40)),
    }
