"""Every way to a weight endpoint of sglang's real app, in both layouts that FastAPI gives routes; no engine behind it.

"No byte changed" means here that nothing was asked of the workers; `tests/server/test_access.py` compares checksums.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
from fastapi import APIRouter, FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Match, Mount

import support  # lets sglang be imported beside a CPU torch
from server_patches import access_rules
from server_patches.endpoints import TESTED_FASTAPI, each_route, matched_endpoint, request_for
from sgld_lora_merge.errors import LoraMergeError

pytest.importorskip("sglang")

# importing sglang's HTTP server imports torch's compiler and sglang's quantization, which warn of themselves
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Only CUDA:UserWarning"),
]

KEY = {"authorization": "Bearer secret"}
JSON = {"content-type": "application/json"}
OWN = {
    f"/lora_merge/{name}": "POST" for name in ("upload", "reset", "rollback", "verify", "commit", "abort", "resolve")
}
OWN_GETS = {"/lora_merge/status": "GET", "/lora_merge/metrics": "GET"}
ROUTES = OWN | OWN_GETS | dict.fromkeys(access_rules.WEIGHT_ROUTES, "POST") | {"/v1/list_loras": "GET"}
GETS = [path for path, method in ROUTES.items() if method == "GET"]
BODIES = {
    "/update_weights_from_tensor": {"serialized_named_tensors": ["AA=="]},
    "/update_weights_from_disk": {"model_path": "elsewhere"},
    "/update_weights_from_tensor_checker": {"target_module": "t", "expected_named_tensors_sha256": {"w": "0"}},
    "/v1/set_lora": {"lora_nickname": "a", "lora_path": "elsewhere"},
    "/lora_merge/verify": {"modules": {"t": {"l": {"sha256": "0"}}}},
    "/lora_merge/resolve": {"modules": {"t": ["l"]}},
    "/lora_merge/commit": {"update_id": "u"},
    "/lora_merge/abort": {"update_id": "u"},
}
PREFIX = "/engine"


def include_flat(self, router, **_):
    """As FastAPI below 0.137 did: one entry for each route."""
    self.router.routes.extend(copy.copy(route) for route in router.routes)


@pytest.fixture(params=["flat", "as FastAPI here"])
def layout(request, monkeypatch):
    if request.param == "flat":
        monkeypatch.setattr(FastAPI, "include_router", include_flat)


@pytest.fixture
def asked(monkeypatch):
    """What the workers were asked."""
    from sglang.multimodal_gen.runtime.scheduler_client import async_scheduler_client

    requests = []

    async def forward(req, *_):
        requests.append(req)
        return SimpleNamespace(output={"success": True, "message": ""}, error=None)

    async def forward_one(_endpoint, req, _):
        return await forward(req)

    monkeypatch.setattr(async_scheduler_client, "forward", forward)
    monkeypatch.setattr(async_scheduler_client, "_forward_one", forward_one)
    arguments = SimpleNamespace(scheduler_endpoint_for=lambda replica: replica)
    monkeypatch.setattr(async_scheduler_client, "server_args", arguments, raising=False)
    monkeypatch.setattr(async_scheduler_client, "failure_reason", None, raising=False)
    return requests


def no(*_):
    return False


@pytest.fixture
def make(monkeypatch):
    """Makes sglang's app with the plugin's routes and guard."""
    from sglang.multimodal_gen.runtime.entrypoints import http_server

    from server_patches.installation import install

    def made(key=None, change=lambda app: None):
        monkeypatch.setattr(http_server, "SERVER_WARMUP_BYPASS_PATHS", http_server.SERVER_WARMUP_BYPASS_PATHS)
        monkeypatch.delenv(access_rules.API_KEY_VARIABLE, raising=False)
        if key is not None:
            monkeypatch.setenv(access_rules.API_KEY_VARIABLE, key)
        config = SimpleNamespace(supports_action_endpoint=no, supports_openpi_endpoint=no)
        arguments = SimpleNamespace(enable_metrics=False, pipeline_config=config, dp_size=1)
        app = http_server.create_app(arguments)
        change(app)
        install(app, arguments)
        return app

    return made


def call(app, method, raw, headers, body=b"{}", root_path=""):
    """Status and body of a request, its path byte for byte as a client sends it."""
    sent, heads = [], {"host": "127.0.0.1:30", "content-length": str(len(body)), **headers}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": method,
        "path": unquote(raw), "raw_path": raw.encode(), "root_path": root_path, "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in heads.items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 30),
    }  # fmt: skip
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return parts.pop() if parts else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    content = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], content.decode()


@dataclass(frozen=True)
class Way:
    """How a request goes: the path as it is sent, what stands in front of the app, the prefix that the server knows."""

    spell: Callable = lambda path: path
    around: Callable = lambda app: app
    root_path: str = ""


def behind_a_proxy(app):
    """``FastAPI(root_path=...)``: a proxy takes the prefix off."""
    app.root_path = PREFIX
    return app


def rewritten(app):
    """A middleware behind the gate finds the route under another name."""

    class Rewrite:
        def __init__(self, app):
            self.app = app

        async def __call__(self, scope, receive, send):
            await self.app({**scope, "path": scope["path"].removeprefix("/other")}, receive, send)

    app.user_middleware.append(Middleware(Rewrite))
    return app


def mounted(app):
    return Starlette(routes=[Mount(PREFIX, app=app)])


def router_mounted(app):
    """Without the app's middleware, so without the gate."""
    return Starlette(routes=[Mount(PREFIX, app=app.router)])


