"""What changes in sglang's worker processes: request handlers, everything that writes weights, and what outputs say."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from server_patches.patch import patch, stop
from sgld_lora_merge.errors import LoraMergeError

if TYPE_CHECKING:
    from server_patches.worker import MergeWorker

logger = logging.getLogger(__name__)

_worker: MergeWorker | None = None  # one scheduler in a process; None until it is made


@patch(
    "managers.scheduler.Scheduler.__init__",
    kind="AFTER",
    why="a request of ours needs a handler in every worker",
    until="sglang lets a plugin register request handlers",
)
def add_handlers(_result: None, scheduler: Any, *_: Any, **__: Any) -> None:
    global _worker
    from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import UpdateWeightFromTensorReqInput

    from server_patches.worker import make_merge_worker
    from server_patches.worker_request import MergeReq

    try:
        _worker = make_merge_worker(scheduler.worker)
    except LoraMergeError as error:
        stop(str(error))
    scheduler.request_handlers[MergeReq] = _worker.handle
    scheduler.request_handlers[UpdateWeightFromTensorReqInput] = _worker.handle_stock
    logger.info("sgld-lora-merge is in force: %s", _worker.engine.precision)
    _worker.states.compile_ahead()


@patch(
    "post_training.gpu_worker_post_training_mixin.GPUWorkerPostTrainingMixin.update_weights_from_tensor",
    kind="AROUND",
    why="an update by the scheduler's socket or in process is neither agreed on nor all or nothing",
    until="sglang's updater lets a plugin take an update mode",
)
def update_in_worker(original: Callable[..., tuple[bool, str]], gpu_worker: Any, req: Any) -> tuple[bool, str]:
    """Work on an update that code in the worker's own process asks for, as on one by HTTP."""
    if _worker is None:
        return original(gpu_worker, req)
    output = _worker.handle_stock([req]).output
    return output["success"], output["message"]


@patch(
    "post_training.weights_updater.WeightsUpdater.update_weights_from_tensor",
    kind="AROUND",
    why="its own merge would be taken for base weights",
    until="sglang's updater lets a plugin take an update mode",
)
def refuse_own_merge(original: Callable[..., tuple[bool, str]], *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Refuse sglang's own merge: it wraps layers, and what it merges would be taken for the base."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if given.get("weight_update_mode") is None:
        with nullcontext() if _worker is None else _worker.states.full_weights_change():
            return original(*args, **kwargs)
    return False, (
        "sgld-lora-merge merges adapters in this engine, and sglang's own merge is not run: hand the request to "
        "GPUWorker.update_weights_from_tensor, to the scheduler's socket or to POST /update_weights_from_tensor"
    )


@patch(
    "post_training.weights_updater._load_weights_into_module",
    kind="AROUND",
    why="a full load (tensor, disk, rollback) changes the base that merges start from",
    until="sglang announces weight loads to plugins",
)
def base_weights_change(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    if _worker is None:
        return original(module, *args, **kwargs)
    with _worker.base_weights_change(module):
        return original(module, *args, **kwargs)


@patch(
    "pipelines_core.lora.pipeline.LoRAPipeline.convert_to_lora_layers",
    "pipelines_core.lora.pipeline.LoRAPipeline.set_lora",
    "pipelines_core.lora.pipeline.LoRAPipeline.merge_lora_weights",
    kind="AROUND",
    why="it takes the live weights for the base, and would keep merged ones as such",
    until="sglang announces weight loads to plugins",
)
def own_adapters_change(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _worker is None:  # --lora-path: the pipeline is being made
        return original(*args, **kwargs)
    with _worker.states.own_adapters_change():
        return original(*args, **kwargs)


@patch(
    "pipelines_core.lora.pipeline.LoRAPipeline.unmerge_lora_weights",
    "pipelines_core.lora.pipeline.LoRAPipeline.deactivate_lora_weights",
    kind="BEFORE",
    why="it says success, and leaves an adapter of ours live",
    until="sglang lets plugins take part in its LoRA routes",
)
def remove_adapters(*_: Any, **__: Any) -> None:
    if _worker is not None:
        _worker.states.remove_adapters()


@patch(
    "pipelines_core.lora.pipeline.LoRAPipeline.get_lora_status",
    kind="AFTER",
    why="/v1/list_loras does not know adapters of ours",
    until="sglang lets plugins take part in its LoRA routes",
)
def list_adapters(status: dict[str, Any], *_: Any, **__: Any) -> None:
    from server_patches import worker_status

    if _worker is not None:
        worker_status.list_adapters(status, _worker.engine)


@patch(
    "managers.memory_managers.memory_occupation_controller.MemoryOccupationController.release_memory_occupation",
    kind="AROUND",
    why="it parks the merged weights, beside a base store that keeps its device memory",
    until="sglang announces sleep and wake to plugins",
)
def sleep(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _worker is None:
        return original(*args, **kwargs)
    return _worker.sleep(lambda: original(*args, **kwargs))


@patch(
    "managers.memory_managers.memory_occupation_controller.MemoryOccupationController.resume_memory_occupation",
    kind="AROUND",
    why="it brings back the weights that were parked, which are the base's",
    until="sglang announces sleep and wake to plugins",
)
def wake(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _worker is None:
        return original(*args, **kwargs)
    return _worker.wake(lambda: original(*args, **kwargs))


@patch(
    "managers.gpu_worker.GPUWorker.execute_forward",
    kind="AFTER",
    why="an output does not say which weights it was made with",
    until="sglang reports a weight_version",
)
def notice_generation(output: Any, *_: Any, **__: Any) -> None:
    _stamp(output)
    if _worker is not None:
        _worker.generated()


@patch(
    "managers.scheduler.Scheduler.return_result",
    kind="BEFORE",
    why="outputs that were split from a batch are new objects",
    until="sglang reports a weight_version",
)
def stamp_returned(_scheduler: Any, output: Any, *_: Any, **__: Any) -> None:
    _stamp(output)


def _stamp(output: Any) -> None:
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch

    from server_patches.version_stamp import stamp

    if _worker is not None and isinstance(output, OutputBatch):
        stamp(output, _worker.versions())
