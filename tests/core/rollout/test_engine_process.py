"""A child process that stands for an engine: ports, health, its log in errors, and its end in every case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.rollout import gpus, ports
from sgld_lora_merge.rollout.engine_process import EngineProcess, EngineSpec
from sgld_lora_merge.trainer.transport import SyncError

# serves /health as its first argument says, after "serve" and the output path
ENGINE = """
import http.server, json, os, signal, subprocess, sys, time
how, given = sys.argv[6], sys.argv
if how == "dies":
    sys.exit("no such model")
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("child", subprocess.Popen(["sleep", "1000"]).pid, flush=True)
port = int(given[given.index("--port") + 1])
print(json.dumps({name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MINE")}))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if how == "never" or os.path.exists("ill") else 200)
        self.end_headers()
print("serving", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def engine(folder, how, gpus=(), **spec):
    script = folder / "engine.py"
    script.write_text(ENGINE)
    given = {"command": (sys.executable, str(script)), "start_timeout": 30, "environment": {"MINE": "1"}} | spec
    return EngineProcess(EngineSpec([how], folder, **given), "engine-0", gpus)


def is_there(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def wait_until_gone(pid):
    for _ in range(100):
        if not is_there(pid):
            return True
        time.sleep(0.05)
    return False


def test_it_is_started_waited_for_and_stopped(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in an actor of Ray
    process = engine(tmp_path, "well", gpus=["2", "3"])
    assert process.fault() == "it has not been started"
    assert set(process.start()) == {"stop", "start"}
    pid = process.pid
    assert process.fault() is None
    assert '{"CUDA_VISIBLE_DEVICES": "2,3", "OMP_NUM_THREADS": null, "MINE": "1"}' in process.log.read_text()
    process.stop()
    assert not is_there(pid)


def test_one_that_ends_before_it_is_healthy_is_told_with_the_end_of_its_log(tmp_path):
    with pytest.raises(SyncError, match=r"(?s)engine-0 ended with code 1 .*/engine-0/server.log:.*no such model"):
        engine(tmp_path, "dies").start()


def test_one_that_does_not_become_healthy_in_time_is_told_too(tmp_path):
    process = engine(tmp_path, "never", start_timeout=1)
    with pytest.raises(SyncError, match=r"(?s)not healthy after 1 s.*serving"):
        process.start()
    assert process.pid is None


def test_crashes_and_hangs_are_faults_and_a_new_start_ends_them(tmp_path):
    process = engine(tmp_path, "well", patience=0.3)
    process.start()
    first = process.pid
    os.kill(first, signal.SIGSTOP)
    assert "does not answer" in process.fault()
    process.start()
    assert not is_there(first)
    assert process.fault() is None
    os.kill(process.pid, signal.SIGKILL)
    assert wait_until_gone(process.pid)
    assert process.fault() == "its process has ended with code -9"
    process.stop()


def test_what_ignores_sigterm_is_ended_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr("sgld_lora_merge.rollout.engine_process.STOP_S", 0.3)
    process = engine(tmp_path, "stubborn")
    process.start()
    pid = process.pid
    child = int(process.log.read_text().partition("child ")[2].split()[0])
    process.stop()
    assert wait_until_gone(pid)
    assert wait_until_gone(child)


def test_an_engine_ends_with_the_process_that_started_it(tmp_path):
    (tmp_path / "engine.py").write_text(ENGINE)
    owner = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from sgld_lora_merge.rollout.engine_process import EngineProcess, EngineSpec
        folder = Path({str(tmp_path)!r})
        spec = EngineSpec(["well"], folder, command=(sys.executable, str(folder / "engine.py")))
        process = EngineProcess(spec, "e", [])
        process.start()
        print(process.pid, flush=True)
        time.sleep(1000)
    """)
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as started:
        pid = int(started.stdout.readline())
        assert is_there(pid)
        started.kill()
    assert wait_until_gone(pid)


def test_no_two_engines_of_a_machine_get_the_same_ports():
    blocks = [ports.Ports(16) for _ in range(20)]
    taken = [port for block in blocks for port in range(block.first, block.first + 16)]
    assert len(set(taken)) == 20 * 16
    for block in blocks:
        block.close()


def test_ports_that_somebody_listens_on_are_not_given_out(monkeypatch):
    import socket

    monkeypatch.setattr(ports, "LOWEST", 32500)  # above the ports of the engines of other tests
    monkeypatch.setattr(ports, "HIGHEST", 32509)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 32502))
        other.listen()
        block = ports.Ports(4)
        assert block.first == 32504
        with pytest.raises(LoraMergeError, match="no 4 consecutive ports"):
            ports.Ports(4)
    block.close()


def test_gpus_are_told_by_their_uuids():
    listed = "0, GPU-aaa\n1, GPU-bbb\n2, GPU-ccc\n"
    assert gpus.parse(listed, ["2", "0"]) == ["GPU-ccc", "GPU-aaa"]
    with pytest.raises(LoraMergeError, match="lists no GPU 5; it lists 0, 1, 2"):
        gpus.parse(listed, ["5"])
    gpus.check_apart({"engine 0": ["GPU-aaa"], "engine 1": ["GPU-bbb"]})
    with pytest.raises(LoraMergeError, match="GPU-aaa: engine 0, engine 1"):
        gpus.check_apart({"engine 0": ["GPU-aaa"], "engine 1": ["GPU-aaa"]})
