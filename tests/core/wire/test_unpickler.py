"""Hostile payloads: refused by name, nothing executed, nothing of torch or of ours changed.

The pickles are put together from opcodes, so that they hold what no pickler would write.
"""

import gc
import io
import os
import pickle
import re
import struct
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.wire.bucket import unflatten
from sgld_lora_merge.wire.described import PayloadReader
from sgld_lora_merge.wire.layout import BucketEntry
from sgld_lora_merge.wire.payload import FLATTENED_BUCKET, decode, named_tensors, pack
from sgld_lora_merge.wire.unpickler import load

ROOT = Path(__file__).parents[3]
REDUCTIONS = "torch.multiprocessing.reductions"
ENTRY = "sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"


# pickles by hand


def pickled(*parts):
    return b"\x80\x02" + b"".join(parts) + b"."


def name(module, attribute):
    """GLOBAL: the object of that name on the stack."""
    return f"c{module}\n{attribute}\n".encode()


def value(plain):
    """Any plain value, or a tensor inline, on the stack."""
    return pickle.dumps(plain, protocol=2)[2:-1]


def tuple_of(*parts):
    return b"(" + b"".join(parts) + b"t"


def call(module, attribute, *arguments):
    """REDUCE: the call of a global with arguments that are on the stack."""
    return name(module, attribute) + tuple_of(*arguments) + b"R"


def build(thing, state):
    """BUILD: set the state of a thing."""
    return thing + state + b"b"


def typed_storage(elements=8, dtype=torch.float32):
    storage = torch.arange(elements).to(dtype).untyped_storage()
    return value(torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True))


def tensor_of(storage, offset=0, size=(8,), stride=(1,)):
    parts = (storage, value(offset), value(size), value(stride), value(False), b"N")
    return call("torch._utils", "_rebuild_tensor_v2", *parts)


def shared_tensor(manager, handle, nbytes, size=(8,)):
    """A float32 tensor in shared memory, as torch's ``file_system`` strategy pickles it."""
    storage = call(REDUCTIONS, "rebuild_storage_filename", name("torch", "UntypedStorage"), manager, handle, nbytes)
    typed = call(REDUCTIONS, "rebuild_typed_storage", storage, name("torch", "float32"))
    extent = tuple_of(value(0), value(size), value((1,)), value(False))
    return call(REDUCTIONS, "rebuild_tensor", name("torch", "Tensor"), typed, extent)


def inline_tensor(stream):
    """A float32 tensor whose storage is a stream of `torch.save`."""
    return tensor_of(call("torch.storage", "_load_from_bytes", value(stream)))


def no_gpu(uuid):
    raise RequestError(f"no GPU {uuid}")


def read(data, *, shared=False):
    return load(data, PayloadReader(no_gpu, shared=shared))


def refusal(data):
    with pytest.raises(RequestError) as error:
        read(data)
    assert error.value.status == 400
    return str(error.value)


