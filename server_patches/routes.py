"""The routes: they parse, ask the workers, and keep the record. Nothing here sees a tensor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from sglang.multimodal_gen.runtime.entrypoints import http_server
from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import UpdateWeightFromTensorReqInput
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch
from sglang.multimodal_gen.runtime.scheduler_client import async_scheduler_client

from server_patches import metrics
from server_patches.backport import give_failure
from server_patches.endpoints import include_first
from server_patches.engine_record import Record, digest
from server_patches.guard import UPLOAD_ROUTE, Gate, Guard, limits_from
from server_patches.openapi import described, file_body, json_body
from server_patches.replicas import NoAnswer, Replicas, WorkersGone
from server_patches.request_log import Entry, line
from server_patches.settings import refusal
from server_patches.upload import Uploads, remove_leftovers
from server_patches.version_header import VersionTeller, label_of, version_text
from server_patches.worker_request import MergeReq, from_stock, to_workers
from sgld_lora_merge.errors import LoraMergeError, RequestError
from sgld_lora_merge.merge.staging import Bucket
from sgld_lora_merge.printable import printable
from sgld_lora_merge.settings import settings_from
from sgld_lora_merge.wire.schema import (
    LORA_MERGE,
    ErrorAnswer,
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

Answer = tuple[int, dict[str, Any]]  # HTTP status and JSON body

UPDATE_ROUTE = "/update_weights_from_tensor"
STATUS_ROUTE = "/lora_merge/status"
PATIENCE_S = 0.1  # of a status for the workers' own word; an idle worker gives it in 1 to 5 ms


class MergeRoutes:
    """All routes of one server process.

    Args:
        replicas: the workers.
        staging_timeout_s: an update that waits longer for its next bucket or its commit is abandoned.
        refusal: why this engine takes no updates at all.
        uploads: those that arrive.
    """

    def __init__(
        self, replicas: Replicas, staging_timeout_s: float, refusal: str | None = None, uploads: Uploads | None = None
    ) -> None:
        self.record = Record()
        self._replicas = replicas
        self._staging_timeout_s = staging_timeout_s
        self._refusal = refusal
        self._uploads = uploads or Uploads()
        self._one_at_a_time = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Future[None] | None = None

    def router(self) -> APIRouter:
        router = APIRouter(tags=["lora_merge"])
        errors: dict[int | str, dict[str, Any]] = {
            status: {"model": ErrorAnswer} for status in (400, 401, 403, 409, 413, 415, 422, 500, 503)
        }
        answers = {200: {"model": UpdateAnswer}, **errors}
        router.post(UPDATE_ROUTE, responses=answers, openapi_extra=json_body(UpdateRequest))(self.update)
        of_upload = answers | {status: {"model": ErrorAnswer} for status in (408, 429)}
        router.post(UPLOAD_ROUTE, responses=of_upload, openapi_extra=file_body(UploadQuery))(self.upload)
        for name, model, act in (
            ("reset", ResetRequest, self.reset),
            ("rollback", RollbackRequest, self.rollback),
            ("verify", VerifyRequest, self.verify),
            ("commit", TransactionRequest, self.commit),
            ("abort", TransactionRequest, self.abort),
        ):
            router.post(f"/lora_merge/{name}", responses=errors, openapi_extra=json_body(model))(act)
        router.get(STATUS_ROUTE)(self.status)
        router.get("/lora_merge/metrics", response_class=PlainTextResponse)(self.metrics)
        router.post("/lora_merge/resolve", responses=errors, openapi_extra=json_body(ResolveRequest))(self.resolve)
        router.get("/model_info", include_in_schema=False)(self.model_info)
        return router

    async def update(self, request: Request) -> JSONResponse:
        """Update weights: LoRA pairs to merge, or full weights."""
        return await self._whole("update", partial(self._update, request))

    async def status(self) -> JSONResponse:
        """What is live in every module, from this process's record; it answers during a generation too."""
        await self._look()
        return JSONResponse(self.record.status(), status_code=200 if self.record.problem is None else 503)

    async def reset(self, request: Request) -> JSONResponse:
        """Bring the base weights back, bit for bit."""
        return await self._whole("reset", partial(self._asked, request, ResetRequest, self._reset))

    async def rollback(self, request: Request) -> JSONResponse:
        """Bring back what was live before the last update or reset, scales included; one step is kept."""
        return await self._whole("rollback", partial(self._asked, request, RollbackRequest, self._rollback))

    async def commit(self, request: Request) -> JSONResponse:
        """Let a complete update go live that was sent with ``commit: false``."""
        return await self._whole("commit", partial(self._asked, request, TransactionRequest, self._commit))

    async def abort(self, request: Request) -> JSONResponse:
        """Drop an update that is not live yet."""
        return await self._whole("abort", partial(self._asked, request, TransactionRequest, self._abort))

    async def verify(self, request: Request) -> JSONResponse:
        """Compare what is live with what it should be, whole layers by checksum or single elements."""
        return await self._whole("verify", partial(self._asked, request, VerifyRequest, self._verify))

    async def resolve(self, request: Request) -> JSONResponse:
        """Say where layers would land, and which would not."""
        return await self._whole("resolve", partial(self._asked, request, ResolveRequest, self._resolve))

    async def metrics(self) -> Response:
        """Prometheus text, from this process's record."""
        await self._look()
        return Response(metrics.text(self.record), media_type=metrics.CONTENT_TYPE)

    async def model_info(self, request: Request) -> JSONResponse:
        """sglang's own answer, and the version of every module that has one."""
        info = await http_server.model_info_endpoint(request)
        modules = self.record.modules.items()
        versions = {name: label_of(module["weight_version"], module["versions"]) for name, module in modules}
        live = {name: version for name, version in versions.items() if version is not None}
        return JSONResponse({**info, "weight_version": version_text(live) if live else None, "weight_versions": live})

    async def upload(self, request: Request) -> JSONResponse:
        """Update weights from a safetensors file in the body: a trainer on another machine, or curl."""
        return await self._whole("upload", partial(self._upload, request))

    async def adopt(self, stock: UpdateWeightFromTensorReqInput) -> OutputBatch:
        """Work on sglang's own request, from its broker or its own route, as on ours, and answer as sglang does."""
        status, answer = await self._done(Entry("update"), partial(self._adopt, stock))
        return OutputBatch(output=answer, error=None if status == 200 else answer["message"])

    async def refresh(self) -> None:
        """Ask the workers for their state, which may have changed by another road than this process.

        It waits behind a running generation.
        """
        async with self._one_at_a_time:  # between the replicas' steps of an update they differ, rightly
            await self._refresh()

    async def _refresh(self) -> None:
        try:
            output = await self._ask(MergeReq([], operation="status"))
            open_id = self.record.ledger.open_id
            if open_id is not None and open_id != output["staged_update"]:
                self.record.ledger.abandon(open_id, "the engine went to sleep")
            self._follow_base(output)
        except Exception as error:
            logger.warning("the workers' LoRA merge state is not known: %s", printable(str(error), 2000))

    def _follow_base(self, output: dict[str, Any]) -> None:
        """End the live updates of modules that hold no adapter any more, whatever took it out."""
        self.record.ledger.base_is_live([name for name, each in output["snapshot"].items() if not each["adapters"]])

    async def _look(self) -> None:
        """Refresh the record if the workers answer at once, which they do unless they generate or are gone."""
        if self.record.failed is not None:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self.refresh())
        await asyncio.wait({self._looking}, timeout=PATIENCE_S)

    async def _whole(self, event: str, work: Callable[[Entry], Awaitable[Answer]]) -> JSONResponse:
        """Run to the end even if the client goes away: the record must know what became of an update."""
        status, answer = await self._done(Entry(event), work)
        return JSONResponse(answer, status_code=status)

    async def _done(self, entry: Entry, work: Callable[[Entry], Awaitable[Answer]]) -> Answer:
        return await asyncio.shield(asyncio.ensure_future(self._written_down(entry, work)))

    async def _written_down(self, entry: Entry, work: Callable[[Entry], Awaitable[Answer]]) -> Answer:
        try:
            status, answer = await work(entry)
        except Exception as error:  # the guard's limit of a body, or a fault of ours: neither ends without its line
            cause = _innermost(error)
            status = getattr(cause, "status", 500)
            entry.reason = getattr(cause, "reason", "engine")
            self.record.failure(entry.reason)
            logger.info("%s", line(entry, status, {"message": f"{type(cause).__name__}: {cause}"}))
            raise
        if entry.reason is not None:
            self.record.failure(entry.reason)
        logger.info("%s", line(entry, status, answer))
        return status, answer

    async def _adopt(self, stock: UpdateWeightFromTensorReqInput, entry: Entry) -> Answer:
        try:
            req = from_stock(stock)
            entry.nbytes = sum(map(len, req.serialized_named_tensors))
            return await self._apply(req, None, entry, [])
        except LoraMergeError as error:
            return _refused(error, entry, payloads=0)

    async def _update(self, request: Request, entry: Entry) -> Answer:
        payloads = 0
        try:
            body = await request.body()
            entry.nbytes = len(body)
            update, ignored = parse_fields(UpdateRequest, parse_json(body))
            entry.update_id, entry.weight_version = update.update_id, update.weight_version
            payloads = len(update.serialized_named_tensors)
            check_update(update)
            return await self._apply(to_workers(update), _bucket_of(update, body), entry, ignored)
        except LoraMergeError as error:
            return _refused(error, entry, payloads)

    async def _upload(self, request: Request, entry: Entry) -> Answer:
        try:
            query, ignored = parse_fields(UploadQuery, dict(request.query_params))
            entry.update_id, entry.weight_version = query.update_id, query.weight_version
            check_upload(query)
            async with self._uploads.received(request.stream(), entry.count) as upload:
                req = MergeReq(
                    serialized_named_tensors=[],
                    target_modules=None if query.target_module is None else [query.target_module],
                    weight_update_mode=LORA_MERGE,
                    lora_alpha=query.lora_alpha,
                    lora_rank=query.lora_rank,
                    weight_version=query.weight_version,
                    update_id=query.update_id,
                    upload_path=upload.path,
                    adapter=query.adapter,
                )
                terms = query.model_dump()
                name = query.update_id
                hold = query.commit is False
                bucket = Bucket(name, 0, 1, f"{upload.digest} {terms}", terms, hold) if name is not None else None
                return await self._apply(req, bucket, entry, ignored)
        except LoraMergeError as error:
            return _refused(error, entry, payloads=0)

    async def _apply(self, req: MergeReq, bucket: Bucket | None, entry: Entry, ignored: list[str]) -> Answer:
        """Send an update, or a bucket of one, to the workers, and keep the books."""
        async with self._one_at_a_time:
            if bucket is not None and self.record.ledger.is_live(bucket.update_id):
                await self._refresh()  # or the answer of then would hide what has come by another road since
            if bucket is not None and (answered := self.record.ledger.admit(bucket)) is not None:
                entry.repeated = True
                return 200, answered
            state = "live" if bucket is None else self.record.ledger.next_state(bucket)
            req.goes_live = state == "live"
            req.continues = bucket is not None and self.record.ledger.open_id == bucket.update_id
            output = await self._ask(req)
            if output["status"] != 200:
                entry.reason = output["reason"]
                return _error(output["status"], output["message"], output["payload_opened"])
            answer = _update_answer(req, output, ignored)
            if bucket is not None:
                self._accept(bucket, answer)
            if state == "live":
                ended = "replaced" if req.is_whole_adapter or req.is_full_update else None
                adapter = None if req.is_full_update else req.adapter
                self.record.ledger.step(answer.get("modules") or req.target_modules, ended, req.update_id, adapter)
            self.record.received(entry.nbytes, live=state == "live", timings_ms=answer.get("timings_ms"))
            return 200, answer

    def _accept(self, bucket: Bucket, answer: dict[str, Any]) -> None:
        """Record an accepted bucket, say which update it put an end to, and give the next one its time."""
        ledger = self.record.ledger
        if (other := ledger.abandons(bucket)) is not None:
            there = ledger.updates[other]
            answer["message"] += f"; update {other!r} is abandoned with {len(there.buckets)} of {there.count} buckets"
        ledger.accept(bucket, answer)
        self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if (open_id := self.record.ledger.open_id) is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._staging_timeout_s, lambda: loop.create_task(self._time_out(open_id)))

    async def _time_out(self, update_id: str) -> None:
        async with self._one_at_a_time:
            if self.record.ledger.open_id == update_id:
                told = printable(repr(update_id), 200)
                logger.warning("update %s is abandoned: nothing came for %g s", told, self._staging_timeout_s)
                await self._ask(MergeReq([], operation="abort", update_id=update_id))
                self.record.ledger.abandon(update_id, f"nothing came for {self._staging_timeout_s:g} s")

    async def _asked(
        self,
        request: Request,
        model: type[Model],
        act: Callable[[Model, Entry], Awaitable[dict[str, Any]]],
        entry: Entry,
    ) -> Answer:
        """A route without a payload: parse, act, answer."""
        try:
            fields, ignored = parse_fields(model, parse_json(await request.body() or b"{}"))
            async with self._one_at_a_time:
                return 200, {**await act(fields, entry), "ignored_fields": ignored}
        except LoraMergeError as error:
            entry.reason = error.reason
            return _error(error.status, str(error))

    async def _reset(self, fields: ResetRequest, _: Entry) -> dict[str, Any]:
        req = MergeReq([], operation="reset", target_modules=fields.target_modules, adapter=fields.adapter)
        answer = _merge_answer(await self._good(req))
        if answer["modules"]:
            self.record.ledger.step(answer["modules"], "reset", adapter=fields.adapter)
        return answer

    async def _rollback(self, _: RollbackRequest, __: Entry) -> dict[str, Any]:
        answer = _merge_answer(await self._good(MergeReq([], operation="rollback")))
        self.record.ledger.rolled_back()
        return answer

    async def _commit(self, fields: TransactionRequest, entry: Entry) -> dict[str, Any]:
        ledger = self.record.ledger
        entry.update_id = fields.update_id
        if (answered := ledger.to_commit(fields.update_id)) is not None:
            entry.repeated = True
            return answered
        entry.weight_version = ledger.updates[fields.update_id].terms["weight_version"]
        req = MergeReq([], operation="commit", update_id=fields.update_id, weight_version=entry.weight_version)
        answer = _merge_answer(await self._good(req))
        ledger.committed(fields.update_id, answer)
        ledger.step(answer["modules"], "replaced", fields.update_id, ledger.updates[fields.update_id].adapter)
        self.record.received(0, live=True, timings_ms=answer["timings_ms"])
        self._start_timer()
        return answer

    async def _abort(self, fields: TransactionRequest, entry: Entry) -> dict[str, Any]:
        entry.update_id = fields.update_id
        self.record.ledger.check_abort(fields.update_id)
        output = await self._good(MergeReq([], operation="abort", update_id=fields.update_id))
        self.record.ledger.abandon(fields.update_id, "its sender aborted it")
        self._start_timer()
        return {"success": True, "message": output["message"]}

    async def _verify(self, fields: VerifyRequest, _: Entry) -> dict[str, Any]:
        expected = {
            m: {layer: each.model_dump() for layer, each in layers.items()} for m, layers in fields.modules.items()
        }
        wrong = [
            f"modules.{module}.{layer} needs either sha256 or samples"
            for module, layers in expected.items()
            for layer, each in layers.items()
            if (each["sha256"] is None) == (each["samples"] is None)
        ]
        if wrong or not any(expected.values()):
            raise RequestError(*(wrong or ["modules names no layer to verify"]))
        output = await self._good(MergeReq([], operation="verify", expected=expected, weights=fields.weights))
        return {name: output[name] for name in ("success", "message", "mismatched", "checked")}

    async def _resolve(self, fields: ResolveRequest, _: Entry) -> dict[str, Any]:
        output = await self._good(MergeReq([], operation="resolve", layers=fields.modules))
        return {"success": True, "message": output["message"], "modules": output["resolved"]}

    async def _good(self, req: MergeReq) -> dict[str, Any]:
        """The workers' output, if it is a success.

        Raises:
            LoraMergeError: with their status and message.
        """
        output = await self._ask(req)
        if output["status"] != 200:
            raise _as_error(output)
        return output

    async def _ask(self, req: MergeReq) -> dict[str, Any]:
        if self._refusal is not None:
            raise RequestError(self._refusal)
        output = await self._replicas.ask(req)
        self.record.heard(output)
        if output["status"] != 200:  # a full update that failed has ended what was live
            self._follow_base(output)
        if output["failed"] is not None:
            # sglang's own way of saying so: /health and every POST answer 503 from now on
            async_scheduler_client.mark_failed(output["failed"])
        return output


