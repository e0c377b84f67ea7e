"""The routes: they parse, ask the workers, and keep the record. Nothing here sees a tensor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from sglang.multimodal_gen.runtime.entrypoints import http_server
from sglang.multimodal_gen.runtime.scheduler_client import async_scheduler_client

from server_patches.guard import Guard, limits_from_environment
from server_patches.record import Record, digest
from server_patches.requests import MergeReq
from sgld_lora_merge.errors import ConflictError, LoraMergeError, RequestError
from sgld_lora_merge.protocol import (
    LORA_MERGE,
    ErrorAnswer,
    ResetRequest,
    RollbackRequest,
    UpdateAnswer,
    UpdateRequest,
    check_update,
    parse_fields,
    parse_json,
)

logger = logging.getLogger(__name__)

UPDATE_ROUTE = "/update_weights_from_tensor"
STATUS_ROUTE = "/lora_merge/status"
NOT_BUILT = ("verify", "commit", "abort", "upload", "metrics")


class MergeRoutes:
    """All routes of one server process.

    Args:
        ask: sends a request to the workers and returns rank 0's output.
        dp_size: replicas of the engine.
    """

    def __init__(self, ask: Callable[[MergeReq], Awaitable[dict[str, Any]]], dp_size: int) -> None:
        self.record = Record()
        self._ask_workers = ask
        self._dp_size = dp_size
        self._one_at_a_time = asyncio.Lock()

    def router(self) -> APIRouter:
        router = APIRouter(tags=["lora_merge"])
        body = {"requestBody": {"content": {"application/json": {"schema": UpdateRequest.model_json_schema()}}}}
        responses: dict[int | str, dict[str, Any]] = {
            200: {"model": UpdateAnswer},
            **{status: {"model": ErrorAnswer} for status in (400, 401, 403, 409, 413, 415, 422, 500, 503)},
        }
        router.post(UPDATE_ROUTE, responses=responses, openapi_extra=body)(self.update)
        router.get(STATUS_ROUTE)(self.status)
        router.post("/lora_merge/reset")(self.reset)
        router.post("/lora_merge/rollback")(self.rollback)
        for name in NOT_BUILT:
            router.api_route(f"/lora_merge/{name}", methods=["GET", "POST"], include_in_schema=False)(self.not_built)
        return router

    async def update(self, request: Request) -> JSONResponse:
        """Update weights: LoRA pairs to merge, or full weights."""
        return await _whole(self._update(request))

    async def status(self) -> JSONResponse:
        """What is live in every module, from this process's record; it answers during a generation too."""
        return JSONResponse(self.record.status(), status_code=200 if self.record.failed is None else 503)

    async def reset(self, request: Request) -> JSONResponse:
        """Bring the base weights back, bit for bit."""
        return await _whole(self._step_back(request, "reset", ResetRequest))

    async def rollback(self, request: Request) -> JSONResponse:
        """Bring back what was live before the last update or reset, scales included; one step is kept."""
        return await _whole(self._step_back(request, "rollback", RollbackRequest))

    async def not_built(self, request: Request) -> JSONResponse:
        return _error(501, f"{request.url.path} is part of the contract but not built yet")

    async def refresh(self) -> None:
        """Ask the workers for their state; it waits behind a running generation."""
        try:
            self.record.heard(await self._ask_workers(MergeReq([], operation="status")))
        except Exception as error:
            logger.warning("the workers' LoRA merge state is not known: %s", error)

    async def _update(self, request: Request) -> JSONResponse:
        update: UpdateRequest | None = None
        body = b""
        try:
            body = await request.body()
            update, ignored = parse_fields(UpdateRequest, parse_json(body))
            check_update(update)
            self._refuse_replicas()
            async with self._one_at_a_time:
                if (answered := self._answered_before(update.update_id, body)) is not None:
                    return answered
                output = await self._ask(_to_workers(update))
                if output["status"] == 200:
                    answer = _live_answer(update, output, ignored)
                    self.record.finished(update.update_id, body, 200, answer, "")
                    return JSONResponse(answer)
            self.record.finished(update.update_id, body, output["status"], {}, output.get("reason", "engine"))
            return _error(output["status"], output["message"], output["payload_opened"])
        except LoraMergeError as error:
            self.record.finished(None, body, error.status, {}, error.reason)
            payloads = len(update.serialized_named_tensors) if update is not None else 0
            return _error(error.status, f"{error}. Nothing was changed", [False] * payloads)

    async def _step_back(
        self, request: Request, operation: Literal["reset", "rollback"], body: type[ResetRequest | RollbackRequest]
    ) -> JSONResponse:
        try:
            fields, ignored = parse_fields(body, parse_json(await request.body() or b"{}"))
            self._refuse_replicas()
            async with self._one_at_a_time:
                modules = getattr(fields, "target_modules", None)
                output = await self._ask(MergeReq([], operation=operation, target_modules=modules))
            if output["status"] != 200:
                raise _as_error(output)
        except LoraMergeError as error:
            self.record.failures[error.reason] += 1
            return _error(error.status, str(error))
        return JSONResponse(_merge_answer(output, ignored))

    def _answered_before(self, update_id: str | None, body: bytes) -> JSONResponse | None:
        """The answer that this very body got before; a lost answer can be retried."""
        named = self.record.named.get(update_id) if update_id is not None else None
        if named is None:
            return None
        if named.digest != digest(body):
            raise ConflictError(f"update_id {update_id!r} is finished, and was sent with another body")
        return JSONResponse(named.answer, status_code=named.status)

    async def _ask(self, req: MergeReq) -> dict[str, Any]:
        output = await self._ask_workers(req)
        self.record.heard(output)
        if output["failed"] is not None:
            # sglang's own way of saying so: /health and every POST answer 503 from now on
            async_scheduler_client.mark_failed(output["failed"])
        return output

    def _refuse_replicas(self) -> None:
        if self._dp_size > 1:
            raise RequestError(f"--dp-size {self._dp_size}: updates of several replicas are not built yet")


