"""Who may reach the endpoints that change weights: token, origin, content type and size, before a body is parsed.

Whether a request is guarded is decided by the endpoint that answers it, never by its path: a path has many spellings,
and a proxy or a mount adds to them. The guard stands in two places, and looks at a request once: in front of the app,
so that a refusal waits for nothing, and in front of each guarded endpoint, so that no other way leads there.

The engine's own CORS policy is ``*``, so a web page could otherwise post a pickle from a browser beside the engine. A
page can also make its own name stand for the engine's address, so that the same name is not the same origin.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from fastapi.routing import APIRoute, APIRouter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server_patches.compat import SUPPORTED
from server_patches.endpoints import Endpoint, every_route, matched_endpoint, name_of, request_for
from server_patches.request_log import LogEntry, line
from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.settings import API_KEY_VARIABLE, MAX_BODY_VARIABLE, Settings

logger = logging.getLogger(__name__)

SHOWN_CHARACTERS = 80  # of a header's value in a message
# sglang's routes that change weights or tell of them. The start fails if one is missing or would not be guarded: a
# version that names them otherwise may have weight endpoints that `is_guarded` does not know.
WEIGHT_ROUTES = (
    "/update_weights_from_tensor",
    "/update_weights_from_disk",
    "/update_weights_from_tensor_checker",
    "/get_weights_checksum",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/v1/set_lora",
    "/v1/merge_lora_weights",
    "/v1/unmerge_lora_weights",
    "/v1/list_loras",
)
_OWN_PACKAGE = "server_patches."
_WEIGHTS_PACKAGE = "sglang.multimodal_gen.runtime.entrypoints.post_training."
_GENERATION = _WEIGHTS_PACKAGE + "rollout_api.rollout_generate"
_ADMITTED = "sgld_lora_merge.admitted"  # key of a request's scope: the endpoint that the guard has let it through to
_REASONS = {400: "path", 401: "token", 403: "origin", 413: "size", 415: "content_type", 503: "failed"}


class BodyTooLarge(LoraMergeError):
    """A body whose length was not announced is over the limit."""

    status = 413
    reason = "too_large"


@dataclass(frozen=True)
class Limits:
    """What the environment asks for.

    Attributes:
        api_key: bearer token that guarded routes need; None needs none.
        max_body_bytes: of one request.
    """

    api_key: str | None = None
    max_body_bytes: int = Settings.max_body_bytes  # CPU tensors may travel inline; handles take kilobytes


def limits_from(settings: Settings) -> Limits:
    """The limits that the settings ask for."""
    return Limits(settings.api_key, settings.max_body_bytes)


def is_guarded(endpoint: Endpoint | None) -> bool:
    """Return whether an endpoint changes weights or tells of them.

    All of ours are but ``/model_info``; of sglang's all beside its weight routes but generation for training, and
    every one whose name speaks of weights or LoRA. So an endpoint that a later sglang adds there is guarded too.
    """
    module, name = getattr(endpoint, "__module__", None) or "", getattr(endpoint, "__name__", "")
    if module.startswith(_OWN_PACKAGE):
        return name != "model_info"
    if module.startswith(_WEIGHTS_PACKAGE):
        return f"{module}.{name}" != _GENERATION
    return "lora" in name.lower() or "weights" in name.lower()


def check_weight_routes(router: APIRouter) -> None:
    """Check that sglang's weight routes are there and that their endpoints are guarded.

    Raises:
        LoraMergeError: one is not.
    """
    for path in WEIGHT_ROUTES:
        found = matched_endpoint(router.routes, request_for("POST", path))
        if not is_guarded(found):
            raise LoraMergeError(
                f"sglang {version('sglang')} answers {path} by {name_of(found)}, which is no weight route that the "
                f"plugin knows: install sglang {' or '.join(SUPPORTED)}, or exclude the plugin sgld_lora_merge with "
                "SGLANG_PLUGINS"
            )


def reads_files(endpoint: Endpoint) -> bool:
    """Return whether an endpoint reads a file from the body and not JSON."""
    return endpoint.__module__.startswith(_OWN_PACKAGE) and getattr(endpoint, "__name__", "") == "upload"


def has_control_characters(scope: Mapping[str, Any]) -> bool:
    """Return whether a path has a control character, as it was sent or after decoding.

    The router's patterns end in ``$``, which also matches in front of a final newline.
    """
    decoded = any(character < " " or "\x7f" <= character <= "\x9f" for character in scope["path"])
    return decoded or any(byte < 0x20 or byte == 0x7F for byte in scope.get("raw_path") or b"")


def refusal(
    method: str, headers: Mapping[str, str], limits: Limits, *, json_only: bool = True
) -> tuple[int, str] | None:
    """Status and message for a request that must not reach a guarded route; None for one that may.

    Args:
        headers: with lower-case names.
        json_only: the route reads JSON; a browser sends other types across origins without asking.
    """
    if limits.api_key is not None:
        given = headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {limits.api_key}".encode()):
            return 401, f"{API_KEY_VARIABLE} is set: send Authorization: Bearer <its value>"
    origin, host = headers.get("origin"), headers.get("host", "")
    own = (f"http://{host}", f"https://{host}") if limits.api_key is not None or _is_address(host) else ()
    if origin is not None and origin not in own:
        return 403, f"the origin {_cut(origin)} is foreign to this engine; weight routes are not for web pages"
    if method != "POST":
        return None
    content_type = headers.get("content-type", "").split(";")[0].strip().lower()
    body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if json_only and (body or content_type) and content_type != "application/json":
        return 415, f"content type {_cut(content_type) or 'none'!r}: this route reads application/json"
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        return 415, f"content encoding {_cut(encoding)!r}: compressed bodies are not read; send the body as it is"
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length) > limits.max_body_bytes:
        return 413, _too_large(int(length), limits)
    return None


def _is_address(host: str) -> bool:
    """Whether a Host header is an IP address or localhost, with or without a port."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


