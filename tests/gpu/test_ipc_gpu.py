"""CUDA IPC between two processes that know nothing of each other but a payload."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import pytest
import torch

from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.payload import cuda_device_index, decode, named_tensors
from sgld_lora_merge.unpickler import PayloadReader

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


def test_one_payload_for_several_workers_is_refused_before_it_is_opened(sender):
    payload = sender(1)["payload"]
    reader = PayloadReader(cuda_device_index, shared=True)
    with pytest.raises(RequestError, match="one payload per rank"):
        decode(payload, reader)
    assert not reader.opened
    read(payload)
