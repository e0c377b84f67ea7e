"""With a token: every route that changes weights, or tells of them, needs it; and what every request is limited to."""

from __future__ import annotations

import http.client
import json
from contextlib import closing

import pytest
from typer.testing import CliRunner

from server_patches.access_rules import WEIGHT_ROUTES
from sgld_lora_merge.cli import app
from support import server

TOKEN = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def guarded(zimage_checkpoint, tmp_path_factory):
    env = {"SGLD_LORA_API_KEY": "secret", "SGLD_LORA_MAX_BODY_MB": "0.001"}
    with server.running(zimage_checkpoint, "Z-Image", tmp_path_factory.mktemp("guarded"), env=env) as running:
        yield running


@pytest.fixture(scope="module")
def routes(guarded):
    """Method and path of every weight route, as the live app declares them."""
    paths = guarded.client.get("/openapi.json").json()["paths"]
    own = [path for path in paths if path.startswith("/lora_merge/")]
    assert len(own) == 9
    assert set(WEIGHT_ROUTES) <= set(paths), "sglang has renamed a route"
    return [(method.upper(), path) for path in (*own, *WEIGHT_ROUTES) for method in paths[path]]


def test_every_weight_route_needs_the_token(guarded, routes):
    for method, path in routes:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            answer = guarded.client.request(method, path, headers=headers)
            assert answer.status_code == 401, (method, path, headers)
            assert answer.json()["success"] is False


def test_the_token_does_not_help_a_foreign_page(guarded, routes):
    for method, path in routes:
        answer = guarded.client.request(method, path, headers=TOKEN | {"origin": "https://example.org"})
        assert answer.status_code == 403, (method, path)


def status_of(engine, method, raw, headers):
    """Send a path byte for byte; httpx would put it in order before."""
    url = engine.client.base_url
    with closing(http.client.HTTPConnection(url.host, url.port, timeout=120)) as connection:
        connection.request(method, raw, b"{}", headers)
        return connection.getresponse().status


def checksum(engine):
    answer = engine.post("/get_weights_checksum", {"module_names": ["transformer"]}, headers=TOKEN)
    return answer.raise_for_status().json()


@pytest.mark.parametrize(
    "spelled",
    ["{0}", "{0}%0a", "{0}%0d%0a", "{0}%09", "{0}%00", "/{0}", "/.{0}", "/x/..{0}", "/%2e{0}", "%2f{1}", "/{2}", "{3}"],
)
def test_no_spelling_of_a_path_changes_a_byte_without_the_token(guarded, routes, spelled):
    """`tests/patches/test_gate.py` has more of them, prefixes and mounts too."""
    before = checksum(guarded)
    strangers = ({}, {"origin": "https://evil.example"}, {"content-type": "text/plain"})
    for method, path in routes:
        raw = spelled.format(path, path[1:], path[1:].replace("/", "%2f"), path.replace("a", "%61"))
        for headers in strangers:
            status = status_of(guarded, method, raw, headers)
            assert status in ((400,) if "%0" in raw else (401, 404)), (method, raw, headers)
    assert checksum(guarded) == before


def test_other_spellings_of_a_path_reach_no_route_without_the_token(guarded):
    for path in ("//lora_merge/status", "/lora_merge/status/", "/lora_merge/./status", "/LORA_MERGE/status",
                 "/lora_merge%2Fstatus", "/x/../lora_merge/status", "/%6cora_merge/status"):  # fmt: skip
        answer = guarded.client.get(path, follow_redirects=True)
        assert answer.status_code in (401, 404), path
        assert status_of(guarded, "GET", path, {}) in (307, 401, 404), path


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "POST"])
def test_another_method_tells_no_more(guarded, routes, method):
    for _, path in routes:
        assert guarded.client.request(method, path).status_code == 401, path


def test_a_compressed_body_is_refused_with_a_reason(guarded):
    for path in ("/lora_merge/upload?lora_alpha=1", "/update_weights_from_tensor"):
        headers = TOKEN | {"content-encoding": "gzip", "content-type": "application/json"}
        answer = guarded.client.post(path, content=b"\x1f\x8b", headers=headers)
        assert answer.status_code == 415
        assert "compressed bodies are not read" in answer.json()["message"]


def test_a_refusal_leaves_a_line_in_the_log(guarded):
    before = len(guarded.log.read_text(errors="replace"))
    guarded.client.post("/update_weights_from_disk", json={}, headers={"origin": "https://evil.example"} | TOKEN)
    guarded.client.post("/lora_merge/reset")
    written = guarded.log.read_text(errors="replace")[before:].splitlines()
    lines = [json.loads(text[text.index('{"event"') :]) for text in written if '{"event"' in text]
    told = [(line["event"], line["status"], line["reason"]) for line in lines]
    assert told == [("update_weights_from_disk", 403, "origin"), ("reset", 401, "token")]


def test_with_the_token_they_answer(guarded):
    for path in ("status", "metrics"):
        assert guarded.client.get(f"/lora_merge/{path}", headers=TOKEN).status_code == 200
    assert guarded.post("/lora_merge/reset", headers=TOKEN).status_code == 200
    assert guarded.client.get("/health").status_code == 200


def test_the_command_line_takes_the_token_from_the_environment(guarded):
    for key, code, told in (("secret", 0, "transformer"), ("wrong", 1, "answered 401: SGLD_LORA_API_KEY is set")):
        done = CliRunner().invoke(app, ["status", str(guarded.client.base_url)], env={"SGLD_LORA_API_KEY": key})
        assert (done.exit_code, told in done.output) == (code, True)


@pytest.mark.parametrize("path", ["/update_weights_from_tensor", "/lora_merge/upload", "/lora_merge/verify"])
def test_a_body_over_the_limit_is_refused_whether_its_length_was_announced_or_not(guarded, path):
    headers = TOKEN | {"content-type": "application/json"}
    large = guarded.client.post(path, content=b"x" * 2000, headers=headers)
    chunked = guarded.client.post(path, content=iter([b"x" * 900] * 3), headers=headers)
    assert (large.status_code, chunked.status_code) == (413, 413)
    assert "SGLD_LORA_MAX_BODY_MB" in large.json()["message"]


def test_no_field_of_a_request_names_a_file(guarded):
    """``upload_path`` is between our processes alone; a caller's is a field that nobody knows."""
    body = {"serialized_named_tensors": [""], "weight_update_mode": "lora_merge", "upload_path": "/etc/hostname"}
    answer = guarded.post("/update_weights_from_tensor", body, headers=TOKEN)
    assert answer.status_code == 400
    assert "not a readable pickle" in answer.json()["message"]
    upload = guarded.client.post("/lora_merge/upload?upload_path=/etc/hostname&lora_alpha=1", headers=TOKEN)
    assert upload.status_code == 400
    assert "not a safetensors file" in upload.json()["message"]
