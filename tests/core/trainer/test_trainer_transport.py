"""Answers that come, do not come, or say no: against a small HTTP server that is told what to do."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sgld_lora_merge.trainer import engine_client, transport
from sgld_lora_merge.trainer.transport import HttpTransport, SyncError, UploadTransport

GOOD = {"success": True, "state": "live", "modules": {}}


class Scripted:
    """Answers POSTs by a list of (status, body), "drop" or "slow"; GETs by ``status``."""

    def __init__(self):
        self.script, self.posts, self.headers, self.status = [], [], [], {"success": True, "modules": {}, "updates": []}
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                outer.posts.append((self.path, body))
                outer.headers.append(self.headers)
                act = outer.script.pop(0) if len(outer.script) > 1 else outer.script[0]
                if act == "slow":
                    outer.released.wait(0.6)
                    act = (200, GOOD)
                if act == "hang":
                    outer.released.wait(60)
                    act = "drop"
                if act == "drop":
                    self.close_connection = True
                    self.connection.close()
                    return
                self.reply(*act)

            def do_GET(self):
                self.reply(200, outer.status)

            def reply(self, status, body):
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                with contextlib.suppress(OSError):  # the client may have gone away, as the test wants it
                    self.send_response(status)
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_):
                pass

            def finish(self):
                with contextlib.suppress(OSError, ValueError):
                    super().finish()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(transport, "PAUSE_S", 0.01)
    scripted = Scripted()
    thread = threading.Thread(target=scripted.server.serve_forever, args=(0.01,))
    thread.start()
    yield scripted
    scripted.released.set()
    scripted.server.shutdown()
    thread.join()
    scripted.server.server_close()


def test_an_update_is_json_and_its_answer_is_returned(engine):
    engine.script = [(200, GOOD)]
    assert HttpTransport(engine.url).update({"update_id": "u", "lora_rank": 4}) == GOOD
    assert engine.posts == [("/update_weights_from_tensor", b'{"update_id": "u", "lora_rank": 4}')]
    assert engine.headers[0]["content-type"] == "application/json"


def test_n8_an_answer_that_says_no_raises_with_its_message(engine):
    for answer in ((400, {"success": False, "message": "unknown layer x"}), (200, {"success": False, "message": "x"})):
        engine.script = [answer]
        with pytest.raises(SyncError, match=rf"{answer[0]}.*x"):
            HttpTransport(engine.url).update({"update_id": "u"})
    assert len(engine.posts) == 2


def test_a_refusal_carries_which_payloads_were_opened(engine):
    engine.script = [(400, {"success": False, "message": "no", "payload_opened": [True, False]})]
    with pytest.raises(SyncError) as caught:
        HttpTransport(engine.url).update({"update_id": "u"})
    assert caught.value.payload_opened == [True, False]
    assert caught.value.answered == 400


PAGE = b"<html>gateway</html>"
FOREIGN = [(200, PAGE), (200, b"[1]"), (500, PAGE), (502, PAGE), (503, b""), (504, {"message": "upstream timed out"})]


@pytest.mark.parametrize("answer", FOREIGN, ids=lambda answer: str(answer))
def test_an_answer_that_no_engine_gave_is_a_lost_one(engine, answer):
    engine.script = [answer, (200, GOOD)]
    assert HttpTransport(engine.url).update({"update_id": "u"}) == GOOD
    assert len(engine.posts) == 2
    assert len(set(engine.posts)) == 1
    engine.script, engine.posts = [answer], []
    with pytest.raises(SyncError, match=rf"answered {answer[0]}: .*not known; its status is None") as caught:
        HttpTransport(engine.url).update({"update_id": "u"})
    assert caught.value.answered is None
    assert len(engine.posts) == transport.TRIES


def test_a_gateway_that_refuses_is_not_asked_again_unless_the_engine_has_the_update(engine):
    engine.script = [(413, PAGE), (200, GOOD)]
    with pytest.raises(SyncError, match="answered 413: <html>gateway</html>"):
        HttpTransport(engine.url).update({"update_id": "u"})
    assert len(engine.posts) == 1
    engine.script, engine.posts = [(413, PAGE), (200, GOOD)], []
    engine.status["updates"] = [{"update_id": "u", "state": "live"}]
    assert HttpTransport(engine.url).update({"update_id": "u"}) == GOOD


def test_what_a_gateway_says_of_an_update_without_an_id_is_raised_at_once(engine):
    engine.script = [(504, PAGE)]
    with pytest.raises(SyncError, match="answered 504: <html>") as caught:
        HttpTransport(engine.url).update({})
    assert (caught.value.answered, len(engine.posts)) == (504, 1)


@pytest.mark.parametrize("state", [None, "live", "staged"])
def test_a_worker_that_hangs_has_the_time_limit_once(engine, monkeypatch, state):
    monkeypatch.setattr(transport, "SETTLE_S", 0.3)
    engine.script = ["hang"]
    engine.status["updates"] = [{"update_id": "u", "state": state}] if state else []
    with pytest.raises(SyncError, match=rf"ReadTimeout.*its status is {state!r}"):
        HttpTransport(engine.url, timeout=0.3).update({"update_id": "u"})
    # the answer of an update that the engine has is asked for again, for a short time each
    assert len(engine.posts) == (1 if state is None else transport.TRIES)


def test_a_lost_answer_is_asked_for_with_the_same_bytes(engine):
    engine.script = ["drop", "drop", (200, GOOD)]
    assert HttpTransport(engine.url).update({"update_id": "u"}) == GOOD
    assert len(engine.posts) == 3
    assert len(set(engine.posts)) == 1


def test_after_a_time_out_an_update_that_is_live_gets_its_answer(engine):
    engine.script = ["slow", (200, GOOD)]
    engine.status["updates"] = [{"update_id": "u", "state": "live"}]
    assert HttpTransport(engine.url, timeout=0.2).update({"update_id": "u"}) == GOOD
    assert len(set(engine.posts)) == 1


def test_after_a_time_out_an_update_that_the_engine_abandoned_raises(engine):
    engine.script = ["slow"]
    engine.status["updates"] = [{"update_id": "u", "state": "abandoned"}]
    with pytest.raises(SyncError, match=r"ReadTimeout.*'abandoned'"):
        HttpTransport(engine.url, timeout=0.2).update({"update_id": "u"})
    assert len(engine.posts) == 1


def test_an_engine_that_never_answers_raises_and_the_message_says_what_is_not_known(engine):
    engine.script = ["drop"]
    with pytest.raises(SyncError, match="What became of the update is not known; its status is None") as caught:
        HttpTransport(engine.url).update({"update_id": "u"})
    assert caught.value.answered is None
    assert len(engine.posts) == transport.TRIES


def test_without_an_update_id_nothing_is_sent_twice(engine):
    engine.script = ["drop"]
    with pytest.raises(SyncError, match="did not answer"):
        HttpTransport(engine.url).update({})
    assert len(engine.posts) == 1


def test_nobody_there_raises(engine):
    nobody = HttpTransport("http://127.0.0.1:9")
    with pytest.raises(SyncError, match="ConnectError"):
        nobody.update({"update_id": "u"})
    with pytest.raises(SyncError, match="ConnectError"):
        nobody.ask("/lora_merge/status")


def test_the_key_of_the_environment_is_sent(engine, monkeypatch):
    monkeypatch.setenv("SGLD_LORA_API_KEY", "secret")
    engine.script = [(200, GOOD)]
    HttpTransport(engine.url).ask("/lora_merge/commit", {"update_id": "u"})
    assert engine.headers[0]["authorization"] == "Bearer secret"


def test_an_upload_is_the_file_and_its_fields_are_the_query(engine, monkeypatch):
    monkeypatch.setattr(engine_client, "PIECE_NBYTES", 3)
    engine.script = ["drop", (200, GOOD)]
    fields = {"update_id": "u", "lora_alpha": 6.0, "target_module": None}
    assert UploadTransport(engine.url).update(fields, b"file") == GOOD
    assert engine.posts == [("/lora_merge/upload?update_id=u&lora_alpha=6.0", b"file")] * 2
