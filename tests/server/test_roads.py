"""Updates by the scheduler's socket, its broker and in process: the same work and the same outcomes as by HTTP."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import psutil
import pytest
import torch

from support import lora, server

ROADS = ("http", "socket", "broker", "generator")


class Roads:
    """A client that is connected to an engine by all roads; images come by a `DiffGenerator`."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.roads", *arguments], env=server.environment(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while self._line() != "ready":
            pass

    def _line(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client ended with {self.process.wait()}")
        return line.strip()

    def ask(self, **asked):
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        while not (line := self._line()).startswith("{"):
            pass  # what sglang prints
        return json.loads(line)

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def roads(zimage_session):
    arguments = psutil.Process(zimage_session.server.pid).cmdline()
    port, scheduler_port = (arguments[arguments.index(flag) + 1] for flag in ("--port", "--scheduler-port"))
    client = Roads(port, scheduler_port, str(zimage_session.checkpoint), "Z-Image")
    yield client
    client.stop()


def send(engine, roads, road, sent, **fields):
    """The answer of an update by a road, without ``update_id``: the other roads have none."""
    body = engine.fields(sent, **fields)
    return engine.send(body).json() if road == "http" else roads.ask(road=road, fields=body)


def module(engine):
    return engine.status()["modules"]["transformer"]


@pytest.mark.parametrize("road", ROADS)
def test_a_good_update_is_exact_and_known_to_the_status_and_the_reset_is_the_base(zimage, roads, road):
    base, image = zimage.checksum(), roads.ask(image="a dog")
    adapter = zimage.adapter(seed=3)
    answer = send(zimage, roads, road, adapter)
    assert answer["success"] is True, answer
    assert f"{len(adapter)} LoRA layers are live in transformer" in answer["message"]
    zimage.holds(zimage.expect(adapter))
    assert (module(zimage)["state"], module(zimage)["layers"]) == ("merged", len(adapter))
    assert roads.ask(image="a dog") != image
    zimage.reset()
    assert zimage.checksum() == base
    assert roads.ask(image="a dog") == image
    zimage.update(zimage.adapter(seed=4), update_id=f"after {road}")
    zimage.holds(zimage.expect(zimage.adapter(seed=4)))


def half_a_pair(adapter):
    return lora.named(adapter)[:-1]


BAD = {
    "half a pair": (half_a_pair, {}, "but no lora_B"),
    "a wrong rank": (lora.named, {"lora_rank": 5}, "has rank 4, the request says lora_rank 5"),
    "an unknown layer": (lambda a: [(n.replace("layers.0", "layers.7"), t) for n, t in lora.named(a)], {}, "unknown"),
    "NaN": (lambda a: [(n, t * torch.nan) for n, t in lora.named(a)], {}, "NaN or infinite"),
    "an unknown mode": (lora.named, {"weight_update_mode": "lora_mergee"}, "'lora_mergee' is unknown"),
    "a text for alpha": (lora.named, {"lora_alpha": "6"}, 'lora_alpha: a number is needed, or "rank"'),
    "an unknown module": (lora.named, {"target_modules": ["transformer_9"]}, "transformer_9"),
    "nothing": (lora.named, {"serialized_named_tensors": []}, "serialized_named_tensors is empty"),
    "full weights that are none": (
        lambda _: [],
        {"weight_update_mode": None, "serialized_named_tensors": ["gAJOLg=="], "lora_alpha": None, "lora_rank": None},
        "the payload is a NoneType, not a dict of modules",
    ),
}  # fmt: skip


@pytest.mark.parametrize("road", ROADS)
def test_bad_updates_change_nothing_and_say_the_same(zimage, roads, road):
    zimage.update(zimage.adapter(seed=1), weight_version="good")
    before, image = zimage.checksum(), roads.ask(image="a dog")
    for name, (change, fields, told) in BAD.items():
        sent = change(zimage.adapter(seed=2)) or lora.named(zimage.adapter(seed=2))
        answer = send(zimage, roads, road, sent, **fields)
        assert answer["success"] is False, name
        assert told in answer["message"], name
        assert zimage.checksum() == before, name
    assert module(zimage)["weight_version"] == "good"
    assert roads.ask(image="a dog") == image


@pytest.mark.parametrize("road", ROADS[1:])
def test_full_weights_by_any_road_end_the_versions_and_are_the_new_base(zimage, roads, road):
    body = zimage.fields(zimage.adapter(seed=1), update_id=f"before full weights by {road}", weight_version="1")
    zimage.send(body)
    moved = {layer: (weight.float() + 0.25).to(weight.dtype) for layer, weight in zimage.targets.items()}
    full = {"weight_update_mode": None, "lora_alpha": None, "lora_rank": None}
    try:
        answer = send(zimage, roads, road, [(f"{n}.weight", w) for n, w in moved.items()], **full)
        assert answer["success"] is True, answer
        assert (module(zimage)["state"], module(zimage)["weight_version"]) == ("base", None)
        assert zimage.status()["updates"][-1]["state"] in ("reset", "replaced")
        adapter = zimage.adapter(seed=2)
        zimage.update(adapter)
        zimage.holds(lora.checksums(zimage.to_engine(lora.merged(moved, adapter, 1.5, zimage.merge))))
    finally:
        send(zimage, roads, "http", [(f"{n}.weight", w) for n, w in zimage.targets.items()], **full)


def test_an_update_by_the_broker_leaves_its_line_in_the_log(zimage, roads):
    send(zimage, roads, "broker", zimage.adapter(seed=5), lora_rank=5)
    lines = [line for line in zimage.server.log.read_text().splitlines() if '"event": "update"' in line]
    assert "has rank 4, the request says lora_rank 5" in lines[-1]


@pytest.mark.slow  # it starts an engine of its own, without HTTP: `pytest -m slow`, before a release
def test_a_diff_generator_that_starts_its_engine_has_the_plugin_in_force(zimage, zimage_checkpoint):
    client = Roads("--local", str(zimage_checkpoint), "Z-Image")
    try:
        image = client.ask(image="a dog")
        body = zimage.fields(half_a_pair(zimage.adapter()))
        answer = client.ask(road="generator", fields=body)
        assert answer["success"] is False
        assert re.search("has lora_. but no lora_.", answer["message"])
        assert client.ask(image="a dog") == image
        answer = client.ask(road="generator", fields=zimage.fields(zimage.adapter()))
        assert answer["success"] is True, answer
        assert client.ask(image="a dog") != image
    finally:
        client.stop()