@pytest.fixture(autouse=True)
def classes_unchanged():
    """No payload may change a class that outlives it."""
    classes = (torch.Tensor, torch.nn.Parameter, torch.UntypedStorage, torch.storage.TypedStorage, BucketEntry)

    def attributes():  # less what copyreg remembers of a class when one of its objects is pickled
        return [{key: item for key, item in vars(cls).items() if key != "__slotnames__"} for cls in classes]

    before = attributes()
    yield
    after = attributes()
    for cls, old, new in zip(classes, before, after, strict=True):  # the tests after this one see clean classes
        for attribute in {key for key in old.keys() | new.keys() if old.get(key) is not new.get(key)}:
            if attribute in old:
                setattr(cls, attribute, old[attribute])
            else:
                delattr(cls, attribute)
    assert after == before, "a payload changed a class"


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """A file that exists once a payload has run something."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists(), "the payload was executed"


# globals outside the list

TOUCH = "touch canary"
EXECUTING = [
    ("os", "system", TOUCH),
    ("posix", "system", TOUCH),
    ("builtins", "eval", "open('canary', 'w')"),
    ("builtins", "exec", "open('canary', 'w')"),
    ("builtins", "open", "canary", "w"),
    ("subprocess", "Popen", ["touch", "canary"]),
    ("subprocess", "check_output", ["touch", "canary"]),
    ("torch.utils.cpp_extension", "load", "canary", []),
    ("torch", "save", 1, "canary"),
    ("os", "mkdir", "canary"),
]
REACHING = [
    ("builtins", "getattr", "x", "__class__"),
    ("builtins", "__import__", "os"),
    ("builtins", "setattr", "x", "y", 1),
    ("builtins", "type", "x"),
    ("builtins", "dict"),
    ("builtins", "set"),
    ("builtins", "bytearray", 2**40),
    ("importlib", "import_module", "os"),
    ("operator", "attrgetter", "x"),
    ("operator", "methodcaller", "x"),
    ("functools", "partial", 1),
    ("functools", "reduce", 1, []),
    ("types", "FunctionType", 1),
    ("copyreg", "_reconstructor", 1, 2, 3),
    ("copyreg", "__newobj__", 1),
    ("pickle", "loads", b"N."),
    ("_pickle", "loads", b"N."),
    ("torch", "load", "x"),
    ("torch.serialization", "load", "x"),
    ("torch.hub", "load", "x", "y"),
    ("torch.jit", "load", "x"),
    ("torch", "set_default_dtype", 1),
    ("torch", "bfloat16.__class__"),
    ("torch._utils", "_rebuild_tensor", 1),
    ("torch._tensor", "_rebuild_from_type_v2", 1),
    ("torch.nn.modules.module", "Module"),
    ("torch.storage", "_load_from_bytes_", b""),
    ("numpy.core.multiarray", "_reconstruct", 1),
    ("numpy._core.multiarray", "_reconstruct", 1),
    ("numpy", "ndarray", 1),
    ("multiprocessing.reduction", "_rebuild_socket", 1),
    ("sglang.srt.utils.common", "dynamic_import", "os.system"),
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorBucket"),
    ("sgld_lora_merge.wire.layout", "BucketEntry"),
    ("sgld_lora_merge.wire.unpickler", "load", b"N."),
]


@pytest.mark.parametrize(("module", "attribute", "arguments"), [(m, a, args) for m, a, *args in EXECUTING + REACHING])
def test_a_global_outside_the_list_is_refused_by_name(canary, module, attribute, arguments):
    """Case I4."""
    message = refusal(pickled(call(module, attribute, *map(value, arguments))))

    assert f"{module}.{attribute}, which is outside the allow-list" in message


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0ctouch canary\x85R.",
        b"\x80\x02(cos\nsystem\nU\x0ctouch canaryo.",
        b"\x80\x02(U\x0ctouch canaryios\nsystem\n.",
        b"\x80\x02cos\nsystem\nU\x0ctouch canary\x85\x81.",
        b"\x80\x04cos\nsystem\n\x8c\x0ctouch canary\x85}\x92.",
        b"\x80\x00cos\nsystem\n(S'touch canary'\ntR.",
    ],
    ids=["STACK_GLOBAL", "OBJ", "INST", "NEWOBJ", "NEWOBJ_EX", "protocol 0"],
)
def test_no_opcode_gets_past_the_list(canary, data):
    message = refusal(data)

    assert "os.system, which is outside the allow-list" in message or "is not read" in message


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("torch.nn", "modules.module.Module"),
        ("torch", "nn.Module"),
        ("torch", "Tensor.__setstate__"),
        ("torch", "Size.__class__"),
        ("collections", "OrderedDict.__class__"),
        ("torch.storage", "UntypedStorage.from_file"),
        ("torch.multiprocessing", "reductions.rebuild_cuda_tensor"),
    ],
)
def test_a_nested_attribute_is_refused_by_name(module, attribute):
    """Case I4: protocol 4 walks dotted names."""
    data = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, attribute)) + b"\x93."

    assert f"{module}.{attribute}, which is outside the allow-list" in refusal(data)


@pytest.mark.parametrize(
    "data", [b"\x80\x02\x82\x01.", b"\x80\x02U\x01xQ.", b"Px\n."], ids=["EXT1", "BINPERSID", "PERSID"]
)
def test_extensions_and_persistent_ids_are_refused(data):
    assert "not a readable pickle" in refusal(data)


def test_a_pickle_inside_an_inline_storage_is_not_trusted_either(canary):
    header = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {"little_endian": True})
    stream = b"".join(pickle.dumps(item, protocol=2) for item in header) + pickled(call("os", "system", value(TOUCH)))

    message = refusal(pickled(inline_tensor(stream)))

    assert "posix.system" in message or "os.system" in message


# setting attributes: the BUILD opcode

HOSTILE_STATES = {
    "attributes": value({"evil": 1}),
    "slots": value((None, {"evil": 1})),
    "dunder": value((None, {"__eq__": 1})),
    "call": value((None, {"_call": 1})),
    "both": value(({"evil": 1}, {"evil": 1})),
}


@pytest.mark.parametrize("state", HOSTILE_STATES.values(), ids=HOSTILE_STATES)
@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
        ("torch", "Size"),
        ("torch", "float32"),
        ("torch", "UntypedStorage"),
        ("torch.storage", "TypedStorage"),
        ("torch.storage", "_load_from_bytes"),
        ("torch._utils", "_rebuild_tensor_v2"),
        (REDUCTIONS, "rebuild_cuda_tensor"),
        (REDUCTIONS, "rebuild_storage_filename"),
        ("collections", "OrderedDict"),
        ("multiprocessing.resource_sharer", "DupFd"),
        ENTRY,
    ],
)
def test_attributes_of_what_the_list_holds_cannot_be_set(module, attribute, state):
    refusal(pickled(build(name(module, attribute), state)))


@pytest.mark.parametrize(
    "thing",
    [value(torch.zeros(2)), typed_storage(), call(REDUCTIONS, "rebuild_storage_empty", b"N")],
    ids=["tensor", "typed storage", "untyped storage"],
)
@pytest.mark.parametrize("state", HOSTILE_STATES.values(), ids=HOSTILE_STATES)
def test_attributes_of_tensors_and_storages_cannot_be_set(thing, state):
    """``nbytes`` of a storage, say, which is what extents are checked against."""
    refusal(pickled(build(thing, state)))


def test_a_tensor_is_not_given_other_flags_or_hooks():
    refusal(pickled(build(value(torch.zeros(2)), tuple_of(value(True), b"N", value({1: 2})))))


# extents


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (0, (9,), (1,)),
        (1, (8,), (1,)),
        (8, (1,), (1,)),
        (2**62, (1,), (1,)),
        (0, (2,), (8,)),
        (0, (2, 2), (7, 1)),
        (0, (2**40, 2**40), (1, 1)),
        (0, (2**62, 8), (0, 2**62)),
        (9, (0,), (1,)),
    ],
)
def test_a_tensor_beyond_its_storage_is_refused(offset, size, stride):
    """torch would grow the storage instead."""
    assert "its storage has 32" in refusal(pickled(tensor_of(typed_storage(), offset, size, stride)))


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (-1, (4,), (1,)),
        (0, (-4,), (1,)),
        (7, (4,), (-1,)),
        (0, (2**63,), (0,)),
        (0, (4.0,), (1,)),
        (0, (True,), (1,)),
        (0, ("4",), (1,)),
        (None, (4,), (1,)),
        (0.5, (4,), (1,)),
    ],
)
def test_a_size_stride_or_offset_that_is_no_count_is_refused(offset, size, stride):
    assert "is not a size" in refusal(pickled(tensor_of(typed_storage(), offset, size, stride)))


def test_shape_and_stride_have_one_length():
    assert "differ in length" in refusal(pickled(tensor_of(typed_storage(), 0, (2, 2), (1,))))


@pytest.mark.parametrize("size", [4, None, "44", {"4": 4}])
def test_a_shape_is_a_tuple_or_a_list(size):
    assert "is not a shape" in refusal(pickled(tensor_of(typed_storage(), 0, size, (1,))))


def test_a_tensor_within_its_storage_is_a_view_of_it():
    tensor = read(pickled(tensor_of(typed_storage(), 1, (2, 3), (4, 1))))

    assert torch.equal(tensor, torch.tensor([[1.0, 2, 3], [5, 6, 7]]))
    assert tensor.untyped_storage().nbytes() == 32


def test_extents_are_checked_in_the_dtype_of_the_storage_that_is_used():
    """A storage of 8 bytes that is then called one of float64."""
    storage = call(REDUCTIONS, "rebuild_storage_empty", b"N")
    typed = call(REDUCTIONS, "rebuild_typed_storage", storage, name("torch", "float64"))

    assert "its storage has 0" in refusal(pickled(tensor_of(typed, 0, (1,), (1,))))


def test_a_state_cannot_grow_a_storage_after_its_extents_were_checked():
    """``Tensor.__setstate__`` takes (storage, offset, size, stride) and grows the storage."""
    state = tuple_of(typed_storage(), value(0), value((2**20,)), value((1,)))

    refusal(pickled(build(value(torch.zeros(2)), state)))


def test_a_state_cannot_exchange_the_data_of_a_tensor():
    state = tuple_of(value(torch.zeros(5)), b"N", b"N", value(False), b"N")

    refusal(pickled(build(value(torch.zeros(2)), state)))


# arguments

TENSOR, STORAGE, UNTYPED = value(torch.zeros(2)), typed_storage(), call(REDUCTIONS, "rebuild_storage_empty", b"N")
MANAGER, HANDLE = value(b"/tmp/torch-shm-dir-none/manager.sock"), value(b"/torch_1_2_3")  # of nobody
WRONG_ARGUMENTS = [
    ("torch", "Size", [value(4)], "is not a shape"),
    ("torch", "Size", [value((1, -1))], "is not a size"),
    ("torch", "Tensor", [value(4)], "not a readable pickle"),
    ("torch", "UntypedStorage", [value(2**40)], "not a readable pickle"),
    ("torch.storage", "TypedStorage", [value(2**40)], "not a readable pickle"),
    ("torch.nn.parameter", "Parameter", [TENSOR], "not a readable pickle"),
    ("torch", "float32", [value(4)], "not a readable pickle"),
    ("torch.storage", "_load_from_bytes", [value("text")], "needs bytes"),
    ("torch.storage", "_load_from_bytes", [b"N"], "needs bytes"),
    ("torch._utils", "_rebuild_tensor_v2", [TENSOR, value(0), value((1,)), value((1,))], "needs a typed storage"),
    ("torch._utils", "_rebuild_tensor_v2", [b"N", value(0), value((1,)), value((1,))], "needs a typed storage"),
    ("torch._utils", "_rebuild_tensor_v2", [STORAGE], "not a readable pickle"),
    ("torch._utils", "_rebuild_parameter", [value(3)], "a parameter needs a tensor, not int"),
    (REDUCTIONS, "rebuild_tensor", [b"N", STORAGE, value((0, (1,)))], "takes (offset, size, stride, requires_grad)"),
    (REDUCTIONS, "rebuild_tensor", [b"N", STORAGE, value([0, (1,), (1,), False])], "takes (offset, size, stride,"),
    (REDUCTIONS, "rebuild_tensor", [b"N", value("x"), value((0, (1,), (1,), False))], "needs a typed storage, not str"),
    (REDUCTIONS, "rebuild_tensor", [b"N", STORAGE, value((0, (9,), (1,), False))], "its storage has 32"),
    (REDUCTIONS, "rebuild_typed_storage", [STORAGE, name("torch", "float32")], "needs an untyped one"),
    (REDUCTIONS, "rebuild_typed_storage", [UNTYPED, value("float32")], "not a dtype"),
    (REDUCTIONS, "rebuild_storage_filename", [b"N", value("/a"), HANDLE, value(8)], "names as bytes"),
    (REDUCTIONS, "rebuild_storage_filename", [b"N", MANAGER, b"N", value(8)], "names as bytes"),
    (REDUCTIONS, "rebuild_storage_filename", [b"N", MANAGER, HANDLE, value(-8)], "not a size"),
    (REDUCTIONS, "rebuild_storage_filename", [b"N", MANAGER, HANDLE, value("8")], "not a size"),
    (REDUCTIONS, "rebuild_cuda_tensor", [], "takes 15 arguments, the payload gives 0"),
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified", [b"N"], "the payload gives 1"),
    ("collections", "OrderedDict", [value("text")], "a list of items"),
    ("collections", "OrderedDict", [value([1, 2])], "keys that are not names"),
    ("collections", "OrderedDict", [value([([], 2)])], ""),
    ("_codecs", "encode", [value("x"), value("rot13")], "only latin1"),
    ("_codecs", "encode", [value(b"x"), value("latin1")], "only latin1"),
    ("_codecs", "encode", [value("\u20ac"), value("latin1")], "not a readable pickle"),
    ("builtins", "bytes", [value(2**40)], "bytes from arguments"),
    (*ENTRY, [value("x")], "not a readable pickle"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "attribute", "arguments", "words"), WRONG_ARGUMENTS)
def test_wrong_arguments_of_an_allowed_global_are_refused(module, attribute, arguments, words):
    assert words in refusal(pickled(call(module, attribute, *arguments)))


@pytest.mark.parametrize("attribute", ["Size", "Tensor", "float32"])
def test_what_the_list_holds_is_not_a_class_to_make_objects_of(attribute):
    refusal(pickled(name("torch", attribute), b")\x81"))


@pytest.mark.parametrize("location", ["meta", "cuda:0", "hpu", "nowhere"])
def test_an_inline_storage_that_names_another_device_is_refused_or_read_on_the_cpu(location):
    """A tensor without data, on ``meta``, would fail long after the payload was accepted."""
    storage = torch.storage.TypedStorage(
        wrap_storage=torch.arange(8.0).untyped_storage(), dtype=torch.float32, _internal=True
    )
    _, (data,) = storage.__reduce__()
    moved = data.replace(b"X\x03\x00\x00\x00cpu", b"X" + len(location).to_bytes(4, "little") + location.encode())
    assert moved != data

    with suppress(RequestError):
        tensor = read(pickled(inline_tensor(moved)))
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, torch.arange(8.0))


def test_something_else_than_a_storage_inline_is_refused():
    buffer = io.BytesIO()
    torch.save({"weights": 1}, buffer, _use_new_zipfile_serialization=False)

    assert "an inline storage is expected" in refusal(pickled(inline_tensor(buffer.getvalue())))


@pytest.mark.parametrize("stream", [b"", b"garbage", b"PK\x03\x04", b"\x80\x02N."])
def test_an_inline_storage_that_is_no_stream_of_torch_is_refused(stream):
    assert "not in the format that torch pickles storages in" in refusal(pickled(inline_tensor(stream)))


# what the list stands for, rightly used


def test_an_ordered_dict_is_read_as_a_dict():
    assert read(pickled(call("collections", "OrderedDict", value([("b", 1), ("a", 2)])))) == {"b": 1, "a": 2}


def test_bytes_of_protocol_2_are_read():
    assert read(pickled(value(b"\x00\xff"))) == b"\x00\xff"
    assert read(pickled(call("builtins", "bytes"))) == b""
    assert read(pickled(value(b""))) == b""  # a call of __builtin__.bytes


FIELDS = {"name": "x", "shape": (4,), "dtype": torch.float32, "start_idx": 0, "end_idx": 16, "numel": 16}


def metadata(fields):
    return pickled(b"](", build(name(*ENTRY) + b")\x81", value(fields)), b"e")


def test_an_entry_is_ours_whatever_its_class_is_called_on_the_wire():
    assert read(metadata(FIELDS)) == [BucketEntry(**FIELDS)]


@pytest.mark.parametrize("changed", [FIELDS | {"evil": 1}, {"name": "x"}, {}], ids=["more", "fewer", "none"])
def test_an_entry_of_other_fields_is_refused(changed):
    with pytest.raises(RequestError):
        unflatten(torch.zeros(16, dtype=torch.uint8), read(metadata(changed)))


# content that is neither tensors nor metadata


@pytest.mark.parametrize(
    "thing",
    [
        name("torch", "Tensor"),
        name("torch", "Size"),
        name("torch._utils", "_rebuild_tensor_v2"),
        name(*ENTRY),
        typed_storage(),
        call(REDUCTIONS, "rebuild_storage_empty", b"N"),
    ],
    ids=["class", "callable", "function", "metadata class", "typed storage", "untyped storage"],
)
@pytest.mark.parametrize("inside", [b"%s", b"](%se", b"}U\x01x%ss", b"%s\x85"], ids=["alone", "list", "dict", "tuple"])
def test_a_payload_of_something_else_than_tensors_is_refused(thing, inside):
    with pytest.raises(RequestError):
        named_tensors(read(pickled(inside % thing)), None, ["x"])


def test_containers_deeper_than_any_payload_are_refused():
    assert "nests more than" in refusal(pickled(b"]" * 8 + b"a" * 7))


def test_tensors_of_one_inline_storage_share_it():
    storage = typed_storage() + b"q\x64"  # memoised, and taken a second time
    second = b"h\x64"

    left, right = read(pickled(tuple_of(tensor_of(storage, 0, (4,)), tensor_of(second, 4, (4,)))))

    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    assert torch.equal(torch.cat([left, right]), torch.arange(8.0))


# file descriptors


def test_sharing_by_file_descriptor_is_refused_with_the_way_out():
    message = refusal(pickled(call(REDUCTIONS, "rebuild_storage_fd", b"N", b"N", value(8))))

    assert 'torch.multiprocessing.set_sharing_strategy("file_system")' in message


def test_a_descriptor_as_multiprocessing_pickles_it_is_refused_with_the_way_out():
    """``DupFd`` comes first in such a payload: an object made without a call, then its state."""
    duplicate = build(name("multiprocessing.resource_sharer", "DupFd") + b")\x81", value({"_id": ("/tmp/x", 1)}))
    message = refusal(pickled(call(REDUCTIONS, "rebuild_storage_fd", b"N", duplicate, value(8))))

    assert 'torch.multiprocessing.set_sharing_strategy("file_system")' in message


# bytes that are no pickle


GOOD_PAYLOAD = pickle.dumps(
    {"transformer": [("x", torch.arange(6.0).view(2, 3)), ("y", torch.ones(2).bfloat16())]}, protocol=4
)


def test_a_pickle_cut_short_anywhere_is_refused():
    for length in range(len(GOOD_PAYLOAD)):
        assert refusal(GOOD_PAYLOAD[:length])


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"garbage", b"{}", b"\x80\x63.", b".", b"\x80\x02\x93.", b"<html>" * 100]
)
def test_bytes_that_are_no_pickle_are_refused(data):
    assert "not a readable pickle" in refusal(data)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_plain_value_or_refused(data):
    with suppress(RequestError):  # anything else would be a 500
        load(data, PayloadReader(no_gpu))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, len(GOOD_PAYLOAD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_good_payload_with_a_few_bytes_changed_is_read_or_refused(changes):
    mutated = bytearray(GOOD_PAYLOAD)
    for position, byte in changes:
        mutated[position] = byte

    with suppress(RequestError):
        named_tensors(load(bytes(mutated), PayloadReader(no_gpu)), None, ["transformer"])


def test_a_length_beyond_memory_is_refused():
    refusal(b"\x80\x05\x8e" + (2**62).to_bytes(8, "little") + b".")


# what would take the whole worker down: each in a process of its own

VICTIM = """
    import resource, sys
    from sgld_lora_merge.errors import RequestError
    from sgld_lora_merge.wire.described import PayloadReader
    from sgld_lora_merge.wire.unpickler import load

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    data, before = open(sys.argv[1], "rb").read(), peak()
    try:
        load(data, PayloadReader(int))
        outcome = "read"
    except RequestError:
        outcome = "refused"
    if peak() - before > 256 * 1024:
        outcome = "more than 256 MiB taken"
    open(sys.argv[2], "w").write(outcome)
