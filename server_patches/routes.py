"""The routes: each one reads a request, asks the coordinator, and writes one line to the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from sglang.multimodal_gen.runtime.entrypoints import http_server
from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import UpdateWeightFromTensorReqInput
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch

from server_patches import metrics
from server_patches.answers import Answer, error_answer, refused_answer
from server_patches.coordinator import Coordinator
from server_patches.ledger import NamedBucket
from server_patches.openapi import file_body, json_body
from server_patches.request_log import LogEntry, line
from server_patches.upload import Uploads
from server_patches.version_stamp import label_of, version_text
from server_patches.worker_request import MergeReq, from_stock, from_upload, to_workers
from sgld_lora_merge.errors import LoraMergeError, RequestError
from sgld_lora_merge.wire.schema import (
    ABORT_ROUTE,
    COMMIT_ROUTE,
    METRICS_ROUTE,
    RESET_ROUTE,
    RESOLVE_ROUTE,
    ROLLBACK_ROUTE,
    STATUS_ROUTE,
    UPDATE_ROUTE,
    UPLOAD_ROUTE,
    VERIFY_ROUTE,
    ErrorAnswer,
    LayerExpectation,
    Model,
    ResetRequest,
    ResolveRequest,
    RollbackRequest,
    TransactionRequest,
    UpdateAnswer,
    UpdateRequest,
    UploadQuery,
    VerifyRequest,
    check_update,
    check_upload,
    parse_fields,
    parse_json,
)

logger = logging.getLogger(__name__)


class MergeRoutes:
    """All routes of one server process.

    Attributes:
        coordinator: sends changes to the workers.

    Args:
        uploads: receives the files of uploads.
    """

    def __init__(self, coordinator: Coordinator, uploads: Uploads | None = None) -> None:
        self.coordinator = coordinator
        self._uploads = uploads or Uploads()

    def router(self) -> APIRouter:
        router = APIRouter(tags=["lora_merge"])
        errors: dict[int | str, dict[str, Any]] = {
            status: {"model": ErrorAnswer} for status in (400, 401, 403, 409, 413, 415, 422, 500, 503)
        }
        answers = {200: {"model": UpdateAnswer}, **errors}
        router.post(UPDATE_ROUTE, responses=answers, openapi_extra=json_body(UpdateRequest))(self.update)
        of_upload = answers | {status: {"model": ErrorAnswer} for status in (408, 429)}
        router.post(UPLOAD_ROUTE, responses=of_upload, openapi_extra=file_body(UploadQuery))(self.upload)
        for route, model, act in (
            (RESET_ROUTE, ResetRequest, self.reset),
            (ROLLBACK_ROUTE, RollbackRequest, self.rollback),
            (VERIFY_ROUTE, VerifyRequest, self.verify),
            (COMMIT_ROUTE, TransactionRequest, self.commit),
            (ABORT_ROUTE, TransactionRequest, self.abort),
        ):
            router.post(route, responses=errors, openapi_extra=json_body(model))(act)
        router.get(STATUS_ROUTE)(self.status)
        router.get(METRICS_ROUTE, response_class=PlainTextResponse)(self.metrics)
        router.post(RESOLVE_ROUTE, responses=errors, openapi_extra=json_body(ResolveRequest))(self.resolve)
        router.get("/model_info", include_in_schema=False)(self.model_info)
        return router

    async def update(self, request: Request) -> JSONResponse:
        """Update weights: LoRA pairs to merge, or full weights."""
        return await self._answered("update", partial(self._update, request))

    async def upload(self, request: Request) -> JSONResponse:
        """Update weights from a safetensors file in the body: a trainer on another machine, or curl."""
        return await self._answered("upload", partial(self._upload, request))

    async def status(self) -> JSONResponse:
        """What is live in every module, from this process's record; it answers during a generation too."""
        await self.coordinator.refresh_if_idle()
        record = self.coordinator.record
        return JSONResponse(record.status(), status_code=200 if record.problem is None else 503)

    async def metrics(self) -> Response:
        """Prometheus text, from this process's record."""
        await self.coordinator.refresh_if_idle()
        return Response(metrics.text(self.coordinator.record), media_type=metrics.CONTENT_TYPE)

    async def reset(self, request: Request) -> JSONResponse:
        """Bring the base weights back, bit for bit."""

        async def act(fields: ResetRequest, _: LogEntry) -> dict[str, Any]:
            return await self.coordinator.reset(fields.target_modules, fields.adapter)

        return await self._act("reset", request, ResetRequest, act)

    async def rollback(self, request: Request) -> JSONResponse:
        """Bring back what was live before the last update or reset, scales included; one step is kept."""

        async def act(_: RollbackRequest, __: LogEntry) -> dict[str, Any]:
            return await self.coordinator.rollback()

        return await self._act("rollback", request, RollbackRequest, act)

    async def commit(self, request: Request) -> JSONResponse:
        """Let a complete update go live that was sent with ``commit: false``."""

        async def act(fields: TransactionRequest, entry: LogEntry) -> dict[str, Any]:
            entry.update_id = fields.update_id
            return await self.coordinator.commit(fields.update_id, entry)

        return await self._act("commit", request, TransactionRequest, act)

    async def abort(self, request: Request) -> JSONResponse:
        """Drop an update that is not live yet."""

        async def act(fields: TransactionRequest, entry: LogEntry) -> dict[str, Any]:
            entry.update_id = fields.update_id
            return await self.coordinator.abort(fields.update_id)

        return await self._act("abort", request, TransactionRequest, act)

    async def verify(self, request: Request) -> JSONResponse:
        """Compare what is live with what it should be, whole layers by checksum or single elements."""

        async def act(fields: VerifyRequest, _: LogEntry) -> dict[str, Any]:
            expected = _expectations(fields)
            output = await self.coordinator.ask(
                MergeReq([], operation="verify", expected=expected, weights=fields.weights)
            )
            return {name: output[name] for name in ("success", "message", "mismatched", "checked")}

        return await self._act("verify", request, VerifyRequest, act)

    async def resolve(self, request: Request) -> JSONResponse:
        """Say where layers would land, and which would not."""

        async def act(fields: ResolveRequest, _: LogEntry) -> dict[str, Any]:
            output = await self.coordinator.ask(MergeReq([], operation="resolve", layers=fields.modules))
            return {"success": True, "message": output["message"], "modules": output["resolved"]}

        return await self._act("resolve", request, ResolveRequest, act)

    async def model_info(self, request: Request) -> JSONResponse:
        """sglang's own answer, and the version of every module that has one."""
        info = await http_server.model_info_endpoint(request)
        modules = self.coordinator.record.modules.items()
        versions = {name: label_of(module["weight_version"], module["versions"]) for name, module in modules}
        live = {name: version for name, version in versions.items() if version is not None}
        return JSONResponse({**info, "weight_version": version_text(live) if live else None, "weight_versions": live})

    async def adopt(self, stock: UpdateWeightFromTensorReqInput) -> OutputBatch:
        """Work on sglang's own request, from its broker or its own route, as on ours, and answer as sglang does."""

        async def work(entry: LogEntry) -> Answer:
            try:
                req = from_stock(stock)
                entry.nbytes = sum(map(len, req.serialized_named_tensors))
                return await self.coordinator.update(req, None, entry, [])
            except LoraMergeError as error:
                return refused_answer(error, entry, payloads=0)

        status, answer = await self._logged(LogEntry("update"), work)
        return OutputBatch(output=answer, error=None if status == 200 else answer["message"])

    async def _answered(self, event: str, work: Callable[[LogEntry], Awaitable[Answer]]) -> JSONResponse:
        status, answer = await self._logged(LogEntry(event), work)
        return JSONResponse(answer, status_code=status)

    async def _logged(self, entry: LogEntry, work: Callable[[LogEntry], Awaitable[Answer]]) -> Answer:
        """Run work to its end even if the client goes away: the record must know what became of an update."""
        return await asyncio.shield(asyncio.ensure_future(self._run_and_log(entry, work)))

    async def _run_and_log(self, entry: LogEntry, work: Callable[[LogEntry], Awaitable[Answer]]) -> Answer:
        record = self.coordinator.record
        try:
            status, answer = await work(entry)
        except Exception as error:  # a body over the guard's limit, or a fault of the plugin: both get their line too
            cause = _innermost(error)
            status = getattr(cause, "status", 500)
            entry.reason = getattr(cause, "reason", "engine")
            record.failure(entry.reason)
            logger.info("%s", line(entry, status, {"message": f"{type(cause).__name__}: {cause}"}))
            raise
        if entry.reason is not None:
            record.failure(entry.reason)
        logger.info("%s", line(entry, status, answer))
        return status, answer

    async def _update(self, request: Request, entry: LogEntry) -> Answer:
        payloads = 0
        try:
            body = await request.body()
            entry.nbytes = len(body)
            update, ignored = parse_fields(UpdateRequest, parse_json(body))
            entry.update_id, entry.weight_version = update.update_id, update.weight_version
            payloads = len(update.serialized_named_tensors)
            check_update(update)
            bucket = NamedBucket.of_update(update, body)
            return await self.coordinator.update(to_workers(update), bucket, entry, ignored)
        except LoraMergeError as error:
            return refused_answer(error, entry, payloads)

    async def _upload(self, request: Request, entry: LogEntry) -> Answer:
        try:
            query, ignored = parse_fields(UploadQuery, dict(request.query_params))
            entry.update_id, entry.weight_version = query.update_id, query.weight_version
            check_upload(query)
            async with self._uploads.received(request.stream(), entry.count) as upload:
                bucket = NamedBucket.of_upload(query, upload.digest)
                return await self.coordinator.update(from_upload(query, upload.path), bucket, entry, ignored)
        except LoraMergeError as error:
            return refused_answer(error, entry, payloads=0)

    async def _act(
        self,
        event: str,
        request: Request,
        model: type[Model],
        act: Callable[[Model, LogEntry], Awaitable[dict[str, Any]]],
    ) -> JSONResponse:
        """Answer a route without a payload: parse, act, answer."""

        async def work(entry: LogEntry) -> Answer:
            try:
                fields, ignored = parse_fields(model, parse_json(await request.body() or b"{}"))
                async with self.coordinator.one_at_a_time:
                    return 200, {**await act(fields, entry), "ignored_fields": ignored}
            except LoraMergeError as error:
                entry.reason = error.reason
                return error_answer(error.status, str(error))

        return await self._answered(event, work)


def _expectations(fields: VerifyRequest) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the expected values of each layer, by module.

    Raises:
        RequestError: a layer has several kinds of expectation or none, or there is no layer.
    """
    expected = {
        name: {layer: each.model_dump() for layer, each in layers.items()} for name, layers in fields.modules.items()
    }
    wrong = [
        f"modules.{module}.{layer} needs one of {', '.join(LayerExpectation.model_fields)}"
        for module, layers in expected.items()
        for layer, each in layers.items()
        if sum(value is not None for value in each.values()) != 1
    ]
    if wrong or not any(expected.values()):
        raise RequestError(*(wrong or ["modules names no layer to verify"]))
    return expected


def _innermost(error: BaseException) -> BaseException:
    """Return the error inside the exception groups that middleware has put around it."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