def install(app: FastAPI, server_args: Any) -> None:
    """Add the routes to sglang's app, in front of its own route of the same path, and the guard around all of them.

    Raises:
        LoraMergeError: a variable has no meaning; a route of ours is answered by another endpoint; a weight route of
            sglang's is missing or cannot be guarded.
    """
    settings = settings_from()
    replicas = Replicas(_ask_replica, server_args.dp_size)
    uploads = Uploads(settings.max_uploads, settings.max_uploads_bytes, settings.upload_idle_s)
    routes = MergeRoutes(replicas, settings.staging_timeout_s, refusal(server_args), uploads)
    app.state.sgld_lora_merge = routes
    give_failure(app, async_scheduler_client)
    router = routes.router()
    include_first(app, router)
    app.openapi = partial(described, app.openapi, router, UPDATE_ROUTE)  # type: ignore[method-assign]  # as FastAPI has it
    app.add_middleware(VersionTeller)
    guard = Guard(limits_from(settings), lambda: async_scheduler_client.failure_reason)
    guard.cover(app.router)
    app.add_middleware(Gate, router=app.router, guard=guard)
    http_server.SERVER_WARMUP_BYPASS_PATHS = (*http_server.SERVER_WARMUP_BYPASS_PATHS, STATUS_ROUTE)
    remove_leftovers()
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with inner(app) as state:
            first_look = asyncio.create_task(routes.refresh())
            yield state
            first_look.cancel()

    app.router.lifespan_context = lifespan