"""


def outcome_of(data, tmp_path):
    (tmp_path / "data").write_bytes(data)
    (tmp_path / "outcome").write_text("the process died")
    command = [sys.executable, "-c", textwrap.dedent(VICTIM), str(tmp_path / "data"), str(tmp_path / "outcome")]
    try:
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False, timeout=20)
    except subprocess.TimeoutExpired:
        return "still running"
    return (tmp_path / "outcome").read_text()


def test_a_deeply_nested_key_does_not_crash_the_worker(tmp_path):
    """Hashing a tuple recurses without a limit."""
    assert outcome_of(pickled(b"}N" + b"\x85" * 1_000_000 + b"K\x01s"), tmp_path) == "refused"


def test_a_deeply_nested_element_of_a_set_does_not_crash_the_worker(tmp_path):
    assert outcome_of(b"\x80\x04\x8f(N" + b"\x85" * 1_000_000 + b"\x90.", tmp_path) == "refused"


def test_a_payload_of_ten_bytes_does_not_take_a_gigabyte(tmp_path):
    """The C unpickler keeps its memo in a list that is as long as the highest index."""
    assert outcome_of(pickled(b"Nr" + (2**26).to_bytes(4, "little")), tmp_path) in ("read", "refused")


def test_a_long_name_of_a_shared_memory_manager_does_not_crash_the_worker(tmp_path):
    """libshm copies it into the path of a socket, which has 108 bytes."""
    _, handle, size = shared_memory(torch.arange(8.0))

    data = pickled(shared_tensor(value(b"x" * 300), value(handle), value(size)))

    assert outcome_of(data, tmp_path) == "refused"


def test_a_short_payload_of_lists_in_each_other_is_refused_at_once():
    """Case of the fuzz target: 1.5 kB that took 1.3 s, as long as the parts were bounded by memory alone."""
    lists = b"]r" + struct.pack("<I", 0)
    for level in range(5):
        lists += b"](" + (b"j" + struct.pack("<I", level)) * 60 + b"er" + struct.pack("<I", level + 1)
    started = time.process_time()
    assert "hold each other" in refusal(pickled(lists))
    assert time.process_time() - started < 1


def test_containers_that_refer_to_each_other_do_not_hang_the_worker(tmp_path):
    """Five lists, each of which holds the next one sixty times: 60^5 items for whoever walks them all."""
    lists = b"]q\x00"
    for level in range(5):
        lists += b"](" + b"h" + bytes([level])
        lists += (b"h" + bytes([level])) * 59 + b"eq" + bytes([level + 1])

    assert outcome_of(pickled(lists), tmp_path) in ("read", "refused")


# handles


def shared_memory(tensor):
    storage = tensor.untyped_storage()
    manager, handle, size = storage._share_filename_cpu_()
    storage._shared_incref()
    return manager, handle, size


def test_shared_memory_is_opened_and_recorded():
    manager, handle, size = shared_memory(torch.arange(8.0))
    reader = PayloadReader(no_gpu)

    tensor = load(pickled(shared_tensor(value(manager), value(handle), value(size))), reader)

    assert torch.equal(tensor, torch.arange(8.0))
    assert reader.opened


def test_shared_memory_that_is_gone_is_refused():
    reader = PayloadReader(no_gpu)

    with pytest.raises(RequestError, match="torch_1_2_3"):
        load(pickled(shared_tensor(MANAGER, HANDLE, value(32))), reader)


def test_shared_memory_is_not_grown_by_a_payload_that_claims_more():
    """torch would enlarge the sender's file."""
    manager, handle, _ = shared_memory(torch.arange(8.0))
    file = Path("/dev/shm") / handle.decode().removeprefix("/")
    before = os.stat(file).st_size

    refusal(pickled(shared_tensor(value(manager), value(handle), value(2**24))))

    assert os.stat(file).st_size == before


