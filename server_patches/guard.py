"""Stop requests that may not reach a weight endpoint, before a body is parsed. `access_rules` has the rules.

The endpoint that answers a request decides whether it is guarded, never its path: a path has many spellings, and a
proxy or a mount adds more. The guard stands in two places, and checks a request once: in front of the app, so that a
refusal waits for nothing, and in front of each guarded endpoint, so that no other way leads there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi.routing import APIRoute, APIRouter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server_patches.access_rules import (
    OWN_PACKAGE,
    Limits,
    check_weight_routes,
    has_control_characters,
    is_guarded,
    reads_files,
    refusal,
    shortened,
    too_large,
)
from server_patches.endpoints import Endpoint, every_route, matched_endpoint, name_of
from server_patches.request_log import LogEntry, line
from sgld_lora_merge.errors import LoraMergeError

logger = logging.getLogger(__name__)

_ADMITTED = "sgld_lora_merge.admitted"  # key of a request's scope: the endpoint that the guard has let it through to
_REASONS = {400: "path", 401: "token", 403: "origin", 413: "size", 415: "content_type", 503: "failed"}


class BodyTooLarge(LoraMergeError):
    """A body whose length was not announced is over the limit."""

    status = 413
    reason = "too_large"


@dataclass(frozen=True)
class Guard:
    """Lets a request through to a guarded endpoint, or refuses it.

    Args:
        failure: returns why the engine must be restarted, or None. Weight routes then answer 503.
    """

    limits: Limits
    failure: Callable[[], str | None]

    def cover(self, router: APIRouter) -> None:
        """Put the guard in front of every guarded endpoint of a router, included and mounted ones too.

        A router's routes are objects that all apps of a process share: the guard that comes last is in force.

        Raises:
            LoraMergeError: a weight route of sglang's is missing; a guarded endpoint is no HTTP route of FastAPI's, a
                websocket for instance.
        """
        check_weight_routes(router)
        for each in every_route(router.routes):
            route = getattr(each, "original_route", each)
            endpoint = getattr(route, "endpoint", None)
            if endpoint is None or not is_guarded(endpoint):
                continue
            if not isinstance(route, APIRoute):
                raise LoraMergeError(
                    f"{name_of(endpoint)} at {route.path!r} is a {type(route).__name__}, which cannot be guarded; "
                    "weights are reached by HTTP routes only"
                )
            handle = getattr(route.handle, "unguarded", route.handle)
            guarded = _GuardedRoute(self, endpoint, handle)
            route.handle = guarded  # type: ignore[method-assign]  # every layout of routes ends in a call of it

    async def __call__(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send, app: ASGIApp) -> None:
        """Refuse a request, or run ``app`` and count the bytes of a body of unknown length."""
        if scope.get(_ADMITTED) == endpoint:
            await app(scope, receive, send)
            return
        name, json_only = getattr(endpoint, "__name__", "?"), not reads_files(endpoint)
        refused = refusal(scope["method"], Headers(scope=scope), self.limits, json_only=json_only)
        if refused is None and scope["method"] == "POST" and (failure := self.failure()) is not None:
            refused = 503, failure
        if refused is not None:
            _log(name, *refused)
            await _refuse(send, *refused)
            return
        scope[_ADMITTED] = endpoint
        counted = _CountedBody(receive, send, self.limits)
        try:
            await app(scope, counted.receive, counted.send)
        except Exception:  # middleware may have wrapped the error that `receive` raised
            if counted.refused is None or counted.answered:
                raise
        if counted.refused is not None and not counted.answered:
            if not endpoint.__module__.startswith(OWN_PACKAGE):  # the plugin's own endpoints have logged the error
                _log(name, 413, counted.refused)
            await _refuse(send, 413, counted.refused)


@dataclass(frozen=True)
class _GuardedRoute:
    """A route's ``handle`` with the guard in front of it."""

    guard: Guard
    endpoint: Endpoint
    unguarded: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.guard(self.endpoint, scope, receive, send, self.unguarded)


class Gate:
    """ASGI middleware in front of everything: refuses paths with control characters, and runs the guard for the others.

    Args:
        router: the app's; routes that are added later are seen.
    """

    def __init__(self, app: ASGIApp, router: APIRouter, guard: Guard) -> None:
        self._app, self._router, self._guard = app, router, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif has_control_characters(scope):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": ""})
            else:
                message = f"the path {shortened(scope['path'])!r} has a control character"
                _log("refused", 400, message)
                await _refuse(send, 400, message)
        elif scope["type"] == "http" and scope["method"] != "OPTIONS" and is_guarded(endpoint := self._endpoint(scope)):
            await self._guard(endpoint, scope, receive, send, self._app)
        else:  # OPTIONS: a browser asks without a token, and sglang's CORS answers; what it lets pass meets the guard
            await self._app(scope, receive, send)

    def _endpoint(self, scope: Scope) -> Any:
        return matched_endpoint(self._router.routes, scope)


class _CountedBody:
    """Counts a body whose length was not announced; reading it fails as soon as it is over the limit.

    Attributes:
        refused: why the body was refused; None while it is below the limit.
        answered: the endpoint had begun its answer before that.
    """

    def __init__(self, receive: Receive, send: Send, limits: Limits) -> None:
        self._receive, self._send, self._limits, self._received = receive, send, limits, 0
        self.refused: str | None = None
        self.answered = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._received += len(message.get("body", b""))
        if self._received > self._limits.max_body_bytes:
            self.refused = too_large(self._received, self._limits)
            raise BodyTooLarge(self.refused)
        return message

    async def send(self, message: Message) -> None:
        """Send an answer; drop one that other code has made of the error that `receive` raised."""
        if self.refused is None or self.answered:
            self.answered = True
            await self._send(message)


def _log(event: str, status: int, message: str) -> None:
    logger.info("%s", line(LogEntry(event, reason=_REASONS[status]), status, {"message": message}))


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps({"success": False, "message": message, "payload_opened": []}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