async def _ask_replica(replica: int, req: MergeReq) -> dict[str, Any]:
    """Ask one replica; sglang's own fan-out tells only one replica's answer.

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
        raise NoAnswer(f"the workers' answer is not one: {response.error}")
    output: dict[str, Any] = response.output
    return output


def _bucket_of(update: UpdateRequest, body: bytes) -> Bucket | None:
    if update.update_id is None:
        return None
    same = ("lora_alpha", "lora_rank", "weight_version", "weight_update_mode", "adapter")
    return Bucket(
        update_id=update.update_id,
        index=update.bucket_index or 0,
        count=update.num_buckets or 1,
        digest=digest(body),
        terms={name: getattr(update, name) for name in same},
        hold=update.commit is False,
    )


def _update_answer(req: MergeReq, output: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    if req.weight_update_mode == LORA_MERGE:
        return {**_merge_answer(output), "ignored_fields": ignored}
    full = ("message", "weight_version", "payload_opened")
    return {"success": True, **{name: output[name] for name in full}, "ignored_fields": ignored}


def _merge_answer(output: dict[str, Any]) -> dict[str, Any]:
    return UpdateAnswer(**{name: output[name] for name in UpdateAnswer.model_fields if name in output}).model_dump()


def _as_error(output: dict[str, Any]) -> LoraMergeError:
    error = LoraMergeError(output["message"])
    error.status, error.reason = output["status"], output.get("reason", "engine")
    return error


def _refused(error: LoraMergeError, entry: Entry, payloads: int) -> Answer:
    """The answer to an update that did not reach the workers, or that they did not answer."""
    entry.reason = error.reason
    if isinstance(error, NoAnswer):
        return _error(error.status, str(error))
    return _error(error.status, f"{error}. Nothing was changed", [False] * payloads)


def _innermost(error: BaseException) -> BaseException:
    """What the middleware in between has wrapped, one group around another."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _error(status: int, message: str, payload_opened: list[bool] | None = None) -> Answer:
    return status, ErrorAnswer(message=message, payload_opened=payload_opened or []).model_dump()
