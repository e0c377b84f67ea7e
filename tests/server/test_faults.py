"""The fault table: stage x fault x tp rank -> what is answered, which weights serve, what health says.

Stages are the test hook's, from the parsing of a payload to the end of an update. Each cell that kills its engine needs
one of its own; those beyond the first are `slow`.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.test_tensor_parallel import holds, live
from tests.server.test_upload import body as file_of

# before any rank writes, and after
UNWRITTEN = ("before_plan", "open", "opened", "pair", "plan")
WRITTEN = ("commit", "written")
RANKS = (0, 1)


def health(engine):
    return engine.server.client.get("/health").status_code


def serves_as_before(engine, before):
    """The previous weights, in the engine's own words too, and the next update works."""
    assert live(engine) == before
    assert engine.status()["modules"]["transformer"]["weight_version"] == "good"
    assert health(engine) == 200
    assert engine.update(engine.adapter(seed=3)).status_code == 200
    holds(engine, engine.adapter(seed=3))


def good(engine):
    assert engine.update(engine.adapter(seed=1), weight_version="good").status_code == 200
    return live(engine)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("fault", "error"), [("exception", "RuntimeError"), ("memory", "OutOfMemoryError")])
@pytest.mark.parametrize("stage", UNWRITTEN + WRITTEN)
def test_a_fault_on_one_rank_is_told_and_the_previous_weights_serve(tp2, stage, fault, error, rank):
    before = good(tp2)
    tp2.testhook("fail", rank=rank, stage=stage, fault=fault)
    answer = tp2.update(tp2.adapter(seed=2), weight_version="bad")
    message = answer.json()["message"]
    assert answer.status_code in (400, 500), message
    assert f"rank {rank}: " in message
    assert f"{error}: injected at {stage}" in message
    assert "Nothing was changed: the engine serves transformer at weight_version 'good'" in message
    serves_as_before(tp2, before)


SENDER = """
import json, sys
import torch
from sgld_lora_merge.wire.payload import pack
from support import lora
targets = {layer: torch.empty(shape) for layer, shape in json.loads(sys.argv[1]).items()}
payload, buffers = pack({"transformer": lora.named(lora.random_adapter(targets, seed=2))})
print(payload, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def sender(tp2):
    """The processes of a trainer with an open export of the adapter of seed 2, and its payload."""
    shapes = json.dumps({layer: list(weight.shape) for layer, weight in tp2.targets.items()})
    process = subprocess.Popen(
        [sys.executable, "-c", SENDER, shapes], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    with process:
        payload = process.stdout.readline().strip()
        managers = psutil.Process(process.pid).children()
        yield [process.pid, *(manager.pid for manager in managers)], payload
        for each in (process, *managers):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


@pytest.mark.parametrize("rank", RANKS)
def test_a_sender_that_is_gone_before_its_handle_is_opened_is_told(tp2, sender, rank):
    processes, payload = sender
    before = good(tp2)
    tp2.testhook("fail", rank=rank, stage="open", fault="sender", sender=processes)
    answer = tp2.send(tp2.fields(tp2.adapter()) | {"serialized_named_tensors": [payload]})
    assert answer.status_code == 400, answer.text
    assert "cannot be opened; it is gone" in answer.json()["message"]
    serves_as_before(tp2, before)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("stage", ["pair", "plan", "commit", "written"])
def test_a_sender_that_dies_while_its_handle_is_open_takes_nothing_away(tp2, sender, stage, rank):
    """Every rank has opened the handle where the ranks have agreed; where they have not, the other one may be late."""
    processes, payload = sender
    before = good(tp2)
    tp2.testhook("fail", rank=rank, stage=stage, fault="sender", sender=processes)
    answer = tp2.send(tp2.fields(tp2.adapter()) | {"serialized_named_tensors": [payload]})
    if stage in WRITTEN or answer.status_code == 200:
        assert answer.status_code == 200, answer.text
        assert health(tp2) == 200
        holds(tp2, tp2.adapter(seed=2))
    else:
        assert "cannot be opened; it is gone" in answer.json()["message"]
        serves_as_before(tp2, before)


def test_a_full_shared_memory_is_told_and_the_previous_weights_serve(tp2):
    """The engine writes there in one place only, the body of an upload, before any worker is asked."""
    before = good(tp2)
    tp2.testhook("full_shm")
    upload = {"content": file_of(tp2.adapter(seed=2)), "params": {"lora_alpha": 6}}
    answer = tp2.server.client.post("/lora_merge/upload", **upload)
    assert answer.status_code == 500
    assert "has no room for the upload" in answer.json()["message"]
    assert "Nothing was changed" in answer.json()["message"]
    assert not tp2.server.uploads_left()
    assert live(tp2) == before
    assert tp2.server.client.post("/lora_merge/upload", **upload).status_code == 200
    holds(tp2, tp2.adapter(seed=2))


RESTART = re.compile("restart the (engine|server)", re.IGNORECASE)  # the latter where sglang itself has seen a rank die


def says_to_restart(engine, answer):
    assert answer.status_code == 503, answer.text
    assert RESTART.search(answer.json()["message"])
    told = engine.server.client.get("/health")
    assert told.status_code == 503
    assert RESTART.search(told.text)
    with pytest.raises(httpx.HTTPStatusError, match="503"):
        engine.server.image()
    assert engine.update(engine.adapter()).status_code == 503


def doomed(serve_zimage):
    return serve_zimage("--num-gpus", "2", "--tp-size", "2", OMP_NUM_THREADS="1", SGLD_LORA_AGREEMENT_TIMEOUT_S="5")


ORDINARY = [("written", 1)]
KILLED = [
    pytest.param(stage, rank, marks=() if (stage, rank) in ORDINARY else pytest.mark.slow)
    for stage in (*UNWRITTEN, "agree", *WRITTEN, "settle")
    for rank in RANKS
]


@pytest.mark.parametrize(("stage", "rank"), KILLED)
def test_a_killed_rank_ends_in_an_answer_that_says_to_restart(serve_zimage, stage, rank):
    with doomed(serve_zimage) as engine:
        engine.testhook("fail", rank=rank, stage=stage, fault="kill")
        answer = engine.update(engine.adapter())
        if (stage, rank) == ("settle", 1) and answer.status_code == 200:
            answer = engine.update(engine.adapter())  # all was written, and rank 0 has nothing to wait for
        says_to_restart(engine, answer)


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("fault", ["exception", "memory"])
@pytest.mark.parametrize("stage", ["agree", "revert", "settle"])
def test_a_fault_where_ranks_cannot_be_kept_together_ends_in_an_answer_that_says_to_restart(
    serve_zimage, stage, fault, rank
):
    with doomed(serve_zimage) as engine:
        engine.testhook("fail", rank=rank, stage=stage, fault=fault)
        answer = engine.update(engine.adapter())
        if (stage, rank) == ("settle", 1):
            assert answer.status_code == 200  # live on both; what rank 1 could not record, the next request hears
            answer = engine.update(engine.adapter())
        says_to_restart(engine, answer)
