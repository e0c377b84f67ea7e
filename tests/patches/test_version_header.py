"""The header and the field that tell a version."""

from __future__ import annotations

import asyncio
from functools import partial

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from server_patches import http_patches
from server_patches.version_header import HEADER, VersionMiddleware, header_value, note
from server_patches.version_stamp import ATTRIBUTE, stamp


class Output:
    pass


def generated(versions):
    """In a request: an output of these versions has come from the workers."""
    output = Output()
    stamp(output, versions)
    note(output)


def answer_of(response, versions):
    """What a client gets of a response that a generation has made."""

    async def endpoint(_):
        generated(versions)
        return response

    return asyncio.run(get(Starlette(routes=[Route("/", endpoint)]), "/"))


async def get(app, path):
    transport = httpx.ASGITransport(VersionMiddleware(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        return await client.get(path)


@pytest.mark.parametrize(
    ("versions", "value"),
    [
        ({"transformer": "7"}, "7"),
        ({"transformer": "7", "transformer_2": "7"}, "7"),
        ({"transformer_2": "8", "transformer": "7"}, "transformer=7, transformer_2=8"),
        ({"transformer": "step\r\nset-cookie: x"}, "step??set-cookie: x"),
        ({"transformer": "ü"}, "?"),
    ],
)
def test_a_version_is_a_header_and_nothing_more(versions, value):
    assert header_value(versions) == value


def test_a_header_is_cut_before_a_client_refuses_it():
    value = header_value({"transformer": "7" * 200_000})
    assert (len(value), value.endswith("777...")) == (1024, True)
    several = header_value({f"module_{index}": str(index) for index in range(1000)})
    assert (len(several), several[:9]) == (1024, "module_0=")


def test_the_first_stamp_stays():
    output = Output()
    stamp(output, {"transformer": "1"})
    stamp(output, {"transformer": "2"})
    assert getattr(output, ATTRIBUTE) == {"transformer": "1"}


def test_a_json_object_has_the_version_as_its_first_field():
    answer = answer_of(JSONResponse({"id": "ü", "data": [1]}), {"transformer": "7ü"})
    assert list(answer.json().items()) == [("weight_version", "7ü"), ("id", "ü"), ("data", [1])]
    assert answer.headers[HEADER] == "7?"
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_a_streamed_json_object_has_it_too():
    body = StreamingResponse(iter([b'{"id"', b": 1}"]), media_type="application/json")
    assert answer_of(body, {"transformer": "7"}).json() == {"weight_version": "7", "id": 1}


@pytest.mark.parametrize(
    "response",
    [
        JSONResponse([{"id": 1}]),
        JSONResponse({}),
        JSONResponse({"detail": "no"}, status_code=500),
        PlainTextResponse('{"id": 1}'),
    ],
)
def test_other_answers_have_the_header_only(response):
    answer = answer_of(response, {"transformer": "7"})
    assert answer.content == response.body
    assert answer.headers[HEADER] == "7"


def test_base_weights_have_neither():
    answer = answer_of(JSONResponse({"id": 1}), {})
    assert answer.json() == {"id": 1}
    assert HEADER not in answer.headers


def test_a_job_tells_its_version_when_it_is_asked_for():
    """As a video's: begun by one request, done after its answer, told by another one."""
    from sglang.multimodal_gen.runtime.entrypoints.openai.stores import AsyncDictStore

    store = AsyncDictStore()
    update, read = (partial(hook, method, store) for hook, method in (
        (http_patches.keep_stamp, AsyncDictStore.update_fields), (http_patches.note_stamp, AsyncDictStore.get),
    ))  # fmt: skip
    jobs = []

    async def work():
        await answered.wait()
        generated({"transformer": "7"})
        await update("job", {"status": "completed"})

    async def begin(_):
        await http_patches.keep_stamp(AsyncDictStore.upsert, store, "job", {"status": "queued"})
        jobs.append(asyncio.create_task(work()))
        return JSONResponse({"status": "queued"})

    async def look(_):
        return JSONResponse({"status": (await read("job"))["status"]})

    async def scenario():
        app = Starlette(routes=[Route("/begin", begin), Route("/look", look)])
        begun, before = await get(app, "/begin"), await get(app, "/look")
        answered.set()
        await jobs[0]
        return begun, before, await get(app, "/look")

    answered = asyncio.Event()
    begun, before, after = asyncio.run(scenario())
    for early in (begun, before):
        assert (early.json(), early.headers.get(HEADER)) == ({"status": "queued"}, None)
    assert (after.json(), after.headers[HEADER]) == ({"weight_version": "7", "status": "completed"}, "7")
