"""Add to each answer which weights made it; the worker has stamped the output with their versions.

Every such answer has a header, and a JSON object also has a first field. sglang answers later requests for jobs and
files from its stores, so the stamp is kept there too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server_patches.version_stamp import ATTRIBUTE, version_text
from sgld_lora_merge.errors import printable

HEADER = "x-weight-version"
FIELD = "weight_version"
HEADER_CHARACTERS = 1024  # clients refuse headers of some kilobytes

# What the workers stamped on the outputs that the current HTTP request has waited for, by module.
_stamped: ContextVar[dict[str, str] | None] = ContextVar("stamped", default=None)


def note(output: Any) -> None:
    """Remember an output's stamp for the answer to the current request."""
    stamped = _stamped.get()
    if stamped is not None:
        stamped.update(getattr(output, ATTRIBUTE, None) or {})


def keep(item: MutableMapping[str, Any]) -> None:
    """Stamp what a store keeps of the current request, or of the job that it began."""
    if stamped := _stamped.get():
        item[ATTRIBUTE] = dict(stamped)


def note_kept(item: Mapping[str, Any] | None) -> None:
    """Remember the stamp of a store's item for the answer to the current request."""
    stamped = _stamped.get()
    if stamped is not None and item is not None:
        stamped.update(item.get(ATTRIBUTE) or {})


def header_value(versions: Mapping[str, str]) -> str:
    """Return `version_text` in printable ASCII, cut to a length that every client accepts."""
    text = "".join(c if " " <= c <= "~" else "?" for c in version_text(versions)[: HEADER_CHARACTERS + 1])
    return printable(text, HEADER_CHARACTERS)


def with_field(start: Message, body: Message, version: str) -> tuple[Message, Message]:
    """Return the two messages of an answer; a successful JSON object gets the version as its first field.

    The field is written into the bytes, since an answer may hold megabytes of images, and sglang's models drop
    unknown fields.
    """
    headers = MutableHeaders(raw=list(start["headers"]))
    content = body.get("body", b"")
    is_object = headers.get("content-type") == "application/json" and content.startswith(b'{"')
    if start["status"] != 200 or not is_object:
        return start, body
    field = f'{{"{FIELD}":{json.dumps(version)},'.encode()
    whole = b"".join((field, memoryview(content)[1:]))
    if "content-length" in headers:
        headers["content-length"] = str(int(headers["content-length"]) + len(whole) - len(content))
    return {**start, "headers": headers.raw}, {**body, "body": whole}


class VersionMiddleware:
    """ASGI middleware that adds the version header and field to every answer that an adapter's weights made."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stamped: dict[str, str] = {}
        token = _stamped.set(stamped)

        held: list[Message] = []  # the start of an answer, until its body begins

        async def send_with_version(message: Message) -> None:
            if message["type"] == "http.response.start" and stamped:
                header = (HEADER.encode(), header_value(stamped).encode())
                held.append({**message, "headers": [*message.get("headers", ()), header]})
                return
            if held:
                start, message = with_field(held.pop(), message, version_text(stamped))
                await send(start)
            await send(message)

        try:
            await self._app(scope, receive, send_with_version)
        finally:
            _stamped.reset(token)