def prefixed(path):
    return PREFIX + path


WAYS = {
    "plain": Way(),
    "//": Way(lambda path: "/" + path),
    "%2f": Way(lambda path: "/" + path[1:].replace("/", "%2f")),
    "first %2f": Way(lambda path: "%2f" + path[1:]),
    "escaped letter": Way(lambda path: path.replace("a", "%61")),
    "/./": Way(lambda path: "/." + path),
    "/x/../": Way(lambda path: "/x/.." + path),
    "proxy's prefix": Way(prefixed, root_path=PREFIX),
    "prefix taken off": Way(around=behind_a_proxy),
    "mount": Way(prefixed, mounted),
    "mounted router": Way(prefixed, router_mounted),
    "mounted router %0a": Way(lambda path: PREFIX + path + "%0a", router_mounted),
    "rewritten": Way(lambda path: "/other" + path, rewritten),
}
ODD = {
    **{end: Way(lambda path, end=end: path + end) for end in ("%0a", "%0A", "%0d%0a", "%09", "%00", "%7f", "%c2%85")},
    "%0a within": Way(lambda path: path.replace("_", "%0a_", 1)),
    "proxy's prefix %0a": Way(lambda path: PREFIX + path + "%0a", root_path=PREFIX),
    "prefix taken off %0a": Way(lambda path: path + "%0a", behind_a_proxy),
    "mount %0a": Way(lambda path: PREFIX + path + "%0a", mounted),
}
STRANGERS = {
    "no token": ("secret", JSON),
    "foreign origin": (None, JSON | {"origin": "https://evil.example"}),
    "text/plain": (None, {"content-type": "text/plain"}),
}


def concerned(stranger):
    """The routes that refuse a stranger; a route that reads no body, or a file, takes any content type."""
    any_type = {*GETS, "/lora_merge/upload"} if stranger == "text/plain" else ()
    return {path: method for path, method in ROUTES.items() if path not in any_type}


def answers_to(way, app, routes, headers):
    """Status and body of each route's answer by its path as it was sent."""
    app, answers = way.around(app), {}
    for path, method in routes.items():
        body = json.dumps(BODIES.get(path, {})).encode()
        answers[way.spell(path)] = call(app, method, way.spell(path), headers, body, way.root_path)
    return answers


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("way", WAYS)
def test_no_way_leads_a_stranger_to_a_weight_endpoint(layout, make, asked, way, stranger):
    key, headers = STRANGERS[stranger]
    answers = answers_to(WAYS[way], make(key), concerned(stranger), headers)
    assert asked == []
    assert {raw: answer for raw, answer in answers.items() if answer[0] not in (401, 403, 404, 415)} == {}


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("way", ODD)
def test_a_path_with_a_control_character_is_400_on_every_route(make, asked, way, stranger):
    key, headers = STRANGERS[stranger]
    answers = answers_to(ODD[way], make(key), ROUTES | {"/health_generate": "GET"}, headers | KEY)
    assert asked == []
    for status, body in answers.values():
        assert status == 400
        assert "has a control character" in json.loads(body)["message"]