@dataclass(frozen=True)
class Guard:
    """Let a request through to a guarded endpoint, or answer it.

    Args:
        failure: why the engine must be restarted, as soon as it must; its weight routes then say so.
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
            guarded = _Covered(self, endpoint, handle)
            route.handle = guarded  # type: ignore[method-assign]  # every layout of routes ends in a call of it

    async def __call__(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send, app: ASGIApp) -> None:
        """Answer a request that is refused; else run ``app``, and count the bytes of a body of unknown length."""
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
        counted = _Counted(receive, send, self.limits)
        try:
            await app(scope, counted.receive, counted.send)
        except Exception:  # what is in between wraps what `receive` raises
            if counted.refused is None or counted.answered:
                raise
        if counted.refused is not None and not counted.answered:
            if not endpoint.__module__.startswith(_OWN_PACKAGE):  # ours write a line of the error that they met
                _log(name, 413, counted.refused)
            await _refuse(send, 413, counted.refused)


@dataclass(frozen=True)
class _Covered:
    """A route's ``handle`` with the guard in front of it."""

    guard: Guard
    endpoint: Endpoint
    unguarded: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.guard(self.endpoint, scope, receive, send, self.unguarded)


class Gate:
    """ASGI middleware in front of everything: refuses odd paths, and asks the guard where the router would lead.

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
                message = f"the path {_cut(scope['path'])!r} has a control character"
                _log("refused", 400, message)
                await _refuse(send, 400, message)
        elif scope["type"] == "http" and scope["method"] != "OPTIONS" and is_guarded(endpoint := self._endpoint(scope)):
            await self._guard(endpoint, scope, receive, send, self._app)
        else:  # OPTIONS: a browser asks without a token, and sglang's CORS answers; what it lets pass meets the guard
            await self._app(scope, receive, send)

    def _endpoint(self, scope: Scope) -> Any:
        return matched_endpoint(self._router.routes, scope)


class _Counted:
    """A body whose length was not announced: reading it fails when it is over the limit.

    Attributes:
        refused: why, as soon as it is over.
        answered: the endpoint began its answer before.
    """

    def __init__(self, receive: Receive, send: Send, limits: Limits) -> None:
        self._receive, self._send, self._limits, self._received = receive, send, limits, 0
        self.refused: str | None = None
        self.answered = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._received += len(message.get("body", b""))
        if self._received > self._limits.max_body_bytes:
            self.refused = _too_large(self._received, self._limits)
            raise BodyTooLarge(self.refused)
        return message

    async def send(self, message: Message) -> None:
        """Drop an answer that others make of the error that `receive` raised."""
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


def _too_large(size: int, limits: Limits) -> str:
    return (
        f"the body has {size} bytes or more, the limit is {limits.max_body_bytes} ({MAX_BODY_VARIABLE}); "
        "send handles or smaller buckets"
    )


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
