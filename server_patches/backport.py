"""Features of sglang 0.5.23 for 0.5.21 and 0.5.22. Delete this file when these are not supported any more."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

HEALTH_ROUTES = ("/health", "/health_generate")


def give_failure(app: FastAPI, client: Any) -> None:
    """Add ``client.mark_failed(reason)``: it ends every wait for the workers; health and every POST then answer 503.

    Args:
        client: sglang's `AsyncSchedulerClient` of this process.
    """
    if hasattr(client, "mark_failed"):
        return
    forward, failed = client.forward, asyncio.Event()

    def mark_failed(reason: str) -> None:
        client.failure_reason = client.failure_reason or reason
        failed.set()

    async def forward_unless_failed(*args: Any, **kwargs: Any) -> Any:
        if failed.is_set():
            raise RuntimeError(client.failure_reason)
        answer, failure = asyncio.ensure_future(forward(*args, **kwargs)), asyncio.ensure_future(failed.wait())
        try:
            await asyncio.wait((answer, failure), return_when=asyncio.FIRST_COMPLETED)
            if failed.is_set():
                raise RuntimeError(client.failure_reason)
            return await answer
        finally:
            answer.cancel()
            failure.cancel()

    client.failure_reason = None
    client.mark_failed = mark_failed
    client.forward = forward_unless_failed
    app.add_middleware(RefuseWhenFailed, client=client)


class RefuseWhenFailed:
    """ASGI middleware that answers 503 after a failure; GETs other than health still answer: results, the status."""

    def __init__(self, app: ASGIApp, client: Any) -> None:
        self._app, self._client = app, client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        concerned = scope["type"] == "http" and (scope["method"] == "POST" or scope["path"] in HEALTH_ROUTES)
        if concerned and self._client.failure_reason is not None:
            await JSONResponse({"error": self._client.failure_reason}, 503)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
