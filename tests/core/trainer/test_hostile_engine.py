"""What an engine or a gateway may answer, however broken: a `SyncError` that names it, in time and in little memory."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import resource
import socket
import threading
import time

import pytest

from sgld_lora_merge.cli.commands import status as cli_status
from sgld_lora_merge.trainer.engine_client import MAX_ANSWER_NBYTES, EngineClient, Unanswered
from sgld_lora_merge.trainer.transport import HttpTransport, SyncError, UploadTransport
from sgld_lora_merge.wire.schema import STATUS_ROUTE

GOOD_STATUS = {"success": True, "modules": {}, "updates": []}


class RawEngine:
    """Answers each connection with bytes, in pieces with pauses between them; reads the request's head only."""

    def __init__(self):
        self.pieces, self.pause, self.heads = [], 0.0, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.closing = threading.Event()
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                self.threads.append(threading.Thread(target=self.serve, args=(client,)))
                self.threads[-1].start()

    def serve(self, client):
        with client, contextlib.suppress(OSError):
            client.settimeout(5)
            self.heads.append(client.recv(65536))
            for piece in self.pieces:
                client.sendall(piece)
                if self.closing.wait(self.pause):
                    return
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536):
                pass

    def answers(self, body, status=200, headers=""):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.pieces = [f"HTTP/1.1 {status} x\r\ncontent-length: {len(data)}\r\n{headers}\r\n".encode(), data]

    def close(self):
        self.closing.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join()


@pytest.fixture
def engine():
    raw = RawEngine()
    yield raw
    raw.close()


def fault(call, url):
    with pytest.raises(SyncError) as raised:
        call()
    assert url in str(raised.value)
    assert len(str(raised.value)) < 3000
    assert all(c.isprintable() for c in str(raised.value))
    return str(raised.value)


BROKEN_STATUS = [
    b"[" * 200_000,
    b'{"a":' * 40_000,
    b"",
    b"null",
    b"5",
    b"\xff\xfe",
    {"success": True},
    {"success": True, "modules": {}},
    {"success": True, "updates": []},
    {"success": True, "modules": [], "updates": {}},
    {"success": True, "modules": {"transformer": 5}, "updates": []},
    {"success": True, "modules": {"transformer": {"weight_version": 7}}, "updates": []},
    {"success": True, "modules": {}, "updates": [{"state": "live"}]},
    {"success": False, "message": 5, "payload_opened": 5},
    {"success": False, "payload_opened": ["x" * 100_000]},
    {"success": False, "message": "\x1b[2Jforged\nline" * 1000},
    {"success": True, "modules": {str(index): 1 for index in range(100_000)}, "updates": []},
    {"success": True, "modules": {}, "updates": [[]] * 1_000_000},
    {"success": False, "payload_opened": [5] * 1_000_000},
]


@pytest.mark.parametrize("body", BROKEN_STATUS, ids=range(len(BROKEN_STATUS)))
@pytest.mark.parametrize("http_status", [200, 500])
def test_whatever_a_status_holds_it_is_a_sync_error(engine, body, http_status):
    engine.answers(body, http_status)
    fault(lambda: HttpTransport(engine.url).ask(STATUS_ROUTE), engine.url)


def test_an_answer_of_many_faults_is_refused_without_a_list_of_them(engine):
    engine.answers({"success": True, "modules": {}, "updates": [[]] * 1_000_000})
    told = fault(lambda: HttpTransport(engine.url).ask(STATUS_ROUTE), engine.url)
    assert "updates: Value error, it has 1000000 entries, at most 1000 are read" in told


@pytest.mark.parametrize("opened", [5, "yes", [5], {}, [True, None]])
def test_a_refusal_with_a_wrong_list_of_opened_payloads_is_one_all_the_same(engine, opened):
    engine.answers({"success": False, "message": "no", "payload_opened": opened}, 400)
    with pytest.raises(SyncError, match="answered 400") as raised:
        HttpTransport(engine.url).update({"update_id": "u"})
    assert (raised.value.payload_opened, raised.value.answered) == ([], 400)


