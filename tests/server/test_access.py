"""With a token: every route that changes weights, or tells of them, needs it; and what every request is limited to."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from server_patches.guard import WEIGHT_ROUTES
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


def test_other_spellings_of_a_path_reach_no_route_without_the_token(guarded):
    for path in ("//lora_merge/status", "/lora_merge/status/", "/lora_merge/./status", "/LORA_MERGE/status",
                 "/lora_merge%2Fstatus", "/x/../lora_merge/status", "/%6cora_merge/status"):  # fmt: skip
        answer = guarded.client.get(path, follow_redirects=True)
        assert answer.status_code in (401, 404), path


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
