"""The hooks themselves, one small function each. Which function each one changes, and why, is in `compat`."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

from sgld_lora_merge.errors import LoraMergeError

if TYPE_CHECKING:
    from server_patches.routes import MergeRoutes
    from server_patches.worker import MergeWorker

logger = logging.getLogger(__name__)

# One of each in a process: sglang has one scheduler in a worker process and one app in the HTTP process.
_worker: MergeWorker | None = None
_routes: MergeRoutes | None = None


def stop(sentence: str) -> NoReturn:
    """End this process: an engine that serves without the plugin would train nothing and say nothing.

    ``SystemExit``, because sglang logs a plugin's other exceptions and starts without it.
    """
    sys.exit(f"sgld-lora-merge: {sentence}")


def add_routes(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
    global _routes
    from server_patches.routes import install

    app = original(server_args, *args, **kwargs)
    try:
        install(app, server_args)
    except LoraMergeError as error:
        stop(str(error))
    _routes = app.state.sgld_lora_merge
    return app


def add_handler(_result: None, scheduler: Any, *_: Any, **__: Any) -> None:
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


def base_weights_change(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    if _worker is None:
        return original(module, *args, **kwargs)
    with _worker.base_weights_change(module):
        return original(module, *args, **kwargs)


def update_in_worker(original: Callable[..., tuple[bool, str]], gpu_worker: Any, req: Any) -> tuple[bool, str]:
    """Work on an update that code in the worker's own process asks for, as on one by HTTP."""
    if _worker is None:
        return original(gpu_worker, req)
    output = _worker.handle_stock([req]).output
    return output["success"], output["message"]


def refuse_own_merge(original: Callable[..., tuple[bool, str]], *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Refuse sglang's own merge: it wraps layers, and what it merges would be taken for the base."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if given.get("weight_update_mode") is None:
        return original(*args, **kwargs)
    return False, (
        "sgld-lora-merge merges adapters in this engine, and sglang's own merge is not run: hand the request to "
        "GPUWorker.update_weights_from_tensor, to the scheduler's socket or to POST /update_weights_from_tensor"
    )


def own_adapters_change(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _worker is None:  # --lora-path: the pipeline is being made
        return original(*args, **kwargs)
    with _worker.states.own_adapters_change():
        return original(*args, **kwargs)


def take_out(*_: Any, **__: Any) -> None:
    if _worker is not None:
        _worker.states.take_out()


def tell_adapters(status: dict[str, Any], *_: Any, **__: Any) -> None:
    from server_patches import worker_status

    if _worker is not None:
        worker_status.tell_adapters(status, _worker.engine)


def sleep(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _worker is None:
        return original(*args, **kwargs)
    return _worker.sleep(lambda: original(*args, **kwargs))


def wake(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _worker is None:
        return original(*args, **kwargs)
    return _worker.wake(lambda: original(*args, **kwargs))


def stamp_output(output: Any, *_: Any, **__: Any) -> None:
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch

    from server_patches.version_header import stamp

    if _worker is not None and isinstance(output, OutputBatch):
        stamp(output, _worker.versions())


def notice_generation(output: Any, *args: Any, **kwargs: Any) -> None:
    stamp_output(output, *args, **kwargs)
    if _worker is not None:
        _worker.generated()


def stamp_returned(_scheduler: Any, output: Any, *_: Any, **__: Any) -> None:
    stamp_output(output)


async def keep_stamp(
    original: Callable[..., Awaitable[Any]], store: Any, key: str, fields: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    from server_patches.version_header import keep

    keep(fields)
    return await original(store, key, fields, *args, **kwargs)


async def note_stamp(original: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    from server_patches.version_header import note_kept

    item = await original(*args, **kwargs)
    note_kept(item)
    return item


async def notice_answer(
    original: Callable[..., Awaitable[Any]], client: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import UpdateWeightFromTensorReqInput
    from sglang.multimodal_gen.runtime.scheduler_client import _CONTROL_REQ_TYPES

    from server_patches.version_header import note

    if type(batch) is UpdateWeightFromTensorReqInput and _routes is not None:
        return await _routes.adopt(batch)
    result = await original(client, batch, *args, **kwargs)
    if not isinstance(batch, _CONTROL_REQ_TYPES):
        note(result)
    elif _routes is not None:
        await _routes.refresh()
    return result
