"""What an older sglang is given: one client that says to everyone that the engine must be restarted."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from server_patches.backport import give_failure

REASON = "the ranks can no longer agree: restart the engine"


class Client:
    """As much of a scheduler client as is needed; a request that is an event ends when the event is set."""

    def __init__(self):
        self.seen, self.cancelled = [], []

    async def forward(self, batch, timeout_ms=None):
        self.seen.append(batch)
        try:
            if isinstance(batch, asyncio.Event):
                await batch.wait()
        except asyncio.CancelledError:
            self.cancelled.append(batch)
            raise
        return batch, timeout_ms


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def app(client):
    app = FastAPI()

    @app.get("/health")
    @app.get("/v1/videos/1")
    @app.post("/v1/images/generations")
    async def answer():
        return "well"

    give_failure(app, client)
    return app


def statuses(app):
    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http:
            answers = [
                await http.get("/health"),
                await http.get("/v1/videos/1"),
                await http.post("/v1/images/generations"),
            ]
            return [(answer.status_code, answer.json()) for answer in answers]

    return asyncio.run(ask())


def test_nothing_is_different_before_a_failure(app, client):
    assert client.failure_reason is None
    assert asyncio.run(client.forward("batch", timeout_ms=5)) == ("batch", 5)
    assert statuses(app) == [(200, "well")] * 3


def test_after_a_failure_health_and_every_post_answer_503_and_finished_results_can_be_fetched(app, client):
    client.mark_failed(REASON)
    client.mark_failed("a consequence of it")
    assert statuses(app) == [(503, {"error": REASON}), (200, "well"), (503, {"error": REASON})]


def test_who_waits_for_the_workers_is_told_at_once(app, client):
    async def wait():
        never = asyncio.Event()
        waiting = asyncio.ensure_future(client.forward(never))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        client.mark_failed(REASON)
        with pytest.raises(RuntimeError, match="restart the engine"):
            await waiting
        with pytest.raises(RuntimeError, match="restart the engine"):
            await client.forward("batch")
        await asyncio.sleep(0)
        assert client.seen == client.cancelled == [never]

    asyncio.run(wait())


def test_a_client_that_gives_up_takes_its_request_along(app, client):
    async def give_up():
        never = asyncio.Event()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.forward(never), 0.01)
        await asyncio.sleep(0)
        assert client.cancelled == [never]

    asyncio.run(give_up())


def test_an_sglang_that_has_it_is_left_alone():
    class Newer(Client):
        def mark_failed(self, reason):
            raise NotImplementedError

    client, app = Newer(), FastAPI()
    give_failure(app, client)
    assert vars(client) == {"seen": [], "cancelled": []}
    assert app.user_middleware == []