@pytest.mark.parametrize(
    ("route", "answer"),
    [("/lora_merge/commit", {}), ("/lora_merge/commit", {"modules": {"t": []}}), ("/lora_merge/resolve", {}),
     ("/lora_merge/resolve", {"modules": {"t": {"a": {"module": "t"}}}}), ("/lora_merge/verify", {"message": None})],
)  # fmt: skip
def test_an_answer_that_lacks_what_its_route_has_is_a_sync_error(engine, route, answer):
    engine.answers({"success": True, **answer})
    assert "has not the form of that route" in fault(lambda: HttpTransport(engine.url).ask(route, {}), engine.url)


def test_a_compressed_answer_is_not_unpacked(engine):
    bomb = gzip.compress(b" " * 200_000_000, 9)
    engine.answers(bomb, headers="content-encoding: gzip\r\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = fault(lambda: HttpTransport(engine.url).ask(STATUS_ROUTE), engine.url)
    assert "content-encoding 'gzip', which was not asked for" in told
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    assert b"accept-encoding: identity" in engine.heads[0].lower()


def test_an_answer_without_an_end_is_cut(engine):
    engine.pieces = [b"HTTP/1.1 200 x\r\n\r\n", *[b" " * 2**20] * 20]
    told = fault(lambda: HttpTransport(engine.url).ask(STATUS_ROUTE), engine.url)
    assert f"more than {MAX_ANSWER_NBYTES} bytes" in told


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 x\r\n", b"HTTP/1.1 200 x\r\ncontent-length: 9999\r\n\r\n"])
def test_an_answer_that_comes_byte_by_byte_has_the_time_limit_as_a_whole(engine, head):
    engine.pieces, engine.pause = [head, *[b"x"] * 1000], 0.05
    begun = time.monotonic()
    told = fault(lambda: HttpTransport(engine.url, timeout=0.5).ask(STATUS_ROUTE), engine.url)
    assert "did not answer: ReadTimeout" in told
    assert time.monotonic() - begun < 5  # without a limit for the whole: 50 s


def test_informational_answers_without_an_end_do_not_lengthen_it(engine):
    engine.pieces, engine.pause = [b"HTTP/1.1 102 x\r\n\r\n"] * 1000, 0.05
    fault(lambda: HttpTransport(engine.url, timeout=0.5).ask(STATUS_ROUTE), engine.url)


@pytest.mark.parametrize("noise", [b"SSH-2.0-x\r\n", b"\x00" * 1000, b"HTTP/1.1 2000 x\r\n\r\n"])
def test_another_protocol_is_a_sync_error(engine, noise):
    engine.pieces = [noise]
    assert "did not answer: RemoteProtocolError" in fault(lambda: HttpTransport(engine.url).ask("/x"), engine.url)


def test_an_upload_that_nobody_reads_ends(engine):
    engine.pieces, engine.pause = [b""], 60
    told = fault(lambda: UploadTransport(engine.url, timeout=0.5).update({}, b"x" * 2**25), engine.url)
    assert "Timeout" in told


def test_proxies_of_the_environment_are_not_asked(engine, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    engine.answers(GOOD_STATUS)
    assert HttpTransport(engine.url).ask(STATUS_ROUTE) == GOOD_STATUS
    told = fault(lambda: HttpTransport("http://127.0.0.1:9").ask(STATUS_ROUTE), "http://127.0.0.1:9")
    assert "a proxy is set in the environment, and is not used for engines" in told


def test_a_url_may_have_a_path_and_a_name(engine):
    engine.answers(GOOD_STATUS)
    url = engine.url.replace("//", "//me:secret@") + "/engine/7/"
    HttpTransport(url).ask(STATUS_ROUTE)
    head = engine.heads[0].decode()
    assert head.startswith("GET /engine/7/lora_merge/status HTTP/1.1\r\n")
    assert re.search(r"Authorization: Basic bWU6c2VjcmV0\r\n", head)


def test_a_scheme_that_is_none_is_a_sync_error():
    fault(lambda: HttpTransport("ftp://127.0.0.1").ask(STATUS_ROUTE), "ftp://127.0.0.1")
    with pytest.raises(Unanswered, match="not http or https"):
        EngineClient("localhost:30000").send("GET", "/health", 1)


def test_the_command_line_says_what_a_status_lacks(engine):
    engine.answers(GOOD_STATUS)
    assert "totals" in fault(lambda: cli_status(HttpTransport(engine.url)), engine.url)
