"""One of two ranks that train a LoRA with FSDP2 over gloo; ``python two_ranks.py RANK MEETING_FILE SCENARIO``.

The engine is a fake of two GPUs that knows the base weights, and compares what it is asked to verify with them.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import timedelta

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sgld_lora_merge.merge.kernels import word_sum
from sgld_lora_merge.trainer import DiffusionUpdateWeightFromTensorLoRAIPC, SyncError, gather, handles, samples
from sgld_lora_merge.wire.described import PayloadReader
from sgld_lora_merge.wire.payload import decode

ARGUMENTS = argparse.Namespace(
    lora_alpha=6.0, lora_rank=4, update_weight_buffer_size=1, update_weight_target_module="transformer",
    diffusion_forward_dtype="bf16", model_family=None,
)  # fmt: skip


def whole_sum(weight):
    words = weight.bfloat16().view(torch.int16).to(torch.int64).flatten()
    total = int(word_sum(words)) % 2**64
    return f"el64:bfloat16:{weight.shape[0]}x{weight[0].numel()}:{total:016x}"


class Engine:
    def __init__(self, base):
        self.base, self.sent, self.asked, self.fault = base, [], [], None

    def update(self, fields, file=None):
        if self.fault:
            raise self.fault
        for payload in fields["serialized_named_tensors"]:
            decode(payload, PayloadReader(lambda uuid: 0))
        self.sent.append(fields)
        modules = {"transformer": {"merge_mode": "merge"}}
        return {"success": True, "state": "live", "merge_precision": "fp32", "modules": modules}

    def ask(self, route, fields=None):
        if route.endswith("resolve"):
            places = {
                name: {"shape": [w.shape[0], w[0].numel()], "dtype": "bfloat16"}
                if (w := self.base.get(name)) is not None else {"fault": "unknown layer"}
                for name in fields["modules"]["transformer"]
            }  # fmt: skip
            return {"modules": {"transformer": places}}
        if route.endswith("verify") and fields["weights"] == "base":
            asked = {name: each["weight_sum"] for name, each in fields["modules"]["transformer"].items()}
            self.asked.append(asked)
            wrong = [name for name, told in asked.items() if told != whole_sum(self.base[name])]
            if wrong:
                raise SyncError(f"{len(wrong)} layers differ: {wrong}")
        if route.endswith("verify") and fields["weights"] == "live":
            self.asked.append(fields["modules"]["transformer"])
        return {"success": True, "modules": {}, "updates": []}


class Block(nn.Module):
    def __init__(self, columns, rows):
        super().__init__()
        self.to_q = nn.Linear(columns, rows, bias=False)


def plain():
    torch.manual_seed(0)
    return nn.ModuleDict({
        "one": Block(9, 7), "patch": nn.Conv2d(3, 5, 2),
        "two": Block(8, 6), "head": nn.Linear(6, 5),
    })  # fmt: skip


def trained():
    named = plain().named_parameters()
    base = {name.removesuffix(".weight"): each.detach() for name, each in named if "bias" not in name}
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["to_q"], init_lora_weights=False)
    model = peft.get_peft_model(plain(), config)
    for layer in model.base_model.model.values():
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    return model, base


def failing(owner, name, at_call=1):
    """Replace a function by one that fails at one of its calls; return what puts it back."""
    original, calls = getattr(owner, name), []

    def fails(*args, **kwargs):
        calls.append(name)
        if len(calls) == at_call:
            raise MemoryError(f"out of memory in {name}")
        return original(*args, **kwargs)

    setattr(owner, name, fails)
    return lambda: setattr(owner, name, original)


def sync_of(model, engine, **options):
    return DiffusionUpdateWeightFromTensorLoRAIPC(ARGUMENTS, model, engine, gpus_per_engine=2, **options)


def base(rank):
    """Shards of rows, uneven and of a convolution, have the sums of the whole weights that the engine has."""
    model, weights = trained()
    engine = Engine(weights)
    sync = sync_of(model, engine)
    sync.update_weights()
    assert rank or [set(asked) for asked in engine.asked] == [set(weights)], engine.asked
    sync.update_weights()
    assert rank or len(engine.asked) == 1  # nothing has written to them since
    with torch.no_grad():
        model.base_model.model["head"].weight.mul_(2)  # no layer of the adapter
    with pytest.raises(SyncError, match=r"nothing was sent: .*\['head'\]"):
        sync.update_weights()
    assert rank or len(engine.sent) == 4
    sync_of(model, engine, allow_unsynced=["head.weight"]).update_weights()
    weights["patch"] = weights["patch"][:, :, :1]
    with pytest.raises(SyncError, match=r"'patch' has shape \[5, 12\], the engine's \[5, 6\]"):
        sync_of(model, engine, allow_unsynced=["head.weight"]).update_weights()


def stages(rank):
    """Whatever fails on one rank, and wherever, both raise at once, and the next sync works."""
    model, weights = trained()
    engine = Engine(weights)
    sync = sync_of(model, engine, verify=True)
    stages = {
        "read": lambda: failing(type(sync._contents), "read"),
        "sum": lambda: failing(sys.modules["sgld_lora_merge.trainer.base"], "read_sums"),
        "gather the first bucket": lambda: failing(gather, "_filled"),
        "gather the second bucket": lambda: failing(gather, "_filled", 3),
        "wait": lambda: failing(gather._Parts, "finish"),
        "pack": lambda: failing(handles, "pack", 2),
        "fingerprint": lambda: failing(handles, "payload_fingerprint"),
        "sample": lambda: failing(samples, "held_block"),
        "take samples": lambda: failing(samples, "_taken"),
    }
    for number, (stage, fail) in enumerate(stages.items()):
        failing_rank = number % 2
        sync._compared = None  # or the base weights are compared the first time only
        put_back = fail() if rank == failing_rank else None
        begun = time.monotonic()
        try:
            with pytest.raises((MemoryError, SyncError), match="out of memory in") as caught:
                sync.update_weights()
        except pytest.fail.Exception:
            raise AssertionError(f"{stage}: nothing failed") from None
        assert isinstance(caught.value, MemoryError) == (rank == failing_rank), stage
        assert time.monotonic() - begun < 10, stage
        if put_back:
            put_back()
        sync.update_weights()
    engine.fault = ZeroDivisionError("send")  # on the rank that calls
    with pytest.raises((ZeroDivisionError, SyncError), match="send"):
        sync.update_weights()
    engine.fault = None
    before = sync.version
    assert sync.update_weights().version == before + 2  # the failed attempt has used one up
    numbers = [int(fields["weight_version"]) for fields in engine.sent]
    assert numbers == sorted(numbers)


if __name__ == "__main__":
    torch.set_num_threads(1)
    own = int(sys.argv[1])
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[2]}", rank=own, world_size=2, timeout=timedelta(seconds=60)
    )
    {"base": base, "stages": stages}[sys.argv[3]](own)
    dist.destroy_process_group()