@pytest.mark.parametrize("way", ["plain", "escaped letter", "proxy's prefix", "prefix taken off", "mount"])
def test_with_the_token_every_route_does_its_work(layout, make, asked, way):
    app, headers = make("secret"), JSON | KEY
    for path, method in ROUTES.items():
        asked.clear()
        ((status, body),) = answers_to(WAYS[way], app, {path: method}, headers).values()
        if path in access_rules.WEIGHT_ROUTES and path != "/update_weights_from_tensor":
            assert (status, len(asked)) == (200, 1), (path, body)
        elif path in OWN_GETS:
            assert status == 200
        else:  # the workers here know nothing of ours
            assert asked or status in (400, 409), (path, status, body)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "POST", "TRACE", "ODD"])
def test_no_method_tells_a_stranger_more(layout, make, asked, method):
    answers = answers_to(WAYS["plain"], make("secret"), dict.fromkeys(ROUTES, method), JSON)
    assert {status for status, _ in answers.values()} == {401}
    assert asked == []


def test_a_browsers_question_before_a_request_is_answered_for_every_path_alike(make, asked):
    question = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    app = make("secret")
    known, unknown = (call(app, "OPTIONS", path, question) for path in ("/update_weights_from_disk", "/nothing"))
    assert known == unknown == (200, "OK")


@pytest.mark.parametrize("path", ["/health", "/liveness", "/server_info", "/model_info", "/v1/models/x", "/nothing"])
def test_other_endpoints_are_not_guarded(layout, make, asked, path):
    endpoint = matched_endpoint(make("secret").router.routes, request_for("GET", path))
    assert not access_rules.is_guarded(endpoint)


def test_generation_is_not_guarded(layout, make):
    routes = make("secret").router.routes
    for path in ("/v1/images/generations", "/v1/videos", "/rollout/generate", "/vertex_generate"):
        endpoint = matched_endpoint(routes, request_for("POST", path))
        assert endpoint is not None, path
        assert not access_rules.is_guarded(endpoint), path


def test_an_endpoint_that_a_later_sglang_adds_is_guarded(layout, make, asked, monkeypatch):
    from sglang.multimodal_gen.runtime.entrypoints.post_training import weights_api

    def change(app):
        router = APIRouter()

        async def reshard():
            asked.append("resharded")

        async def load_lora_adapter():
            asked.append("loaded")

        reshard.__module__ = weights_api.__name__
        router.post("/reshard")(reshard)
        router.post("/v1/load_lora_adapter")(load_lora_adapter)
        app.include_router(router)

    app = make("secret", change)
    for path in ("/reshard", "/v1/load_lora_adapter"):
        assert call(app, "POST", path, JSON)[0] == 401
        assert asked == []
        assert call(app, "POST", path, JSON | KEY)[0] == 200
        asked.clear()


def test_no_weight_endpoint_is_reached_by_a_websocket(make):
    """And if a sglang comes that has one, the engine does not start."""
    make()

    def change(app):
        @app.websocket("/stream")
        async def stream_weights(socket: WebSocket):
            await socket.accept()

    with pytest.raises(LoraMergeError, match=r"stream_weights at '/stream' is a APIWebSocketRoute, which cannot be"):
        make(change=change)


def test_a_websocket_whose_path_has_a_control_character_is_closed(make):
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime\n", "raw_path": b"/v1/realtime%0a", "headers": []}
    asyncio.run(make()(scope, None, send))
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_a_sglang_without_a_known_weight_route_does_not_start(make, monkeypatch):
    monkeypatch.setattr(access_rules, "WEIGHT_ROUTES", ("/v1/renamed",))
    with pytest.raises(
        LoraMergeError, match=r"answers /v1/renamed by nothing, which is no weight route .* install sglang"
    ):
        make()


