"""A trainer on a GPU: what its syncs take of device memory, and what crosses to an engine in another process.

The engine is the core's MergeEngine behind a pipe: it opens, merges and answers as a worker does, without sglang.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from sgld_lora_merge.trainer import DiffusionUpdateWeightFromTensorLoRA, DiffusionUpdateWeightFromTensorLoRAIPC
from sgld_lora_merge.wire.described import PayloadReader
from sgld_lora_merge.wire.payload import cuda_device_index, decode, named_tensors

MIB = 2**20
ROOT = Path(__file__).parents[2]
LAYERS, WIDTH, RANK = 285, 3840, 64  # A and B in bfloat16 are 267 MiB, as Z-Image's are

ENGINE = """
import json, sys, torch
from sgld_lora_merge import LinearModule, MergeEngine, ModuleUpdate, Precision, pair_up
from sgld_lora_merge.wire.payload import cuda_device_index, decode, named_tensors
from sgld_lora_merge.wire.described import PayloadReader

layers, width = map(int, sys.argv[1:])
factory = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
model = torch.nn.ModuleList(
    torch.nn.ModuleDict({"to_q": torch.nn.Linear(width, width, **factory)}) for _ in range(layers)
)
for block in model:
    torch.nn.init.zeros_(block["to_q"].weight)
engine = MergeEngine(lambda: {"transformer": LinearModule(model)}, Precision.FP16)


def update(fields):
    reader = PayloadReader(cuda_device_index)
    content = decode(fields["serialized_named_tensors"][0], reader)
    named = named_tensors(content, fields["load_format"], fields["target_modules"])["transformer"]
    if fields.get("weight_update_mode") != "lora_merge":
        return  # full weights are opened and dropped
    pairing = pair_up(named, alpha=fields["lora_alpha"], rank=fields["lora_rank"])
    plan = engine.plan([ModuleUpdate("transformer", pairing.pairs, faults=pairing.faults)])
    engine.commit(plan)
    engine.settle(plan, fields["weight_version"])


for line in sys.stdin:
    update(json.loads(line))
    torch.cuda.synchronize()
    answer = {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "first": float(model[0]["to_q"].weight.double().sum()),
    }
    print(json.dumps(answer), flush=True)
