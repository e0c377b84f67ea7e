"""A second engine plugin, for tests only: look at every rank's weights, and make one rank fail at one stage.

In force where PYTHONPATH holds this folder. Ranks are those of the whole engine, one replica after the other.
``POST /testhook`` with ``{"action": ...}``:

    weights  {"module": m}              sha256, shape and data_ptr of every parameter, by rank
    bytes    {"module": m, "name": n}   one parameter's raw bytes in base64, by rank
    fail     {"rank": r, "stage": s, "fault": f}   the next update fails on that rank: `STAGES`, `fault_of`
    reload   {"rank": r, "module": m}  what sglang does around loading a module, on that rank alone: it has the base
    full_shm                            the next upload finds no room in shared memory
    gc                                  calls of gc.collect in the workers since they started, by rank
"""

import base64
import dataclasses
import errno
import gc
import hashlib
import importlib.util
import os
import time
import types
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

ROOT = "sglang.multimodal_gen.runtime."
collected = 0
idle = 0  # how often in a row there was no request
library: Any = None  # operators live as long as this object


def register() -> None:
    broken = os.environ.get("SGLD_TESTHOOK_REMOVE")
    if broken:  # a future sglang in which this function has another name
        owner, name = broken.rsplit(".", 1)
        module, _, cls = owner.rpartition(".")
        delattr(getattr(importlib.import_module(module), cls), name)
    define_cpu_norms()
    HookRegistry.register(ROOT + "entrypoints.http_server.create_app", add_route, HookType.AFTER)
    HookRegistry.register(ROOT + "managers.scheduler.Scheduler.__init__", add_handler, HookType.AFTER)
    HookRegistry.register(ROOT + "managers.scheduler.Scheduler.recv_reqs", nap_if_idle, HookType.AFTER)


def nap_if_idle(requests: list, *_: Any) -> None:
    """Sleep while there is no request: schedulers of several ranks, and all before 0.5.23, spin.

    The longer there was nothing, the longer a nap: two ranks that look every 5 ms take a third of a core.
    """
    global idle
    idle = 0 if requests else idle + 1
    if idle:
        time.sleep(0.005 if idle < 100 else 0.1)


def define_cpu_norms() -> None:
    """Define the two operators of sgl_kernel that Wan's blocks call on a CPU; the tests' engine has no sgl_kernel."""
    global library
    import torch

    if library is not None or importlib.util.find_spec("sgl_kernel") is not None:
        return

    def norm_scale_shift(x, weight, bias, scale, shift, norm_type, eps):  # type: ignore[no-untyped-def]
        wide = x.float()
        weight, bias = (None if each is None else each.float() for each in (weight, bias))
        if norm_type == "layer":
            normed = torch.nn.functional.layer_norm(wide, wide.shape[-1:], weight, bias, eps)
        else:
            normed = torch.nn.functional.rms_norm(wide, wide.shape[-1:], weight, eps)
        return (normed * (1 + scale.float()) + shift.float()).to(x.dtype)

    def residual_norm_scale_shift(residual, x, gate, *norm):  # type: ignore[no-untyped-def]
        summed = residual + (x if gate is None else x * gate).to(residual.dtype)
        return norm_scale_shift(summed, *norm), summed

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    norm = "Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, str norm_type, float eps"
    library.define(f"fused_norm_scale_shift_cpu(Tensor x, {norm}) -> Tensor")
    residual = "Tensor residual, Tensor x, Tensor? gate"
    library.define(f"fused_scale_residual_norm_scale_shift_cpu({residual}, {norm}) -> (Tensor, Tensor)")
    library.impl("fused_norm_scale_shift_cpu", norm_scale_shift, "CPU")
    library.impl("fused_scale_residual_norm_scale_shift_cpu", residual_norm_scale_shift, "CPU")


def request_class() -> type:
    """Return the request class, made late: sglang's runtime must not be imported while plugins load."""
    if "TestReq" not in globals():
        from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import UpdateWeightFromTensorReqInput

        fields = [("body", dict, dataclasses.field(default_factory=dict))]
        made = dataclasses.make_dataclass("TestReq", fields, bases=(UpdateWeightFromTensorReqInput,))
        made.__module__ = __name__  # it is pickled by name on its way to the workers
        globals()["TestReq"] = made
    return globals()["TestReq"]


def add_route(app: Any, *_: Any, **__: Any) -> None:
    from fastapi import Request
    from sglang.multimodal_gen.runtime.scheduler_client import async_scheduler_client

    cls = request_class()

    @app.post("/testhook")
    async def testhook(request: Request):
        req = cls([], body=await request.json())
        if req.body["action"] == "full_shm":
            return {"ranks": [fill_shared_memory()]}
        endpoints = async_scheduler_client.server_args.scheduler_endpoints
        replicas = [await async_scheduler_client._forward_one(endpoint, req, None) for endpoint in endpoints]
        return {"ranks": [rank for replica in replicas for rank in replica.output["ranks"]]}