def test_shared_memory_64_bytes_short_is_refused_and_not_grown():
    """torch has 64 bytes in front of the content, and would enlarge a file that lacks them."""
    manager, handle, size = shared_memory(torch.arange(8.0))
    file = Path("/dev/shm") / handle.decode().removeprefix("/")
    os.truncate(file, size)

    assert f"has {size} bytes, the payload claims {size} and 64" in refusal(
        pickled(shared_tensor(value(manager), value(handle), value(size)))
    )
    assert os.stat(file).st_size == size


def test_shared_memory_that_is_not_really_there_is_refused():
    """Reading a sparse file allocates its pages."""
    manager, handle, _ = shared_memory(torch.arange(8.0))
    file = Path("/dev/shm") / handle.decode().removeprefix("/")
    os.truncate(file, 2**40 + 64)
    before = os.stat(file).st_blocks

    assert "is sparse: the payload claims 1099511627776 bytes" in refusal(
        pickled(shared_tensor(value(manager), value(handle), value(2**40)))
    )
    assert os.stat(file).st_blocks == before


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_shared_memory_is_a_file_of_its_own_name(kind):
    manager, handle, size = shared_memory(torch.arange(8.0))
    file = Path("/dev/shm") / "torch_1_2_4"
    if kind == "link":
        file.symlink_to(handle.decode().removeprefix("/"))
    else:
        file.mkdir()
    try:
        assert "cannot be opened" in refusal(
            pickled(shared_tensor(value(manager), value(b"/torch_1_2_4"), value(size)))
        )
    finally:
        (file.unlink if kind == "link" else file.rmdir)()


