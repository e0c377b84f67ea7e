"""Engines on a local Ray, each one a small HTTP server that has a version: places, actors, the driver's end."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import ray

from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.trainer import RayTransport, RolloutManager, SyncError, add_lora_arguments, validate_lora_arguments
from support.cluster import local_ray
from tests.core.rollout.test_engine_process import is_there, wait_until_gone

ENGINE = """
import http.server, json, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"success": True, "modules": {}, "updates": []}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.do_GET()
print(sys.argv, flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def cluster():
    with local_ray(num_cpus=4):
        yield


def arguments():
    parser = argparse.ArgumentParser()
    add_lora_arguments(parser)
    return validate_lora_arguments(parser.parse_args(["--use-lora", "--model-family", "zimage"]), parser)


def manager(folder, count=2, **kwargs):
    (folder / "engine.py").write_text(ENGINE)
    given = {"gpus_per_engine": 0, "command": (sys.executable, str(folder / "engine.py")), "look_every": 0.2} | kwargs
    return RolloutManager(arguments(), ["--model-path", "x"], engines=count, folder=folder, **given)


@pytest.fixture(scope="module")
def engines(cluster, tmp_path_factory):
    with manager(tmp_path_factory.mktemp("two"), merge_mode="merge") as made:
        yield made


def test_every_engine_has_what_the_trainers_flags_say(engines):
    for engine in engines.engines:
        assert is_there(engine.pid)
        log = Path(engine.log)
        assert "'--lora-merge-mode', 'merge'" in log.read_text()
        assert '"lora_target_modules": ["to_q", "to_k", "to_v"' in log.with_name("config.json").read_text()
        assert RayTransport(engine.actor).ask("/lora_merge/status")["success"] is True


def test_the_watch_starts_an_engine_again_while_nobody_asks(engines):
    pid = engines.engines[1].pid
    os.kill(pid, signal.SIGKILL)
    for _ in range(600):
        if engines.engines[1].pid != pid:
            break
        time.sleep(0.05)
    assert is_there(engines.engines[1].pid)


def test_an_actor_that_dies_takes_its_engine_along_and_both_are_replaced(engines, caplog):
    first = engines.engines[0]
    pid = first.pid
    with caplog.at_level(logging.INFO, "sgld_lora_merge"):
        ray.kill(first.actor)
        assert wait_until_gone(pid)
        engines.heal()
    assert first.pid != pid
    assert is_there(first.pid)
    assert "engine 0 has lost its actor, and gets another one" in caplog.text


def test_engines_without_a_place_are_refused_with_what_there_is(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("sgld_lora_merge.rollout.manager.PLACEMENT_S", 0.5)
    with pytest.raises(LoraMergeError, match=r"no place for 2 engines of {'CPU': 1.0, 'GPU': 8.0}; Ray has .*'CPU'"):
        manager(tmp_path, gpus_per_engine=8)


def test_when_one_engine_does_not_start_its_log_is_told_and_none_is_left(cluster, tmp_path):
    script = tmp_path / "picky.py"
    script.write_text('import sys\nif "/engine-0/" in str(sys.argv):\n    sys.exit("no such model")\n' + ENGINE)
    with pytest.raises(SyncError, match=r"(?s)engine 0: engine-0 ended with code 1 .*its log.*no such model"):
        manager(tmp_path, command=(sys.executable, str(script)))
    assert (tmp_path / "engine-1" / "server.log").exists()
    started = [line for line in (Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit())
               if line.exists() and str(script) in line.read_bytes().decode(errors="replace")]  # fmt: skip
    assert started == []


def test_without_ray_the_trainers_side_works_and_what_needs_it_says_so(monkeypatch):
    import sgld_lora_merge.trainer as trainer

    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("trainer.ray_transport", "rollout.ray_engine", "rollout.manager"):
        monkeypatch.delitem(sys.modules, f"sgld_lora_merge.{name}", raising=False)
    for name in ("RayTransport", "RolloutManager"):
        with pytest.raises(ImportError, match=rf"{name} needs Ray: pip install 'sgld-lora-merge\[ray\]'"):
            getattr(trainer, name)
    with pytest.raises(AttributeError, match="no attribute 'Rollout'"):
        _ = trainer.Rollout


def test_an_actor_of_somebody_elses_is_told_what_it_lacks_and_what_it_said():
    @ray.remote
    class Theirs:
        def update_weights_from_tensor(self, **fields):
            return {"success": fields["good"], "message": "half a pair", "payload_opened": [True]}

        def upload(self, file, **fields):
            raise ValueError("no disk")

    transport = RayTransport(Theirs.options(num_cpus=0).remote(), timeout=60)
    assert transport.update({"good": True})["success"] is True
    with pytest.raises(SyncError, match="answered: half a pair") as refused:
        transport.update({"good": False})
    assert refused.value.payload_opened == [True]
    with pytest.raises(SyncError, match="the actor failed: ValueError: no disk"):
        transport.update({}, b"file")
    with pytest.raises(SyncError, match=r"the actor cannot do this: .*ask"):
        transport.ask("/lora_merge/status")


def test_no_engine_outlives_a_driver_that_is_killed(tmp_path):
    driver = textwrap.dedent(f"""
        import time, ray
        from pathlib import Path
        from tests.core.rollout.test_ray_engines import manager
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        engines = manager(Path({str(tmp_path)!r}), 1)
        print(engines.engines[0].pid, flush=True)
        time.sleep(1000)
    """)
    environment = os.environ | {"RAY_worker_niceness": "0"}
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          cwd=Path(__file__).parents[3], env=environment) as started:  # fmt: skip
        pid = int(started.stdout.readline())
        assert is_there(pid)
        started.kill()
    assert wait_until_gone(pid)