def add_handler(_: None, scheduler: Any, *__: Any, **___: Any) -> None:
    scheduler.request_handlers[request_class()] = lambda reqs: handle(scheduler.worker, reqs[0].body)
    original = gc.collect

    def counted(*args: Any) -> int:
        global collected
        collected += 1
        return original(*args)

    gc.collect = counted


def handle(gpu_worker: Any, body: dict) -> Any:
    from sglang.multimodal_gen.runtime.distributed.parallel_state import get_replica_group, get_world_group
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch

    from server_patches.rank_group import gather

    replica = get_replica_group()
    mine: Any = None
    if body["action"] == "weights":
        mine = {
            name: {
                "sha256": sha256(parameter),
                "shape": list(parameter.shape),
                "data_ptr": getattr(parameter, "_local_tensor", parameter).data_ptr(),
            }
            for name, parameter in gpu_worker.pipeline.modules[body["module"]].named_parameters()
        }
    elif body["action"] == "bytes":
        parameter = gpu_worker.pipeline.modules[body["module"]].get_parameter(body["name"])
        mine = base64.b64encode(raw(parameter)).decode()
    elif body["action"] == "reload":
        if body["rank"] == get_world_group().rank_in_group:
            from server_patches import worker_patches

            with worker_patches._worker.base_weights_change(gpu_worker.pipeline.modules[body["module"]]):
                pass
    elif body["action"] == "gc":
        mine = collected
    elif body["rank"] == get_world_group().rank_in_group:
        fail_once(body["stage"], body.get("fault", "exception"), body.get("sender", []))
    return OutputBatch(output={"ranks": gather(mine, replica, 60)})


def raw(parameter: Any) -> bytes:
    import torch

    local = getattr(parameter, "_local_tensor", parameter.data)  # FSDP: this rank's rows
    return local.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def sha256(parameter: Any) -> str:
    """sglang's own recipe."""
    start = str(parameter.dtype).encode() + repr(tuple(parameter.shape)).encode()
    return hashlib.sha256(start + raw(parameter)).hexdigest()


# Stage -> whose function it is, its name, and whether the fault comes after it has done its work. From the parsing of a
# payload to the end of an update:
STAGES = {
    "before_plan": ("worker.states", "refuse", False),
    "open": ("request_reader", "decode", False),
    "opened": ("request_reader", "decode", True),
    "pair": ("request_reader", "pair_up", True),
    "plan": ("engine", "plan", True),
    "verify": ("verify", "sampled", False),
    "compare": ("verify", "sha256", False),
    "agree": ("rank_group", "gather", False),
    "commit": ("engine", "begin", False),
    "written": ("engine", "begin", True),
    "revert": ("engine", "revert", False),
    "undo": ("engine", "revert", False),
    "settle": ("engine", "settle", False),
}


def fault_of(name: str, stage: str, sender: list[int]) -> None:
    """Cause the fault of a stage: "exception", "memory", "kill" of this rank, "silence", or "sender": its processes."""
    import signal

    import torch

    if name == "exception":
        raise RuntimeError(f"injected at {stage}")
    if name == "memory":
        raise torch.OutOfMemoryError(f"injected at {stage}")
    if name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "silence":
        time.sleep(float(os.environ["SGLD_LORA_AGREEMENT_TIMEOUT_S"]) + 5)
    if name == "sender":
        for process in sender:  # the trainer, and the manager of its shared memory, which outlives it
            os.kill(process, signal.SIGKILL)
        for export in Path("/dev/shm").glob(f"torch_{sender[0]}_*"):
            export.unlink()


def fail_once(stage: str, fault: str, sender: list[int]) -> None:
    from server_patches import rank_group, request_reader, verify, worker_patches

    worker = worker_patches._worker
    owners = {"worker.states": worker.states, "engine": worker.engine}
    owners |= {"request_reader": request_reader, "rank_group": rank_group, "verify": verify}
    if stage == "revert":  # which nothing reaches but a failed commit
        fail_once("written", fault, sender)
    place, name, after = STAGES[stage]
    owner = owners[place]
    original = getattr(owner, name)

    def once(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        result = original(*args, **kwargs) if after else None
        if stage == "written":
            result()
        fault_of(fault, stage, sender)
        return result if after else original(*args, **kwargs)

    setattr(owner, name, once)


def fill_shared_memory() -> None:
    """Make the next write of an upload fail for lack of room."""
    from server_patches import upload_file

    def full(*_: Any) -> int:
        upload_file.os = os
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    upload_file.os = types.SimpleNamespace(**{**vars(os), "write": full})