"""


class Layer(nn.Module):
    """A linear layer as PEFT wraps it."""

    def __init__(self, width, rank, *, base):
        super().__init__()
        factory = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        if base:
            self.base_layer = nn.Linear(width, width, **factory)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, rank, **factory)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, width, **factory)})
        self.scaling = {"default": 1.5}


class Piped:
    """An engine at the other end of a process's standard input and output."""

    def __init__(self, process, log):
        self.process, self.log, self.answers, self.fields = process, log, [], []

    def update(self, fields, file=None):
        self.fields.append(fields)
        self.process.stdin.write(json.dumps(fields) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.answers.append(json.loads(line))
        return {"success": True, "state": "live"}

    def ask(self, route, fields=None):
        return {"success": True}


def sides(block):
    return tuple(block["to_q"].get_submodule(f"lora_{side}.default").weight for side in "AB")


def arguments(buffer_size):
    return argparse.Namespace(
        lora_alpha=1.5 * RANK, lora_rank=RANK, update_weight_buffer_size=buffer_size, model_family=None,
        update_weight_target_module="transformer", diffusion_forward_dtype="bf16",
    )  # fmt: skip


def trained(layers, *, base=False):
    torch.manual_seed(0)
    return nn.ModuleList(nn.ModuleDict({"to_q": Layer(WIDTH, RANK, base=base)}) for _ in range(layers))


@contextmanager
def engine_of(layers, tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    log = tmp_path / "engine.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(layers), str(WIDTH)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, text=True, env=environment,
        )  # fmt: skip
    try:
        yield Piped(process, log)
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def test_i1_a_hundred_syncs_of_a_large_adapter_leave_the_memory_of_both_sides_flat(tmp_path):
    """267 MiB in one bucket over CUDA IPC; every sync sends other values, and the engine has them."""
    model = trained(LAYERS)
    a, b = sides(model[0])
    with engine_of(LAYERS, tmp_path) as engine:
        sync = DiffusionUpdateWeightFromTensorLoRAIPC(arguments(2 * 2**30), model, engine)
        mine = []
        for _ in range(100):
            with torch.no_grad():
                for block in model:
                    sides(block)[1].add_(0.01)
            report = sync.update_weights()
            assert (report.buckets, report.layers) == (1, LAYERS)
            assert report.nbytes > 267 * MIB
            with torch.no_grad():
                assert engine.answers[-1]["first"] == float(((b @ a) * 1.5).double().sum())
            mine.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        theirs = [answer["allocated"] for answer in engine.answers]
        assert len(set(mine[5:])) == 1
        assert max(theirs[5:]) - min(theirs[5:]) < MIB
        assert len({answer["reserved"] for answer in engine.answers[5:]}) == 1


@pytest.mark.parametrize("strategy", [DiffusionUpdateWeightFromTensorLoRAIPC, DiffusionUpdateWeightFromTensorLoRA])
def test_a_sync_takes_at_most_two_buckets_of_the_trainers_memory(strategy, tmp_path):
    """Every tensor is gathered, as a sharded one is: a copy while it is whole."""
    lora_only = strategy is DiffusionUpdateWeightFromTensorLoRAIPC
    layers = LAYERS if lora_only else 24
    weight = WIDTH * WIDTH * 2
    buffer = 16 * MIB if lora_only else 4 * weight
    model = trained(layers, base=not lora_only)
    with engine_of(layers, tmp_path) as engine:
        sync = strategy(arguments(buffer), model, engine, gather=torch.clone)
        sync.update_weights()  # the first one makes what every process has once
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        report = sync.update_weights()
        assert report.buckets >= 6
        # beside them: a layer that is being merged has its product, that times the scale, and the sum
        beside = MIB if lora_only else 3 * weight
        assert torch.cuda.max_memory_allocated() - before <= 2 * buffer + beside
        assert torch.cuda.memory_allocated() == before


def test_i2_a_sync_names_the_gpu_by_its_uuid(tmp_path):
    with engine_of(2, tmp_path) as engine:
        DiffusionUpdateWeightFromTensorLoRAIPC(arguments(MIB), trained(2), engine).update_weights()
    own = str(torch.cuda.get_device_properties(0).uuid)
    for fields in engine.fields:
        assert fields["payload_gpu_uuids"] == [own]
        assert own.encode() in base64.b64decode(fields["serialized_named_tensors"][0])


EXPANDABLE = """
import json, sys, torch
sys.path.insert(0, "tests/gpu")
from test_trainer_gpu import *
from sgld_lora_merge.trainer.memory import allocator_settings

model = trained(4)
segments = torch.cuda.memory_snapshot()
assert all(segment["is_expandable"] for segment in segments), "this process was to have expandable segments"

class Printing:
    def update(self, fields, file=None):
        sums = {f"0.to_q.lora_{s}": float(each.double().sum()) for s, each in zip("AB", sides(model[0]), strict=True)}
        print(json.dumps({"payload": fields["serialized_named_tensors"][0], "sums": sums}), flush=True)
        sys.stdin.readline()
        return {"success": True, "state": "live"}

    def ask(self, route, fields=None):
        return {"success": True}

DiffusionUpdateWeightFromTensorLoRAIPC(arguments(2**30), model, Printing()).update_weights()
assert "expandable_segments:True" in allocator_settings()
"""


def test_i3_a_trainer_with_expandable_segments_exports_plain_memory(tmp_path):
    settings = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    log = tmp_path / "sender.log"
    with log.open("wb") as errors:
        sender = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", EXPANDABLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, text=True, env={**os.environ, **settings, "PYTHONPATH": path}, cwd=ROOT,
        )  # fmt: skip
    try:
        line = sender.stdout.readline()
        assert line, log.read_text()
        sent = json.loads(line)
        content = decode(sent["payload"], PayloadReader(cuda_device_index))
        named = dict(named_tensors(content, "flattened_bucket", ["transformer"])["transformer"])
        assert {name: float(named[name].double().sum()) for name in sent["sums"]} == sent["sums"]
        del named, content
        sender.stdin.write("read\n")
        sender.stdin.close()
        assert sender.wait(60) == 0, log.read_text()
    finally:
        sender.kill()
        sender.wait()
        sender.stdout.close()
