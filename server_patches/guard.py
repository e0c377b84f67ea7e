"""Who may reach the routes that change weights: token, origin, content type and size, before a body is parsed.

The engine's own CORS policy is ``*``, so a web page could otherwise post a pickle from a browser beside the engine. A
page can also make its own name stand for the engine's address, so that the same name is not the same origin.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.settings import API_KEY_VARIABLE, MAX_BODY_VARIABLE, Settings

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
OWN_PREFIX = "/lora_merge/"
UPLOAD_ROUTE = "/lora_merge/upload"  # takes whatever content type curl sends


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


def is_guarded(path: str) -> bool:
    """Whether a route changes weights or tells of them."""
    return path in WEIGHT_ROUTES or path.startswith(OWN_PREFIX)


def refusal(
    method: str, headers: Mapping[str, str], limits: Limits, *, json_only: bool = True
) -> tuple[int, str] | None:
    """Status and message for a request that must not reach a guarded route; None for one that may.

    Args:
        headers: with lower-case names.
        json_only: the route reads JSON; a browser sends other types across origins without asking.
    """
    if method == "OPTIONS":
        return None
    if limits.api_key is not None:
        given = headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {limits.api_key}".encode()):
            return 401, f"{API_KEY_VARIABLE} is set: send Authorization: Bearer <its value>"
    origin, host = headers.get("origin"), headers.get("host", "")
    own = (f"http://{host}", f"https://{host}") if limits.api_key is not None or _is_address(host) else ()
    if origin is not None and origin not in own:
        return 403, f"the origin {origin} is foreign to this engine; weight routes are not for web pages"
    if method != "POST":
        return None
    content_type = headers.get("content-type", "").split(";")[0].strip().lower()
    body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if json_only and (body or content_type) and content_type != "application/json":
        return 415, f"content type {content_type or 'none'!r}: this route reads application/json"
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


class Guard:
    """ASGI middleware that answers refusals itself and counts the bytes of a body whose length was not announced.

    Args:
        failure: why the engine must be restarted, as soon as it must; its weight routes then say so.
    """

    def __init__(self, app: ASGIApp, limits: Limits, failure: Callable[[], str | None]) -> None:
        self._app, self._limits, self._failure = app, limits, failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_guarded(scope["path"]):
            await self._app(scope, receive, send)
            return
        json_only = scope["path"] != UPLOAD_ROUTE
        refused = refusal(scope["method"], Headers(scope=scope), self._limits, json_only=json_only)
        if refused is None and scope["method"] == "POST" and (failure := self._failure()) is not None:
            refused = 503, failure
        if refused is not None:
            await _answer(send, *refused)
            return
        counted = _Counted(receive, self._limits)
        try:
            await self._app(scope, counted, send)
        except Exception:  # the middleware in between wraps what `counted` raises
            if counted.refused is None:
                raise
            await _answer(send, 413, counted.refused)


class _Counted:
    """A body whose length was not announced: reading it fails when it is over the limit."""

    def __init__(self, receive: Receive, limits: Limits) -> None:
        self._receive, self._limits, self._received = receive, limits, 0
        self.refused: str | None = None

    async def __call__(self) -> Message:
        message = await self._receive()
        self._received += len(message.get("body", b""))
        if self._received > self._limits.max_body_bytes:
            self.refused = _too_large(self._received, self._limits)
            raise BodyTooLarge(self.refused)
        return message


async def _answer(send: Send, status: int, message: str) -> None:
    body = json.dumps({"success": False, "message": message, "payload_opened": []}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _too_large(size: int, limits: Limits) -> str:
    return (
        f"the body has {size} bytes or more, the limit is {limits.max_body_bytes} ({MAX_BODY_VARIABLE}); "
        "send handles or smaller buckets"
    )