def mappings(handle):
    return Path("/proc/self/maps").read_text().count(handle.decode())


def test_shared_memory_under_many_names_is_mapped_once():
    tensor = torch.arange(8.0)
    manager, handle, size = shared_memory(tensor)
    for _ in range(3):
        tensor.untyped_storage()._shared_incref()
    before = mappings(handle)

    tensors = load(
        pickled(tuple_of(*[shared_tensor(value(manager), value(handle), value(size))] * 4)), PayloadReader(no_gpu)
    )

    assert all(torch.equal(each, torch.arange(8.0)) for each in tensors)
    assert mappings(handle) == before + 1
    assert len({each.data_ptr() for each in tensors}) == 1
    file = Path("/dev/shm") / handle.decode().removeprefix("/")
    assert file.exists()
    del tensor
    gc.collect()
    assert not file.exists(), "each reference that the sender had counted was released"
    assert torch.equal(tensors[0], torch.arange(8.0))


def test_shared_memory_of_two_lengths_is_refused():
    manager, handle, size = shared_memory(torch.arange(8.0))
    two = [shared_tensor(value(manager), value(handle), value(each), (4,)) for each in (size, 16)]
    assert "shared memory has one length" in refusal(pickled(tuple_of(*two)))


def test_a_tensor_beyond_its_shared_memory_is_refused_before_that_is_opened():
    manager, handle, size = shared_memory(torch.arange(8.0))

    assert "its storage has 32" in refusal(pickled(shared_tensor(value(manager), value(handle), value(size), (9,))))


