"""What changes in sglang's HTTP process: its app, its client of the workers, and its stores of jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from server_patches.patch import patch, stop
from sgld_lora_merge.errors import LoraMergeError

if TYPE_CHECKING:
    from server_patches.routes import MergeRoutes

_routes: MergeRoutes | None = None  # one app in a process


@patch(
    "entrypoints.http_server.create_app",
    kind="AROUND",
    why="its route for updates from tensors loses messages and fields; the /lora_merge routes are new",
    until="sglang's route accepts a handler of a plugin",
)
def add_routes(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
    global _routes
    from server_patches.installation import install

    app = original(server_args, *args, **kwargs)
    try:
        _routes = install(app, server_args)
    except LoraMergeError as error:
        stop(str(error))
    return app


@patch(
    "scheduler_client.AsyncSchedulerClient.forward",
    kind="AROUND",
    why="the stamp has to reach the HTTP answer, and sglang's own weight routes change what the status must show",
    until="sglang announces weight loads to plugins",
)
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
        await _routes.coordinator.refresh()
    return result


@patch(
    "entrypoints.openai.stores.AsyncDictStore.upsert",
    "entrypoints.openai.stores.AsyncDictStore.update_fields",
    kind="AROUND",
    why="a job's or a file's later requests do not say which weights made it",
    until="sglang reports a weight_version",
)
async def keep_stamp(
    original: Callable[..., Awaitable[Any]], store: Any, key: str, fields: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    from server_patches.version_header import keep

    keep(fields)
    return await original(store, key, fields, *args, **kwargs)


@patch(
    "entrypoints.openai.stores.AsyncDictStore.get",
    kind="AROUND",
    why="a job's or a file's later requests do not say which weights made it",
    until="sglang reports a weight_version",
)
async def note_stamp(original: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    from server_patches.version_header import note_kept

    item = await original(*args, **kwargs)
    note_kept(item)
    return item
