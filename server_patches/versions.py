"""Which weights made a generation: stamped by the worker when it runs, told in a header of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-weight-version"
ATTRIBUTE = "sgld_weight_versions"  # on the output that a worker sends back

# What the workers stamped on the outputs that the current HTTP request has waited for, by module.
_stamped: ContextVar[dict[str, str] | None] = ContextVar("stamped", default=None)


def stamp(output: Any, versions: Mapping[str, str]) -> None:
    """In the worker: the versions that this output was made with; the first stamp stays."""
    if not hasattr(output, ATTRIBUTE):
        setattr(output, ATTRIBUTE, dict(versions))


def note(output: Any) -> None:
    """In the HTTP process: remember an output's stamp for the answer to the request at hand."""
    stamped = _stamped.get()
    if stamped is not None:
        stamped.update(getattr(output, ATTRIBUTE, None) or {})


def header_value(versions: Mapping[str, str]) -> str:
    """One version where all modules have the same, else ``module=version`` for each; printable ASCII."""
    values = set(versions.values())
    text = values.pop() if len(values) == 1 else ", ".join(f"{name}={v}" for name, v in sorted(versions.items()))
    return "".join(c if " " <= c <= "~" else "?" for c in text)


class VersionHeader:
    """ASGI middleware: ``x-weight-version`` on every answer that generated something; none with base weights."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stamped: dict[str, str] = {}
        token = _stamped.set(stamped)

        async def with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and stamped:
                header = (HEADER.encode(), header_value(stamped).encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, with_header)
        finally:
            _stamped.reset(token)