@pytest.mark.parametrize(
    "bad",
    [
        call("os", "system", value(TOUCH)),
        name("torch", "Tensor"),
        build(name(*ENTRY) + b")\x81", value({"name": "x"})),
        shared_tensor(MANAGER, HANDLE, value(32), (9,)),
    ],
    ids=["global", "class", "metadata", "extent"],
)
def test_a_refused_payload_was_never_opened(bad):
    """Its sender releases the exports that no answer reports as opened."""
    manager, handle, size = shared_memory(torch.arange(8.0))
    good = shared_tensor(value(manager), value(handle), value(size))
    reader = PayloadReader(no_gpu)

    with pytest.raises(RequestError):
        load(pickled(tuple_of(good, bad)), reader)

    assert not reader.opened


def test_one_cpu_payload_may_be_shared_by_workers():
    payload, _bucket = pack({"transformer": [("x", torch.ones(2))]})

    content = decode(payload, PayloadReader(no_gpu, shared=True))

    assert torch.equal(named_tensors(content, FLATTENED_BUCKET, ["transformer"])["transformer"][0][1], torch.ones(2))


# CUDA exports; none of these needs a GPU


MEMORY = b"\x03c" + bytes(range(64))
COUNTER = b"/torch_1_2_3"
EVENT = bytes(range(64))


