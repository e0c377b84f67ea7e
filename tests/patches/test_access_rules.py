"""Who may reach the routes that change weights."""

from __future__ import annotations

import functools
import types

import pytest

from server_patches.access_rules import Limits, has_control_characters, is_guarded, limits_from, refusal
from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.settings import settings_from

OPEN = Limits()
JSON = {"content-type": "application/json", "content-length": "2"}


SGLANG = "sglang.multimodal_gen.runtime.entrypoints."


def endpoint(name):
    """A function of this dotted name, which is all that the guard looks at."""
    module, _, last = name.rpartition(".")
    return types.FunctionType((lambda: None).__code__, {"__name__": module}, last)


@pytest.mark.parametrize(
    ("name", "guarded"),
    [("server_patches.routes.update", True), ("server_patches.routes.status", True),
     ("server_patches.routes.metrics", True), ("server_patches.routes.upload", True),
     ("server_patches.routes.model_info", False),
     (SGLANG + "post_training.weights_api.update_weights_from_disk", True),
     (SGLANG + "post_training.weights_api.release_memory_occupation", True),
     (SGLANG + "post_training.weights_api.of_a_later_version", True), (SGLANG + "post_training.later_api.any", True),
     (SGLANG + "post_training.rollout_api.rollout_generate", False),
     (SGLANG + "openai.common_api.set_lora", True), (SGLANG + "openai.common_api.unload_LoRA", True),
     (SGLANG + "openai.common_api.available_models", False), (SGLANG + "openai.image_api.generations", False),
     (SGLANG + "http_server.health", False), (SGLANG + "http_server.reload_weights", True)],
)  # fmt: skip
def test_weight_endpoints_are_guarded_and_no_others(name, guarded):
    assert is_guarded(endpoint(name)) is guarded


def test_what_has_no_name_is_not_guarded():
    assert not is_guarded(None)
    assert not is_guarded(functools.partial(endpoint("a.b")))


@pytest.mark.parametrize(
    ("path", "raw", "odd"),
    [("/a\n", b"/a%0a", True), ("/a\r\n", b"/a%0d%0a", True), ("/a\t", b"/a%09", True), ("/a\0", b"/a%00", True),
     ("/a\x7f", b"/a%7f", True), ("/a\x85", b"/a%c2%85", True), ("/a", b"/a\n", True), ("/a", b"/a\x7f", True),
     ("/\xc0", b"/\xc3\x80", False), ("/a b", b"/a%20b", False), ("/a", None, False), ("/a%0a", b"/a%250a", False)],
)  # fmt: skip
def test_a_control_character_is_seen_in_either_form_of_a_path(path, raw, odd):
    assert has_control_characters({"path": path, "raw_path": raw}) is odd


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "identity, gzip", "x" * 10_000])
def test_a_compressed_body_is_415_and_says_that_it_is_not_read(encoding):
    for json_only in (True, False):
        status, message = refusal("POST", JSON | {"content-encoding": encoding}, OPEN, json_only=json_only)
        assert status == 415
        assert "compressed bodies are not read" in message
        assert len(message) < 200
    assert refusal("POST", JSON | {"content-encoding": "identity"}, OPEN) is None


def test_a_message_shows_the_beginning_of_a_long_header():
    status, message = refusal("POST", JSON | {"origin": "http://" + "x" * 10_000}, OPEN)
    assert (status, len(message) < 200) == (403, True)
    status, message = refusal("POST", JSON | {"content-type": "x" * 10_000}, OPEN)
    assert (status, len(message) < 200) == (415, True)


def test_without_a_token_nobody_needs_one():
    assert refusal("GET", {}, OPEN) is None
    assert refusal("POST", JSON, OPEN) is None


@pytest.mark.parametrize("given", ["", "Bearer wrong", "secret", "bearer secret"])
def test_a_wrong_token_is_401(given):
    assert refusal("GET", {"authorization": given}, Limits("secret"))[0] == 401


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "PUT", "GET", "ODD"])
def test_every_method_needs_the_token(method):
    assert refusal(method, {}, Limits("secret"))[0] == 401


def test_the_right_token_passes():
    assert refusal("GET", {"authorization": "Bearer secret"}, Limits("secret")) is None


@pytest.mark.parametrize("origin", ["https://example.org", "null", "http://127.0.0.1:31", "http://[", "localhost:30"])
def test_a_foreign_origin_is_403(origin):
    assert refusal("GET", {"origin": origin, "host": "127.0.0.1:30"}, OPEN)[0] == 403


@pytest.mark.parametrize("host", ["127.0.0.1:30", "localhost:30", "[::1]:30", "10.0.0.7"])
def test_the_engines_own_origin_passes(host):
    assert refusal("POST", JSON | {"origin": f"http://{host}", "host": host}, OPEN) is None


@pytest.mark.parametrize("host", ["example.org:30", "localhost.example.org", "127.0.0.1.example.org:30", "[::1", ""])
def test_a_page_whose_name_stands_for_the_engines_address_is_foreign(host):
    """DNS rebinding; a page that knows the token is not."""
    headers = JSON | {"origin": f"http://{host}", "host": host}
    assert refusal("POST", headers, OPEN)[0] == 403
    assert refusal("POST", headers | {"authorization": "Bearer k"}, Limits("k")) is None


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_another_content_type_is_415(kind):
    assert refusal("POST", {"content-type": kind, "content-length": "2"}, OPEN)[0] == 415
    assert refusal("POST", {"content-type": kind, "transfer-encoding": "chunked"}, OPEN)[0] == 415


def test_a_route_that_reads_files_takes_any_content_type():
    headers = {"content-type": "application/x-www-form-urlencoded", "content-length": "2"}
    assert refusal("POST", headers, OPEN, json_only=False) is None
    assert refusal("POST", headers | {"origin": "https://example.org"}, OPEN, json_only=False)[0] == 403


def test_a_charset_is_fine_and_so_is_an_empty_body_without_a_type():
    assert refusal("POST", JSON | {"content-type": "Application/JSON; charset=utf-8"}, OPEN) is None
    assert refusal("POST", {"content-length": "0"}, OPEN) is None
    assert refusal("POST", {}, OPEN) is None


def test_a_large_body_is_413_and_names_the_limit():
    status, message = refusal("POST", JSON | {"content-length": "11"}, Limits(max_body_bytes=10))
    assert status == 413
    assert "11 bytes or more, the limit is 10 (SGLD_LORA_MAX_BODY_MB)" in message


def test_limits_come_from_the_environment():
    assert limits_from(settings_from({})) == Limits(None, 4096 * 2**20)
    environ = {"SGLD_LORA_API_KEY": "k", "SGLD_LORA_MAX_BODY_MB": "0.5"}
    assert limits_from(settings_from(environ)) == Limits("k", 2**19)


@pytest.mark.parametrize("value", ["much", "0", "-1", "inf", "nan"])
def test_a_limit_that_means_nothing_is_named(value):
    with pytest.raises(LoraMergeError, match=f"SGLD_LORA_MAX_BODY_MB='{value}'"):
        limits_from(settings_from({"SGLD_LORA_MAX_BODY_MB": value}))
