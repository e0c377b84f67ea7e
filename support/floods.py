"""Requests that would take far more memory or time than was sent, of any length, and how what they take is measured.

A flood is one kind of object, opcode, name or field, as often as it fits.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from sgld_lora_merge.adapter.file import read_adapter
from sgld_lora_merge.adapter.pairing import pair_up
from sgld_lora_merge.errors import LoraMergeError, RequestError
from sgld_lora_merge.wire.described import PayloadReader
from sgld_lora_merge.wire.payload import FLATTENED_BUCKET, named_tensors
from sgld_lora_merge.wire.schema import (
    ResolveRequest,
    UpdateRequest,
    VerifyRequest,
    check_update,
    parse_fields,
    parse_json,
)
from sgld_lora_merge.wire.unpickler import load
from support.hostile import ENTRY, REDUCTIONS, get, named, pickled, put, storage, stream_of, tensor, value

Flood = Callable[[int], bytes]

FRONT = b"\x80\x04"
LONG_NAME = b"X" + (100_000).to_bytes(4, "little") + b"a" * 100_000
SPECIAL = 40  # index in the memo of what a flood names; the small ones are the pickler's own


def repeated(unit: bytes, before: bytes = b"", after: bytes = b"") -> Flood:
    return lambda n: FRONT + before + unit * (n // len(unit)) + after + b"."


def listed(unit: bytes, before: bytes = b"") -> Flood:
    return repeated(unit, before + b"](", b"e")


def _again(part: bytes, each: bytes = b"h%c" % SPECIAL) -> Flood:
    return listed(each, put(part, SPECIAL))


def _one_element() -> bytes:
    return tensor(storage(stream_of(torch.ones(2**16))), (1, 1), (1, 1))


def _tensors(name: Callable[[int], bytes]) -> Flood:
    def flood(n: int) -> bytes:
        items = (b"\x8c" + bytes([len(name(i))]) + name(i) + get(SPECIAL) + b"\x86" for i in range(n // 24))
        return FRONT + put(_one_element(), SPECIAL) + b"](" + b"".join(items) + b"e."

    return flood


def _entries(name: bytes, shape: bytes) -> Flood:
    """Metadata of one name and one shape list that all entries share."""

    def flood(n: int) -> bytes:
        keys = ("name", "shape", "dtype", "start_idx", "end_idx", "numel")
        values = (get(SPECIAL), get(SPECIAL + 1), value("uint8"), b"K\x00", b"K\x01", b"K\x01")
        state = b"}(" + b"".join(value(k) + v for k, v in zip(keys, values, strict=True)) + b"u"
        made = put(state, SPECIAL + 2) + put(named(*ENTRY), SPECIAL + 3)
        entry = b"h%c)\x81h%cb" % (SPECIAL + 3, SPECIAL + 2)
        metadata = value("metadata") + b"](" + entry * (n // len(entry)) + b"e"
        flat = value("flattened_tensor") + tensor(storage(stream_of(torch.zeros(8, dtype=torch.uint8))))
        bucket = value("transformer") + b"}(" + metadata + flat + b"u"
        return FRONT + put(name, SPECIAL) + put(shape, SPECIAL + 1) + made + b"}(" + bucket + b"u."

    return flood


def _layout(text: Callable[[int], str]) -> Flood:
    def flood(n: int) -> bytes:
        flat = value("flattened_tensor") + tensor(storage(stream_of(torch.zeros(8, dtype=torch.uint8))))
        return pickled(b"}(" + value("transformer") + b"}(" + value("layout") + value(text(n)) + flat + b"uu")

    return flood


def _text(before: str, unit: str, after: str) -> Callable[[int], str]:
    return lambda n: before + unit * (n // len(unit)) + after


STREAM = stream_of(torch.ones(8))
PICKLES: dict[str, Flood] = {
    **{f"opcode {code!r}": repeated(code, b"N") for code in (b"]", b"}", b"(", b")", b"N", b"\x88", b"\x94", b"\x85")},
    **{f"opcode {code!r}": repeated(code, b"N") for code in (b"K\x01", b"M\0\1", b"J\0\0\0\1", b"G\0\0\0\0\0\0\0\1")},
    **{f"list of {code!r}": listed(code) for code in (b"]", b"}", b"M\0\1", b"\x8c\2ab", b"C\2ab", b"}\x8c\1xNs")},
    "memo, numbered": lambda n: FRONT + b"N" + b"".join(b"r" + i.to_bytes(4, "little") for i in range(n // 5)) + b".",
    "a text with one wide character": lambda n: FRONT + b"X" + n.to_bytes(4, "little") + "😀".encode() + b"a" * (n - 4)
    + b".",
    "20,000 items of one name of 100 kB, no tensors": _again(LONG_NAME, b"h%cN\x86" % SPECIAL),
    "one tuple": _again(b"N\x85"),
    "one list": _again(b"]"),
    "one size of 64 dimensions": _again(value((1,) * 64), named("torch", "Size") + b"h%c\x85R" % SPECIAL),
    "handlers of CUDA exports": listed(
        b"h%ch%c\x93" % (SPECIAL, SPECIAL + 1),
        put(value(REDUCTIONS), SPECIAL) + put(value("rebuild_cuda_tensor"), SPECIAL + 1),
    ),
    "entries without fields": listed(b"h%c)\x81" % SPECIAL, put(named(*ENTRY), SPECIAL)),
    "entries of one long name": _entries(LONG_NAME, value((1,))),
    "entries of one shape of 20,000": _entries(value("x"), b"](" + b"K\x01" * 20_000 + b"e"),
    "entries of one short name": _entries(value("x"), value((1,))),
    "one tensor under many names": _tensors(lambda i: b"%08d" % i),
    "one tensor as many pairs": _tensors(lambda i: b"%08d.lora_%c" % (i // 2, b"AB"[i % 2])),
    "a pickle in a storage": lambda n: pickled(tensor(storage(STREAM[:27] + b"\x80\x02" + b"]" * n + b"."))),
    "layout of []": _layout(_text("[", "[],", "[]]")),
    "layout of {}": _layout(_text("[", "{},", "{}]")),
    "layout of 1": _layout(_text("[", "1,", "1]")),
    "layout of 1.5": _layout(_text("[", "1.5,", "1]")),
    "layout of good entries": _layout(_text("[", '["x","uint8",[],0,1],', '["x","uint8",[],0,1]]')),
    "layout of bad entries": _layout(_text("[", '["x","uint8",[],0,9],', '["x","uint8",[],0,9]]')),
    "layout with one long name": _layout(_text('[["a', ".lora_A.x", '\\n","uint8",[],0,1]]')),
    "a name that asks a pattern much": lambda n: pickled(
        b"](" + value("a" + ".lora_A.x" * (n // 9) + "\n") + _one_element() + b"\x86e"
    ),
}  # fmt: skip


def _json(before: str, unit: str, after: str) -> Flood:
    """Each ``%d`` in the unit is a number of its own."""

    def flood(n: int) -> bytes:
        count = n // (len(unit) + 5)
        units = [unit % i for i in range(count)] if "%d" in unit else [unit] * count
        return (before + ",".join(units) + after).encode()

    return flood


UPDATE = '{"serialized_named_tensors":["AA=="],'
BODIES: dict[str, Flood] = {
    "payloads that are numbers": _json('{"serialized_named_tensors":[', "1", "]}"),
    "an unknown list of lists": _json('{"x":[', "[]", "]}"),
    "an unknown list of objects": _json('{"x":[', '{"a":1}', "]}"),
    "unknown fields": _json(UPDATE, '"%d":1', "}"),
    "one long unknown field": lambda n: f'{UPDATE}"{"a" * n}":1}}'.encode(),
    "a long version": lambda n: f'{UPDATE}"weight_version":"{"a" * n}"}}'.encode(),
    "modules": _json(UPDATE + '"target_modules":[', '"a"', "]}"),
    "modules that are numbers": _json(UPDATE + '"target_modules":[', "1", "]}"),
    "scales": _json(UPDATE + '"layer_scaling":{"transformer":{', '"%d":1', "}}}"),
    "scales that are texts": lambda n: _json(UPDATE + '"layer_scaling":{"transformer":{', '"%d":"x"', "}}}")(
        min(n, 200_000)
    ),
    "samples that are numbers": _json('{"modules":{"transformer":{"q":{"samples":[', "1", "]}}}}"),
    "fields of an expectation": _json('{"modules":{"transformer":{"q":{', '"%d":1', "}}}}"),
    "expectations that are none": lambda n: _json('{"modules":{"transformer":{', '"%d":{"a":1,"b":1}', "}}}")(
        min(n, 400_000)
    ),
    "layers that are numbers": _json('{"modules":{"transformer":[', "1", "]}}"),
}


def _file(header: Callable[[int], Mapping[str, object]]) -> Flood:
    def flood(n: int) -> bytes:
        text = json.dumps(header(n), separators=(",", ":")).encode()
        return len(text).to_bytes(8, "little") + text

    return flood


EMPTY = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
FILES: dict[str, Flood] = {
    "empty tensors": _file(lambda n: {f"{i:x}": EMPTY for i in range(n // 60)}),
    "one long name": _file(lambda n: {"a" + ".lora_A.x" * (n // 9) + "\n": EMPTY}),
    "scales": _file(
        lambda n: {"__metadata__": {"layer_scaling": json.dumps({f"{i:x}": 1 for i in range(n // 12)})}, "x": EMPTY}
    ),
    "lists for scales": _file(lambda n: {"__metadata__": {"layer_scaling": "[" + "[]," * (n // 3) + "1]"}, "x": EMPTY}),
}


def read_pickle(data: bytes) -> None:
    """A payload to pairs, as a worker reads it.

    Raises:
        RequestError: it is refused.
    """
    content = load(data, PayloadReader(int))
    bucket = isinstance(content, dict) and isinstance(content.get("transformer"), dict)
    named = named_tensors(content, FLATTENED_BUCKET if bucket else None, ["transformer"])["transformer"]
    if faults := pair_up(named, alpha=1.0).faults:
        raise RequestError(*faults)


def read_body(data: bytes) -> None:
    """A JSON body, as each of the routes reads it.

    Raises:
        LoraMergeError: it is refused.
    """
    for model in (VerifyRequest, ResolveRequest, UpdateRequest):
        try:
            request, _ = parse_fields(model, parse_json(data))
        except LoraMergeError:
            if model is UpdateRequest:
                raise
        else:
            if isinstance(request, UpdateRequest):
                check_update(request)


def read_file(data: bytes) -> None:
    """An uploaded file to pairs.

    Raises:
        RequestError: it is refused.
    """
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        named, scaling = read_adapter(file.name)
        if faults := pair_up(named, layer_scaling=scaling, alpha_required=True).faults:
            raise RequestError(*faults)


ALL = {
    **{f"pickle: {name}": (flood, read_pickle) for name, flood in PICKLES.items()},
    **{f"body: {name}": (flood, read_body) for name, flood in BODIES.items()},
    **{f"file: {name}": (flood, read_file) for name, flood in FILES.items()},
}


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def peak(process: int | str = "self") -> int:
    """The most bytes of a process that were in memory at once since its peak was forgotten."""
    with open(f"/proc/{process}/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def forget_peak(process: int | str = "self") -> None:
    """Let the peak of a process begin with what it has in memory now."""
    with open(f"/proc/{process}/clear_refs", "w") as file:
        file.write("5")


def measured(name: str, nbytes: int) -> dict[str, object]:
    """What one flood takes, in a fork of this process.

    Returns:
        ``sent`` and ``taken`` (bytes at the most, beside what was sent), ``seconds`` of its own time, ``message`` of
        the refusal, or None where it was read.
    """
    flood, read = ALL[name]
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            data = flood(nbytes)
            gc.collect()
            signal.alarm(60)
            # the flood itself was made of parts: what is looked at begins after it
            forget_peak()
            before, message = resident(), None
            started = time.process_time()
            try:
                read(data)
            except LoraMergeError as error:
                message = str(error)
            seconds = time.process_time() - started
            found = {"sent": len(data), "taken": peak() - before, "seconds": seconds, "message": message}
            os.write(writing, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return dict(json.loads(text)) if text else {"sent": nbytes, "taken": None, "seconds": None, "message": "it died"}


@contextmanager
def bounded(sent: int, seconds: float = 2.0) -> Iterator[None]:
    """The oracle of the fuzz targets: fail where reading so many bytes took more time or memory than it should.

    Its inputs are small, so it asks for less than is promised: what torch and the allocator take at once, and what the
    dearest objects take for each byte. Of memory, it sees what exceeds the peak so far.
    """
    before, started = peak(), time.process_time()
    yield
    taken, took = peak() - before, time.process_time() - started
    assert taken <= 2**24 + 128 * sent, f"{sent} bytes took {taken} bytes of memory"
    assert took <= seconds, f"{sent} bytes took {took:.1f} s"


def main() -> None:
    """Print what every flood of so many bytes takes, a line of JSON each: ``python -m support.floods BYTES``."""
    torch.set_num_threads(1)
    for name in ALL:
        print(json.dumps({"flood": name, **measured(name, int(sys.argv[1]))}), flush=True)


if __name__ == "__main__":
    main()