def install(app: FastAPI, server_args: Any) -> None:
    """Add the routes to sglang's app, in front of its own route of the same path, and the guard around all of them."""
    routes = MergeRoutes(_ask_scheduler, server_args.dp_size)
    app.state.sgld_lora_merge = routes
    app.include_router(routes.router())
    # the last included router is looked at first: routes match in order
    app.router.routes.insert(0, app.router.routes.pop())
    app.add_middleware(Guard, limits=limits_from_environment(), failure=lambda: async_scheduler_client.failure_reason)
    http_server.SERVER_WARMUP_BYPASS_PATHS = (*http_server.SERVER_WARMUP_BYPASS_PATHS, STATUS_ROUTE)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with inner(app) as state:
            first_look = asyncio.create_task(routes.refresh())
            yield state
            first_look.cancel()

    app.router.lifespan_context = lifespan


async def _ask_scheduler(req: MergeReq) -> dict[str, Any]:
    try:
        response = await async_scheduler_client.forward(req)
    except Exception as error:
        raise LoraMergeError(f"the workers did not answer: {error}") from error
    if not isinstance(response.output, dict) or "snapshot" not in response.output:
        raise LoraMergeError(f"the workers did not understand: {response.error}")
    output: dict[str, Any] = response.output
    return output


def _to_workers(update: UpdateRequest) -> MergeReq:
    return MergeReq(
        serialized_named_tensors=list(update.serialized_named_tensors),
        payload_gpu_uuids=update.payload_gpu_uuids,
        load_format=update.load_format,
        target_modules=update.modules,
        weight_update_mode=update.weight_update_mode,
        lora_alpha=update.lora_alpha,
        lora_rank=update.lora_rank,
        whole=update.update_id is not None,
        allow_partial=bool(update.allow_partial),
        layer_scaling=update.layer_scaling,
        weight_version=update.weight_version,
    )


def _live_answer(update: UpdateRequest, output: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    if update.weight_update_mode == LORA_MERGE:
        return _merge_answer(output, ignored)
    full = ("message", "weight_version", "payload_opened")
    return {"success": True, **{name: output[name] for name in full}, "ignored_fields": ignored}


def _merge_answer(output: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    known = {name: value for name, value in output.items() if name in UpdateAnswer.model_fields}
    return UpdateAnswer(**known, ignored_fields=ignored).model_dump()


def _as_error(output: dict[str, Any]) -> LoraMergeError:
    error = LoraMergeError(output["message"])
    error.status, error.reason = output["status"], output.get("reason", "engine")
    return error


def _error(status: int, message: str, payload_opened: list[bool] | None = None) -> JSONResponse:
    return JSONResponse(
        ErrorAnswer(message=message, payload_opened=payload_opened or []).model_dump(), status_code=status
    )


async def _whole(work: Any) -> JSONResponse:
    """Run to the end even if the client goes away: the record must know what became of an update."""
    return await asyncio.shield(asyncio.ensure_future(work))