def cuda_export(**changed):
    arguments = {
        "cls": "torch.Tensor", "size": (4,), "stride": (1,), "offset": 0, "storage": "TypedStorage",
        "dtype": torch.float32, "device": "GPU-1", "handle": MEMORY, "nbytes": 16, "storage_offset": 0,
        "requires_grad": False, "counter": COUNTER, "counter_offset": 0, "event": EVENT, "sync": True,
    }  # fmt: skip
    return pickled(call(REDUCTIONS, "rebuild_cuda_tensor", *map(value, (arguments | changed).values())))


@pytest.fixture
def opened(monkeypatch):
    """The arguments of exports that were opened, in place of opening them."""
    calls = []
    monkeypatch.setattr(torch.multiprocessing.reductions, "rebuild_cuda_tensor", lambda *args: calls.append(args))
    return calls


def test_a_cuda_export_is_opened_on_the_gpu_with_its_uuid(opened):
    """Case I2: the exporter's index means nothing here."""
    reader = PayloadReader({"GPU-1": 3}.__getitem__)

    load(cuda_export(), reader)

    (arguments,) = opened
    assert arguments[6] == 3
    assert arguments[:6] == (torch.Tensor, (4,), (1,), 0, torch.storage.TypedStorage, torch.float32)
    assert arguments[7:] == (MEMORY, 16, 0, False, COUNTER, 0, EVENT, True)
    assert reader.opened


def test_classes_and_flags_of_a_cuda_export_are_ours(opened):
    load(cuda_export(cls="evil", storage="evil", requires_grad=True), PayloadReader(lambda uuid: 0))

    (arguments,) = opened
    assert (arguments[0], arguments[4], arguments[10]) == (torch.Tensor, torch.storage.TypedStorage, False)


def test_an_index_in_place_of_a_uuid_is_taken_as_it_is(opened):
    load(cuda_export(device=1), PayloadReader(no_gpu))

    assert opened[0][6] == 1


def test_an_unknown_uuid_is_refused_before_the_export_is_opened(opened):
    reader = PayloadReader(no_gpu)

    with pytest.raises(RequestError, match="no GPU GPU-1"):
        load(cuda_export(), reader)

    assert opened == []
    assert not reader.opened


def test_one_cuda_payload_for_several_workers_is_refused_before_it_is_opened(opened):
    reader = PayloadReader(lambda uuid: 0, shared=True)

    with pytest.raises(RequestError, match=r"one CUDA payload for several workers.*one payload per rank"):
        load(cuda_export(), reader)

    assert opened == []
    assert not reader.opened


@pytest.mark.parametrize("count", [0, 14, 16])
def test_a_cuda_export_has_fifteen_arguments(opened, count):
    reader = PayloadReader(lambda uuid: 0)

    with pytest.raises(RequestError, match=f"takes 15 arguments, the payload gives {count}"):
        load(pickled(call(REDUCTIONS, "rebuild_cuda_tensor", *[b"N"] * count)), reader)

    assert opened == []
    assert not reader.opened


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"size": (5,)}, "its storage has 16"),
        ({"offset": 1}, "its storage has 16"),
        ({"nbytes": 12}, "its storage has 12"),
        ({"stride": (-1,)}, "not a size"),
        ({"size": 4}, "not a shape"),
        ({"nbytes": "16"}, "not a size"),
        ({"dtype": "float32"}, "not a dtype"),
        ({"device": -1}, "not a size"),
        ({"device": None}, "not a size"),
        ({"device": True}, "not a size"),
    ],
)
def test_a_cuda_export_with_wrong_arguments_is_refused_before_it_is_opened(opened, changed, words):
    reader = PayloadReader(lambda uuid: 0)

    with pytest.raises(RequestError, match=words):
        load(cuda_export(**changed), reader)

    assert opened == []
    assert not reader.opened


