"""Put the routes, the guard and the version header into sglang's app, and check that they are in force."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from sglang.multimodal_gen.runtime.entrypoints import http_server
from sglang.multimodal_gen.runtime.scheduler_client import async_scheduler_client

from server_patches.access_rules import limits_from
from server_patches.backport import give_failure
from server_patches.coordinator import Coordinator
from server_patches.endpoints import include_first
from server_patches.guard import Gate, Guard
from server_patches.openapi import described
from server_patches.replicas import NoAnswer, Replicas, WorkersGone
from server_patches.routes import MergeRoutes
from server_patches.upload import Uploads
from server_patches.upload_file import remove_leftovers
from server_patches.version_header import VersionMiddleware
from server_patches.worker_request import MergeReq
from sgld_lora_merge.settings import settings_from
from sgld_lora_merge.wire.schema import STATUS_ROUTE, UPDATE_ROUTE


def install(app: FastAPI, server_args: Any) -> MergeRoutes:
    """Add the routes to sglang's app, in front of its own route of the same path, and the guard around all of them.

    Raises:
        LoraMergeError: a variable is invalid; another endpoint answers a route of the plugin; a weight route of
            sglang's is missing or cannot be guarded.
    """
    settings = settings_from()
    replicas = Replicas(ask_replica, server_args.dp_size)
    coordinator = Coordinator(replicas, settings.staging_timeout_s, refusal_of(server_args))
    uploads = Uploads(settings.max_uploads, settings.max_uploads_bytes, settings.upload_idle_s)
    routes = MergeRoutes(coordinator, uploads)
    give_failure(app, async_scheduler_client)
    router = routes.router()
    include_first(app, router)
    app.openapi = partial(described, app.openapi, router, UPDATE_ROUTE)  # type: ignore[method-assign]  # as FastAPI has it
    app.add_middleware(VersionMiddleware)
    guard = Guard(limits_from(settings), lambda: async_scheduler_client.failure_reason)
    guard.cover(app.router)
    app.add_middleware(Gate, router=app.router, guard=guard)
    http_server.SERVER_WARMUP_BYPASS_PATHS = (*http_server.SERVER_WARMUP_BYPASS_PATHS, STATUS_ROUTE)
    remove_leftovers()
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with inner(app) as state:
            first_refresh = asyncio.create_task(coordinator.refresh())
            yield state
            first_refresh.cancel()

    app.router.lifespan_context = lifespan
    return routes


def refusal_of(server_args: Any) -> str | None:
    """Return why an engine with these arguments takes no updates; None where it takes them."""
    role = getattr(getattr(server_args, "disagg_role", None), "name", "MONOLITHIC")
    if role == "MONOLITHIC" and not getattr(server_args, "disagg_mode", False):
        return None
    return f"this engine has the disaggregated role {role.lower()}; only an engine without disaggregation takes updates"


async def ask_replica(replica: int, req: MergeReq) -> dict[str, Any]:
    """Ask one replica. sglang's own fan-out would return only one replica's answer.

    Raises:
        NoAnswer: it did not answer.
    """
    client = async_scheduler_client
    try:
        response = await client._forward_one(client.server_args.scheduler_endpoint_for(replica), req, None)
    except Exception as error:
        if client.failure_reason is not None:
            raise WorkersGone(client.failure_reason) from error
        raise NoAnswer(
            f"the workers did not answer: {error}. What became of the request is not known: see {STATUS_ROUTE}, and "
            "repeat the same body if it has an update_id"
        ) from error
    if not isinstance(response.output, dict) or "snapshot" not in response.output:
        raise NoAnswer(f"the workers sent no usable answer: {response.error}")
    output: dict[str, Any] = response.output
    return output
