"""Uploads that are many, large, silent or slow, on a real HTTP server with the routes and the guard of the engine."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
import warnings

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from server_patches import upload, upload_file
from server_patches.access_rules import Limits
from server_patches.guard import Gate, Guard

with warnings.catch_warnings():  # what sglang imports
    warnings.simplefilter("ignore")
    from server_patches.coordinator import Coordinator
    from server_patches.replicas import Replicas
    from server_patches.routes import MergeRoutes

QUERY = "/lora_merge/upload?lora_alpha=1"


class Engine:
    """The server, and the workers that it asks: they have read the file, and refuse it."""

    def __init__(self, uploads, **limits):
        self.asked = []
        app = FastAPI()
        app.include_router(MergeRoutes(Coordinator(Replicas(self.ask, 1), 600.0), uploads).router())
        app.add_middleware(Gate, router=app.router, guard=Guard(Limits(**limits), lambda: None))
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def ask(self, _, req):
        self.asked.append(req)
        return {"status": 400, "reason": "request", "message": "read it", "payload_opened": [True], "snapshot": {},
                "failed": None, "staged_bytes": 0, "staged_update": None, "sleeping": False}  # fmt: skip

    def open_upload(self, body=b"x"):
        """An upload whose body never ends."""
        client = socket.create_connection(("127.0.0.1", self.port))
        head = f"POST {QUERY} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9999999\r\n\r\n"
        client.sendall(head.encode() + body)
        return client

    def honest(self, nbytes=100_000, **kwargs):
        return httpx.post(self.url + QUERY, content=b"x" * nbytes, timeout=60, trust_env=False, **kwargs)

    def close(self):
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture
def serve(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="server_patches.routes")
    monkeypatch.setattr(upload_file, "_SHARED_MEMORY", tmp_path)
    made = []

    def start(uploads=None, **limits):
        made.append(Engine(uploads, **limits))
        return made[-1]

    yield start
    for engine in made:
        engine.close()
    assert not list(tmp_path.iterdir())


def answer_of(client):
    """Status and message."""
    client.settimeout(30)
    answer = b""
    with contextlib.suppress(OSError):
        while b"\r\n\r\n" not in answer or not answer.rstrip().endswith(b"}"):
            if not (more := client.recv(65536)):
                break
            answer += more
    return int(answer.split()[1]), json.loads(answer.partition(b"\r\n\r\n")[2])["message"]


def lines(caplog, count):
    """The log's lines, once there are so many."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        found = [json.loads(record.getMessage()) for record in list(caplog.records) if record.name.endswith(".routes")]
        if len(found) >= count:
            break
        time.sleep(0.02)
    assert len(found) == count
    return found


def test_an_upload_that_falls_silent_is_cut_with_a_message(serve, caplog):
    engine = serve(upload.Uploads(idle_s=0.3))
    with engine.open_upload(b"x" * 100_000) as client:
        status, message = answer_of(client)
    assert status == 408
    assert "the upload is cut after 100000 bytes: too little came in 0.3 s" in message
    assert "64 KiB in 0.3 s (SGLD_LORA_UPLOAD_IDLE_S)" in message
    (line,) = lines(caplog, 1)
    assert (line["event"], line["status"], line["reason"], line["bytes"]) == ("upload", 408, "upload", 100_000)
    assert engine.asked == []


def test_a_trickle_is_silence(serve, caplog):
    engine = serve(upload.Uploads(idle_s=0.5))
    begun = time.monotonic()
    with engine.open_upload() as client, contextlib.suppress(OSError):
        for _ in range(200):
            client.sendall(b"x")
            time.sleep(0.05)
            if lines_now := [record for record in caplog.records if record.name.endswith(".routes")]:
                break
    assert lines_now
    assert time.monotonic() - begun < 8  # of the 10 s that it would go on
    assert engine.honest().json()["message"] == "read it"


def test_an_honest_upload_is_through_beside_sixty_that_are_open_and_idle(serve, caplog):
    engine = serve(upload.Uploads(count=16, idle_s=6.0))
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(engine.open_upload()) for _ in range(60)]
        time.sleep(0.2)
        begun = time.monotonic()
        assert engine.honest().json()["message"] == "read it"
        took = time.monotonic() - begun
        assert took < 9  # as 90 s are to the 60 s of the default
        assert {answer_of(client)[0] for client in idle} == {408}
    assert len(lines(caplog, 61)) == 61


def test_no_more_than_the_limit_have_a_file(serve, tmp_path, caplog):
    engine = serve(upload.Uploads(count=2, idle_s=3.0))
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(engine.open_upload(b"x" * 70_000))
        time.sleep(0.1)
        assert len(list(tmp_path.iterdir())) == 2
    lines(caplog, 6)


def test_one_that_gets_no_place_is_told_so(serve, caplog):
    """Those before it are not silent."""
    engine = serve(upload.Uploads(count=1, idle_s=0.6))
    ended = threading.Event()

    def send(client):
        with contextlib.suppress(OSError):
            while not ended.wait(0.005):
                client.sendall(b"x" * 10_000)

    with engine.open_upload() as busy:
        sender = threading.Thread(target=send, args=(busy,))
        sender.start()
        time.sleep(0.1)
        answer = engine.honest(nbytes=10)
        ended.set()
        sender.join()
    assert answer.status_code == 429
    assert "1 uploads are open, which is the limit (SGLD_LORA_MAX_UPLOADS), and none ended in 0.6 s" in answer.text
    lines(caplog, 2)


def test_all_uploads_together_have_a_limit_of_bytes(serve, caplog):
    engine = serve(upload.Uploads(max_bytes=150_000, idle_s=5.0))
    alone = engine.honest(nbytes=160_000)
    assert alone.status_code == 413
    assert "all uploads together may have 150000 (SGLD_LORA_MAX_UPLOADS_MB)" in alone.text
    with engine.open_upload(b"x" * 100_000):
        time.sleep(0.2)
        beside = engine.honest(nbytes=100_000)
        assert beside.status_code == 429
        assert "all open uploads together have" in beside.text
    lines(caplog, 3)
    assert engine.honest(nbytes=100_000).json()["message"] == "read it"


def test_a_client_that_goes_away_leaves_a_line(serve, caplog):
    engine = serve()
    engine.open_upload(b"x" * 1000).close()
    (line,) = lines(caplog, 1)
    assert (line["status"], line["reason"], line["bytes"]) == (400, "upload", 1000)
    assert "the client went away after 1000 bytes" in line["message"]


def test_a_body_over_the_guards_limit_leaves_a_line(serve, caplog):
    engine = serve(max_body_bytes=1000)
    answer = httpx.post(engine.url + QUERY, content=iter([b"x" * 900] * 3), trust_env=False)
    assert answer.status_code == 413
    (line,) = lines(caplog, 1)
    assert (line["status"], line["reason"]) == (413, "too_large")
    assert "SGLD_LORA_MAX_BODY_MB" in line["message"]


def test_the_place_is_free_again_whatever_the_end(serve, caplog):
    engine = serve(upload.Uploads(count=1, idle_s=0.3))
    for _ in range(3):
        with engine.open_upload() as client:
            assert answer_of(client)[0] == 408
        assert engine.honest().json()["message"] == "read it"
    lines(caplog, 6)