def expandable(version=2, process=7, page=2**21, pages=1, each=4):
    return bytes([version]) + b"e" + struct.pack("<i4xQQ", process, page, pages) + bytes(each * min(pages, 8))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"handle": None}, "without a handle has 16 bytes"),
        ({"handle": "text"}, "handle is 'text', not bytes"),
        ({"handle": b""}, "which torch does not write"),
        ({"handle": MEMORY[:-1]}, "which torch does not write"),
        ({"handle": MEMORY + b"x"}, "which torch does not write"),
        ({"handle": b"\x03x" + MEMORY[2:]}, "which torch does not write"),
        ({"handle": b"\x03e" + bytes(8)}, "which torch does not write"),
        ({"handle": expandable(process=0)}, "is of process 0"),
        ({"handle": expandable(process=-1)}, "is of process -1"),
        ({"handle": expandable(pages=2**60)}, "for 1152921504606846976 pages"),
        ({"handle": expandable(each=5)}, "has 31 bytes for 1 pages"),
        ({"handle": expandable(page=8)}, "claims 16 bytes of an expandable segment of 1 pages of 8 bytes"),
        ({"handle": expandable(page=2**60)}, "of an expandable segment"),
        ({"handle": expandable(), "storage_offset": 2**21}, "claims 2097168 bytes of an expandable segment"),
        ({"storage_offset": 2**44}, "more than any GPU has"),
        ({"storage_offset": -1}, "not a size"),
        ({"storage_offset": None}, "not a size"),
        ({"nbytes": 2**62}, "more than any GPU has"),
        ({"counter": None}, "counter is None, which is no name of torch's"),
        ({"counter": "/torch_1_2_3"}, "which is no name of torch's"),
        ({"counter": b"/sgld_lora_upload_x"}, "which is no name of torch's"),
        ({"counter": b"/torch_1_2_3/../x"}, "which is no name of torch's"),
        ({"counter": b"/torch_1_2_3\n"}, "which is no name of torch's"),
        ({"counter": b"/torch_1_" + b"2" * 100}, "which is no name of torch's"),
        ({"counter_offset": 10_000}, "number 10000, outside 0 to 9999"),
        ({"counter_offset": 2**40}, "outside 0 to 9999"),
        ({"counter_offset": -1}, "outside 0 to 9999"),
        ({"counter_offset": True}, "outside 0 to 9999"),
        ({"counter_offset": None}, "outside 0 to 9999"),
        ({"event": None}, "event is None, not a handle of 64 bytes"),
        ({"event": EVENT[1:]}, "not a handle of 64 bytes"),
        ({"event": EVENT.decode("latin1")}, "not a handle of 64 bytes"),
        ({"sync": 1}, "last argument is 1, not true or false"),
        ({"sync": None}, "last argument is None, not true or false"),
    ],
)
def test_what_torch_would_trust_in_a_cuda_export_is_checked_before_torch_is_called(opened, changed, words):
    reader = PayloadReader(lambda uuid: 0)

    with pytest.raises(RequestError, match=re.escape(words)):
        load(cuda_export(**changed), reader)

    assert opened == []
    assert not reader.opened


@pytest.mark.parametrize(
    "changed",
    [
        {"handle": bytes(64)},
        {"handle": b"\x02c" + bytes(64)},
        {"handle": expandable()},
        {"handle": expandable(pages=3, each=64)},
        {"handle": expandable(version=3, pages=2) + bytes(8)},
        {"counter": b"/torch_1_2", "counter_offset": 9999},
        {"sync": False},
        {"handle": None, "nbytes": 0, "size": (0,), "counter": None, "event": None, "sync": None},
    ],
    ids=["old torch", "torch 2.12", "pages", "fabric", "pages of a later torch", "old counter", "no event", "empty"],
)
def test_what_torch_writes_in_a_cuda_export_is_opened(opened, changed):
    load(cuda_export(**changed), PayloadReader(lambda uuid: 0))

    assert len(opened) == 1


@pytest.mark.parametrize(("nbytes", "taken"), [(8 * 10_000 + 64, True), (8 * 10_000, False), (96, False)])
def test_a_counter_is_in_a_file_of_counters(opened, nbytes, taken):
    """torch deletes a file whose count it takes for zero."""
    file = Path("/dev/shm/torch_1_2_5")
    file.write_bytes(bytes(nbytes))
    try:
        if taken:
            load(cuda_export(counter=b"/torch_1_2_5"), PayloadReader(lambda uuid: 0))
        else:
            with pytest.raises(RequestError, match=f"of {nbytes} bytes, which is no file of counters"):
                load(cuda_export(counter=b"/torch_1_2_5"), PayloadReader(lambda uuid: 0))
    finally:
        file.unlink()
    assert len(opened) == taken


def test_a_stock_trainers_name_of_a_cuda_export_leads_to_the_reader_too(opened):
    data = cuda_export(dtype=torch.bfloat16).replace(
        name(REDUCTIONS, "rebuild_cuda_tensor"),
        name("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"),
    )

    load(data, PayloadReader(lambda uuid: 2))

    assert opened[0][5:7] == (torch.bfloat16, 2)
