"""CUDA IPC between two processes that know nothing of each other but a payload."""

from __future__ import annotations

import base64
import codecs
import io
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.wire.described import PayloadReader
from sgld_lora_merge.wire.payload import cuda_device_index, decode, named_tensors

SENDER = """
import json, sys, torch
from sgld_lora_merge import pack
held = None
for line in sys.stdin:
    step = int(line)
    if step < 0:
        break
    held = None
    torch.cuda.ipc_collect()
    torch.manual_seed(step)
    named = [(f"layer{i}.lora_{s}", torch.randn(256, 64, device="cuda")) for i in range(40) for s in "AB"]
    sums = {name: float(tensor.double().sum()) for name, tensor in named}
    payload, held = pack({"m": named})
    del named
    memory = torch.cuda.memory_allocated()
    print(json.dumps({"payload": payload, "sums": sums, "memory": memory}), flush=True)
"""


@pytest.fixture
def sender(tmp_path):
    with (tmp_path / "sender.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )

        def ask(step):
            process.stdin.write(f"{step}\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.write("-1\n")
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def read(payload):
    reader = PayloadReader(cuda_device_index)
    content = decode(payload, reader)
    assert reader.opened
    return named_tensors(content, "flattened_bucket", ["m"])["m"]


def test_a_bucket_crosses_by_handle(sender):
    sent = sender(1)
    received = dict(read(sent["payload"]))
    assert all(tensor.is_cuda for tensor in received.values())
    assert {name: float(tensor.double().sum()) for name, tensor in received.items()} == sent["sums"]


def test_i1_a_hundred_updates_leave_the_senders_memory_flat(sender):
    def once(step):
        sent = sender(step)
        received = read(sent["payload"])
        total = sum(float(tensor.double().sum()) for _, tensor in received)
        assert total == pytest.approx(sum(sent["sums"].values()))
        return sent["memory"]

    memory = [once(step) for step in range(100)]
    assert max(memory[2:]) == min(memory[2:])


def test_i2_the_handle_names_the_gpu_and_an_unknown_one_is_an_error(sender):
    payload = sender(1)["payload"]
    own = str(torch.cuda.get_device_properties(0).uuid)
    data = base64.b64decode(payload)
    assert own.encode() in data
    other = base64.b64encode(data.replace(own.encode(), own[::-1].replace("-", "0").encode())).decode()
    reader = PayloadReader(cuda_device_index)
    with pytest.raises(RequestError, match="which this worker does not see; it sees"):
        decode(other, reader)
    assert not reader.opened
    read(payload)


HANDLE, STORAGE_OFFSET, COUNTER, COUNTER_OFFSET, EVENT = 7, 9, 11, 12, 13  # of rebuild_cuda_tensor's arguments

# Reads a payload of its parent's with changes, in a process of its own, which a wrong argument must not end.
READER = """
import gc, json, sys, torch
from sgld_lora_merge.wire import allowed_globals
from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.wire.payload import cuda_device_index, decode
from sgld_lora_merge.wire.described import PayloadReader

payload, changes = json.loads(sys.stdin.read())
honest = allowed_globals._cuda_tensor

def changed(reader, *arguments):
    arguments = list(arguments)
    for place, value in changes:
        arguments[place] = bytes.fromhex(value) if isinstance(value, str) else value
    return honest(reader, *arguments)

allowed_globals._cuda_tensor = changed
reader = PayloadReader(cuda_device_index)
try:
    content = decode(payload, reader)
    print("read", float(content["m"]["flattened_tensor"].sum()))
    del content
except RequestError as error:
    print("refused", reader.opened, error)
gc.collect()
torch.cuda.ipc_collect()
print("alive", float(torch.ones(4, device="cuda").sum()))
"""


def read_changed(payload, *changes):
    process = subprocess.run(
        [sys.executable, "-c", READER],
        input=json.dumps([payload, changes]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    outcome, alive = process.stdout.splitlines()
    assert alive == "alive 4.0"
    return outcome


class _Arguments(pickle.Unpickler):
    def find_class(self, module, name):
        if name == "rebuild_cuda_tensor":
            return lambda *arguments: arguments
        if (module, name) == ("_codecs", "encode"):
            return codecs.encode
        return _Anything


class _Anything:
    def __init__(self, *_):
        pass

    def __setstate__(self, _):
        pass


def arguments_of(payload):
    return _Arguments(io.BytesIO(base64.b64decode(payload))).load()["m"]["flattened_tensor"]


def test_what_torch_exports_has_the_form_that_is_checked(sender):
    """Or a change of torch's would be noticed by users first."""
    arguments = arguments_of(sender(1)["payload"])
    assert len(arguments[HANDLE]) == 66
    assert arguments[HANDLE][1:2] == b"c"
    assert len(arguments[EVENT]) == 64
    assert re.fullmatch(rb"/torch_\d+_\d+(_\d+)?", arguments[COUNTER])
    counters = Path("/dev/shm") / arguments[COUNTER].decode().removeprefix("/")
    assert counters.stat().st_size == 8 * 10_000 + 64
    assert 0 <= arguments[COUNTER_OFFSET] < 10_000


@pytest.mark.parametrize("name", ["/sgld_lora_canary", "/torch_1_2_3"])
def test_a_counter_in_another_file_is_refused_and_the_file_stays(sender, name):
    """torch takes the count in front of the file for zero, and deletes it."""
    file = Path("/dev/shm") / name.removeprefix("/")
    file.write_bytes(bytes(4096))
    try:
        outcome = read_changed(sender(1)["payload"], [COUNTER, name.encode().hex()])
        assert outcome.startswith("refused False")
        assert file.read_bytes() == bytes(4096)
    finally:
        file.unlink()


@pytest.mark.parametrize(
    ("place", "value"),
    [(COUNTER_OFFSET, 2**40), (COUNTER_OFFSET, 10_000), (COUNTER_OFFSET, -1), (STORAGE_OFFSET, 2**60),
     (HANDLE, b"\3c".hex()), (HANDLE, (b"\2e" + bytes(24)).hex()), (EVENT, b"".hex()), (COUNTER, b"/torch_x".hex())],
)  # fmt: skip
def test_an_export_that_lies_is_refused_and_the_process_lives(sender, place, value):
    """The counter's offset of 2^40 was a SIGSEGV."""
    assert read_changed(sender(1)["payload"], [place, value]).startswith("refused False")


def test_an_export_that_is_not_changed_is_read_in_the_same_way(sender):
    assert read_changed(sender(1)["payload"]).startswith("read ")


def test_an_export_of_expandable_segments_is_read():
    """Skipped where this machine does not let one process take another's file descriptors, which torch needs."""
    sends = (
        "import sys, torch; from sgld_lora_merge import pack; "
        "sent = pack({'m': [('x', torch.ones(2**22, device='cuda'))]}); print(sent[0], flush=True); sys.stdin.read()"
    )
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with subprocess.Popen(
        [sys.executable, "-c", sends], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        payload = process.stdout.readline().strip()
        handle = arguments_of(payload)[HANDLE]
        assert handle[1:2] == b"e"
        try:
            content = decode(payload, PayloadReader(cuda_device_index))
        except RequestError as error:
            if "pidfd" not in str(error):
                raise
            pytest.skip(str(error))
        else:
            assert float(content["m"]["flattened_tensor"].view(torch.float32)[: 2**22].sum()) == 2.0**22
        finally:
            process.stdin.close()


def test_one_payload_for_several_workers_is_refused_before_it_is_opened(sender):
    payload = sender(1)["payload"]
    reader = PayloadReader(cuda_device_index, shared=True)
    with pytest.raises(RequestError, match="one payload per rank"):
        decode(payload, reader)
    assert not reader.opened
    read(payload)