def test_ours_answer_in_front_of_sglangs(layout, make, asked):
    routes = make().router.routes
    for path, name in (("/update_weights_from_tensor", "update"), ("/lora_merge/status", "status")):
        method = "POST" if name == "update" else "GET"
        endpoint = matched_endpoint(routes, request_for(method, path))
        assert (endpoint.__module__, endpoint.__name__) == ("server_patches.routes", name)
    assert matched_endpoint(routes, request_for("GET", "/model_info")).__module__ == "server_patches.routes"


class Opaque(BaseRoute):
    """A layout that nobody has thought of: it matches, and does not say what would answer."""

    def __init__(self, router):
        self.router = router

    def matches(self, scope):
        return Match.FULL, {}


def test_a_layout_in_which_ours_cannot_be_found_does_not_start(make, monkeypatch):
    def include(self, router, **_):
        self.router.routes.append(Opaque(router))

    monkeypatch.setattr(FastAPI, "include_router", include)
    with pytest.raises(LoraMergeError) as refused:
        make()
    assert f"is answered by nothing and not by the plugin, with fastapi {version('fastapi')}" in str(refused.value)
    assert f"install fastapi {TESTED_FASTAPI}" in str(refused.value)


def test_the_tested_fastapi_is_the_one_that_is_installed_for_tests():
    lines = (Path(support.__file__).parents[1] / "requirements" / "engine-cpu.txt").read_text().splitlines()
    assert f"fastapi=={TESTED_FASTAPI}" in lines


def test_a_route_behind_another_that_has_its_path_is_found_out(make):
    """As with FastAPI below 0.137, when only the last route of ours was moved to the front."""

    def change(app):
        def include(router):
            app.router.routes.append(sglangs)
            FastAPI.include_router(app, router)

        (sglangs,) = (route for route in each_route(app.router.routes) if route.path == "/update_weights_from_tensor")
        app.include_router = include

    with pytest.raises(LoraMergeError) as refused:
        make(change=change)
    assert "POST /update_weights_from_tensor is answered by sglang." in str(refused.value)


def test_a_refusal_leaves_a_line_of_json_in_the_log(make, caplog):
    app = make("secret")
    with caplog.at_level("INFO", logger="server_patches.guard"):
        call(app, "POST", "/update_weights_from_disk", JSON | {"authorization": "Bearer wrong"})
        call(app, "POST", "/lora_merge/upload", KEY | {"origin": "http://" + "x" * 10_000})
        call(app, "GET", "/health%0a" + "y" * 10_000, {})
    lines = [json.loads(record.message) for record in caplog.records]
    assert [(each["event"], each["status"], each["reason"]) for each in lines] == [
        ("update_weights_from_disk", 401, "token"), ("upload", 403, "origin"), ("refused", 400, "path"),
    ]  # fmt: skip
    assert all("wrong" not in record.message and len(record.message) < 500 for record in caplog.records)


def test_an_engine_that_must_be_restarted_says_so_to_who_has_the_token(make, asked, monkeypatch):
    from sglang.multimodal_gen.runtime.scheduler_client import async_scheduler_client

    app = make("secret")
    monkeypatch.setattr(async_scheduler_client, "failure_reason", "a rank is gone: restart the engine")
    status, answer = call(app, "POST", "/update_weights_from_disk", JSON | KEY)
    assert (status, json.loads(answer)["message"]) == (503, "a rank is gone: restart the engine")
    assert call(app, "POST", "/update_weights_from_disk", JSON)[0] == 401
    assert call(app, "GET", "/lora_merge/status", KEY)[0] == 200


def test_a_body_that_grows_over_the_limit_is_413_where_sglang_parses_it_itself(make, asked, monkeypatch):
    monkeypatch.setenv(access_rules.MAX_BODY_VARIABLE, "0.001")
    unannounced = JSON | {"content-length": "0", "transfer-encoding": "chunked"}
    for path in ("/v1/set_lora", "/update_weights_from_disk", "/update_weights_from_tensor"):
        status, answer = call(make(), "POST", path, unannounced, b" " * 2000)
        assert status == 413, answer
        assert access_rules.MAX_BODY_VARIABLE in json.loads(answer)["message"]
    assert asked == []
