"""The commands that need no engine, and what they say when something is wrong."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from sgld_lora_merge.cli import app, commands, doctor, sharing
from sgld_lora_merge.trainer import memory

FAMILY_LAYERS = ("attn.to_q", "attn.to_k", "proj")


def run(*words, code=0, **env):
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", **env})
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def adapter(tmp_path):
    tensors = {}
    for layer in FAMILY_LAYERS:
        tensors |= {f"{layer}.lora_A": torch.randn(2, 6), f"{layer}.lora_B": torch.randn(4, 2)}
    save_file(tensors, tmp_path / "adapter.safetensors")
    return tmp_path / "adapter.safetensors"


@pytest.fixture
def stock_engine():
    """Answers everything as an engine without the plugin does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = b'{"detail": "Not Found"}'
            self.send_response(404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_help_names_every_command():
    told = run("--help")
    for command in ("doctor", "status", "reset", "rollback", "push", "inspect"):
        assert command in told
        assert "--json" in re.sub(r"\x1b\[[0-9;]*m", "", run(command, "--help"))


def test_inspect_shows_layers_and_how_they_meet_a_family(adapter):
    told = run("inspect", adapter, "--alpha", "4", "--family", "sd3")
    assert re.search(r"attn\.to_q +4 x 6 +2 +2 +float32", told)
    assert "3 layers, 0.0 MiB of A and B" in told
    assert "not in the family's target modules: proj" in told
    assert "target modules of the family that no layer has: attn.to_v, attn.to_out.0" in told


def test_alpha_may_be_each_layers_own_rank(tmp_path):
    tensors = {}
    for layer, rank in (("x", 4), ("y", 2)):
        tensors |= {f"{layer}.lora_A": torch.randn(rank, 6), f"{layer}.lora_B": torch.randn(4, rank)}
    save_file(tensors, tmp_path / "adapter.safetensors")
    found = json.loads(run("inspect", tmp_path / "adapter.safetensors", "--alpha", "rank", "--json"))
    assert [(layer["rank"], layer["scale"]) for layer in found["layers"]] == [(4, 1.0), (2, 1.0)]


@pytest.mark.parametrize("command", [("inspect",), ("push", "127.0.0.1:1")])
def test_an_alpha_that_is_neither_is_a_wrong_argument(command, adapter):
    told = run(*command, adapter, "--alpha", "ranks", code=2)
    assert "Invalid value for --alpha: 'ranks' is neither a number nor \"rank\"" in told


def test_inspect_with_base_weights_tells_what_rounding_would_take(adapter, tmp_path):
    base = tmp_path / "base.safetensors"
    save_file({f"{layer}.weight": torch.randn(4, 6).bfloat16() for layer in FAMILY_LAYERS}, base)
    assert "rounding would take" in run("inspect", adapter, "--alpha", "4", "--base", base)
    found = json.loads(run("inspect", adapter, "--alpha", "4", "--base", base, "--json"))
    assert {layer["layer"]: layer["rank"] for layer in found["layers"]} == dict.fromkeys(FAMILY_LAYERS, 2)
    assert 0 < found["rounding_loss"] < 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("status", "127.0.0.1:1"), "sgld-lora-merge: http://127.0.0.1:1 did not answer: ConnectError"),
        (("status", "http://engine:http"), "sgld-lora-merge: 'http://engine:http' is no URL"),
        (("inspect", "gone"), "sgld-lora-merge: gone does not exist"),
        (("push", "127.0.0.1:1", "gone"), "sgld-lora-merge: gone does not exist"),
    ],
)
def test_an_error_is_one_sentence(words, told):
    assert run(*words, code=1).startswith(told)


def test_a_family_that_is_not_there_is_named_with_those_that_are(adapter):
    assert "there is no family 'sd9'; there are cosmos3, " in run("inspect", adapter, "--family", "sd9", code=1)


def test_verify_without_base_weights_is_refused_before_anything_is_sent(adapter):
    told = run("push", "127.0.0.1:1", adapter, "--alpha", "4", "--verify", code=1)
    assert "--verify needs --base" in told


def test_an_engine_without_the_plugin_is_told_from_one_that_is_not_there(stock_engine):
    told = run("status", stock_engine, code=1)
    assert f"http://{stock_engine} is an engine without sgld-lora-merge" in told


def test_wrong_arguments_are_exit_code_2():
    run("push", code=2)


def test_watch_asks_again_until_it_is_interrupted(monkeypatch):
    answers = iter([{"success": True, "number": 1}, {"success": True, "number": 2}])

    def interrupted(_):
        if (answer := next(answers, None)) is None:
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(commands, "status", interrupted)
    lines = run("status", "x", "--watch", "0.01", "--json").splitlines()
    assert [json.loads(line)["number"] for line in lines] == [1, 2]


# doctor


@pytest.mark.parametrize("variable", memory.VARIABLES)
def test_expandable_segments_are_found_in_every_variable(variable):
    check = doctor.allocator({variable: "max_split_size_mb:64, expandable_segments: True"})
    assert check.state == "failure"
    assert f"env -u {variable}" in check.remedy
    assert doctor.allocator({variable: "expandable_segments:False"}).state == "ok"


def test_precision_is_what_the_environment_selects():
    assert doctor.precision({}).meaning.startswith("fp32")
    assert doctor.precision({"SGLANG_DIFFUSION_LORA_MERGE_FP32": "0"}).meaning.startswith("fp16")
    wrong = doctor.precision({"SGLANG_DIFFUSION_LORA_MERGE_FP32": "yes"})
    assert (wrong.state, "is not a precision" in wrong.meaning) == ("failure", True)
    assert wrong.remedy.startswith('set "1"')


def test_little_shared_memory_is_a_warning(tmp_path):
    small = doctor.shared_memory(tmp_path, lambda _: (64 * 2**20, 0, 64 * 2**20))
    assert (small.state, "0.06 GiB" in small.meaning, "--shm-size" in small.remedy) == ("warning", True, True)
    assert doctor.shared_memory(tmp_path, lambda _: (2**33, 0, 2**32)).state == "ok"
    assert doctor.shared_memory(tmp_path / "gone").state == "warning"


def test_another_process_opens_memory_of_this_one():
    assert doctor.share().state == "ok"


def test_memory_that_cannot_be_opened_is_a_failure(monkeypatch):
    monkeypatch.setattr(sharing, "pack", lambda _: ("bm8=", []))
    check = doctor.share()
    assert check.state == "failure"
    assert "the payload is not a readable pickle" in check.meaning
