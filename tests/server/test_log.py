"""One line of JSON in the engine's log for every request about weights."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest


@contextmanager
def written(engine):
    """The lines that are written inside; complete when the context ends."""
    before = len(engine.server.log.read_text(errors="replace"))
    lines = []
    yield lines
    for text in engine.server.log.read_text(errors="replace")[before:].splitlines():
        _, brace, rest = text.partition('{"event": ')
        if brace:
            lines.append(json.loads(brace + rest))


def test_every_request_leaves_one_line_in_its_order(zimage):
    with written(zimage) as lines:
        zimage.update(zimage.adapter(), weight_version="1")
        zimage.update(zimage.adapter(seed=2), update_id="logged", weight_version="2", commit=False)
        zimage.server.post("/lora_merge/commit", {"update_id": "logged"})
        zimage.server.post("/lora_merge/rollback")
        zimage.server.post("/lora_merge/reset")
        zimage.server.client.post("/lora_merge/upload", content=b"hello", params={"lora_alpha": 6})
    told = [(line["event"], line["status"], line["state"], line["update_id"], line["weight_version"]) for line in lines]
    assert told == [
        ("update", 200, "live", None, "1"),
        ("update", 200, "staged", "logged", "1"),
        ("commit", 200, "live", "logged", "2"),
        ("rollback", 200, "live", None, "1"),
        ("reset", 200, "live", None, None),
        ("upload", 400, None, None, None),
    ]
    first, *_, last = lines
    assert (first["layers"], first["modules"], first["reason"], first["message"]) == (14, ["transformer"], None, None)
    assert first["bytes"] > 0
    assert first["rounding_loss"] > 0
    assert first["timings_ms"]["total"] > 0
    assert (last["reason"], last["bytes"]) == ("request", 5)
    assert "not a safetensors file" in last["message"]


def test_a_repeated_answer_says_so(zimage):
    body = zimage.fields(zimage.adapter(), update_id="logged twice")
    with written(zimage) as lines:
        zimage.send(body)
        zimage.send(body)
    assert [line["repeated"] for line in lines] == [False, True]


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [({"lora_rank": 9}, 400, "request"), ({"lora_rank": "4"}, 422, "request"), ({"update_id": ""}, 400, "request")],
)
def test_a_failure_is_told_with_what_the_client_was_told(zimage, fields, status, reason):
    with written(zimage) as lines:
        answer = zimage.update(zimage.adapter(), **fields)
    (line,) = lines
    assert (line["status"], line["reason"], line["message"]) == (status, reason, answer.json()["message"])
