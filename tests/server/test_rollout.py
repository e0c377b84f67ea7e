"""Real engines on a local Ray: one version on all of them, and engines that die."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from safetensors.torch import save

from sgld_lora_merge.trainer import RayTransport, RolloutManager, SyncError, select_weight_sync
from support import lora, server
from support.cluster import local_ray
from tests.server.test_trainer_sync import IPC, UPLOAD, peft_model, sent, stepped
from tests.server.trainers import arguments

pytestmark = pytest.mark.timeout(900)

LOG = "sgld_lora_merge"


@pytest.fixture(scope="module")
def cluster():
    with local_ray(num_cpus=5):
        yield


class Engines:
    """A manager's engines, their checkpoint, and what their weights must be."""

    def __init__(self, manager, checkpoint):
        self.manager, self.checkpoint = manager, checkpoint
        self.targets = lora.layers(lora.base_weights(checkpoint), lora.ZIMAGE_SUFFIXES)

    def adapter(self, seed):
        return lora.random_adapter(self.targets, seed=seed)

    def push(self, version, attempt=0):
        """An update whose adapter is drawn by its version."""
        fields = {"update_id": f"{version}, attempt {attempt}", "weight_version": str(version), "lora_alpha": 6}
        return self.manager.update(fields, save(dict(lora.named(self.adapter(version)))))

    def versions(self):
        return [
            httpx.get(f"{engine.url}/lora_merge/status").json()["modules"]["transformer"]["weight_version"]
            for engine in self.manager.engines
        ]

    def hold(self, adapter, engines=None):
        """Every engine's own checker agrees, and the checksums of all weights are equal."""
        merged = lora.merged(self.targets, adapter, 1.5, lora.merge_fp16)
        expected = lora.checksums(lora.engine_zimage(merged))
        body = {"target_module": "transformer", "expected_named_tensors_sha256": expected}
        checksums = set()
        for engine in engines or self.manager.engines:
            answer = httpx.post(f"{engine.url}/update_weights_from_tensor_checker", json=body)
            assert answer.status_code == 200, (engine.name, answer.text)
            answer = httpx.post(f"{engine.url}/get_weights_checksum", json={"module_names": ["transformer"]})
            checksums.add(answer.json()["transformer"])
        assert len(checksums) == 1

    def wait_until_healthy(self, caplog, count):
        """The log has said so many times that an engine is healthy."""
        deadline = time.monotonic() + 400
        while caplog.text.count(" is healthy, ") < count:
            assert time.monotonic() < deadline, caplog.text
            time.sleep(0.1)


@contextmanager
def engines_on_ray(checkpoint, folder, count, **kwargs):
    names = ("PYTHONPATH", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM")
    environment = {name: value for name, value in server.environment().items() if name in names}
    idle = () if server.before_0_5_23() else ("--sleep-on-idle",)
    with RolloutManager(
        arguments("--use-lora", *UPLOAD),
        ["--model-path", str(checkpoint), "--model-id", "Z-Image", "--backend", "sglang", "--warmup-mode", "off",
         *idle],
        engines=count, folder=folder, gpus_per_engine=0, merge_mode="auto", environment=environment, look_every=1,
        start_timeout=400, **kwargs,
    ) as manager:  # fmt: skip
        yield Engines(manager, checkpoint)


class Router:
    def __init__(self):
        self.urls = []

    def add(self, url):
        self.urls.append(url)

    def remove(self, url):
        self.urls.remove(url)


@pytest.fixture(scope="module")
def router():
    return Router()


@pytest.fixture(scope="module")
def two(cluster, zimage_checkpoint, tmp_path_factory, router):
    with engines_on_ray(zimage_checkpoint, tmp_path_factory.mktemp("two"), 2, router=router, policy="pause") as engines:
        yield engines


def test_a_strategy_takes_the_manager_for_its_engine_and_every_engine_is_verified(two):
    model = peft_model(two)
    args = arguments("--use-lora", *UPLOAD)
    sync = select_weight_sync(args)(args, model, two.manager, verify=True)
    assert sync.update_weights().version == 1
    stepped(model)
    assert sync.update_weights().answer["weight_version"] == "2"
    two.hold(sent(model.state_dict()))
    assert all("is started on port" in Path(engine.log).read_text() for engine in two.manager.engines)


def test_updates_go_through_an_actor_and_other_weights_are_noticed_and_brought_back(two, caplog):
    """RayTransport to one engine, behind the manager's back."""
    two.push(10)
    transport = RayTransport(two.manager.engines[1].actor)
    model = peft_model(two)
    args = arguments("--use-lora", *IPC)
    with caplog.at_level(logging.INFO, LOG):
        with two.manager._lock:  # or it may bring the engine back before that is verified
            report = select_weight_sync(args)(args, model, transport, verify=True).update_weights()
        two.wait_until_healthy(caplog, 1)
    other = f"it serves transformer at '{report.version}'"
    assert f"engine 1: {other}, the last live version is transformer at '10'" in caplog.text
    two.hold(two.adapter(10))
    fields = {"update_id": "through the actor", "weight_version": "10", "lora_alpha": 6}
    assert transport.update(fields, save(dict(lora.named(two.adapter(12)))))["weight_version"] == "10"
    two.hold(two.adapter(12), two.manager.engines[1:])
    with pytest.raises(SyncError, match=r"400: .*needs an update_id"):
        transport.update({"serialized_named_tensors": [], "weight_update_mode": "lora_merge", "commit": False})


def test_updates_by_handles_are_kept_as_a_file(two):
    """Each engine by its own strategy, as from ranks of its own."""
    two.push(11)
    model = peft_model(two)
    args = arguments("--use-lora", *IPC)
    named = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    with two.manager.by_handles() as keep:
        for engine in two.manager.engines:
            sync = select_weight_sync(args)(args, model, RayTransport(engine.actor), verify=True)
            version = str(sync.update_weights().version)
        keep({"update_id": "kept", "weight_version": version, "lora_alpha": 6}, save(named))
    assert two.manager.versions == {"transformer": version}
    two.hold(sent(model.state_dict()))
    url = two.manager.engines[0].url
    assert httpx.post(f"{url}/lora_merge/reset", json={}).status_code == 200
    two.manager.heal()
    assert two.versions() == [version, version]
    two.hold(sent(model.state_dict()))


def test_what_an_engine_refuses_no_engine_has(two):
    two.push(20)
    adapter = two.adapter(21)
    adapter["layers.9.attention.to_q"] = tuple(side.clone() for side in adapter["layers.0.attention.to_q"])
    fields = {"update_id": "unknown layer", "weight_version": "21", "lora_alpha": 6}
    with pytest.raises(SyncError, match=r"engine 0, engine 1 did not take .*unknown layers? layers.9.attention.to_q"):
        two.manager.update(fields, save(dict(lora.named(adapter))))
    assert two.versions() == ["20", "20"]
    two.hold(two.adapter(20))


class KilledOnceStaged:
    """Kills its engine at the worst moment: after it has staged an update, before it commits."""

    def __init__(self, engine):
        self.engine, self.update_it, self.ask = engine, engine.transport.update, engine.transport.ask

    def update(self, fields, file=None):
        answer = self.update_it(fields, file)
        os.kill(self.engine.pid, signal.SIGKILL)
        return answer


def test_an_engine_that_is_killed_between_stage_and_commit_leaves_no_half_of_an_update(two, router, caplog):
    """The other engine goes back, the next try waits until the dead one is back, and the router until it is live."""
    two.push(30)
    killed, other = two.manager.engines
    killed.transport = KilledOnceStaged(killed)
    old = killed.url
    with caplog.at_level(logging.INFO, LOG):
        with pytest.raises(
            SyncError, match=r"^engine 0 did not commit .*: all others serve transformer at '30' as before"
        ):
            two.push(31)
        two.hold(two.adapter(30), [other])
        assert router.urls == [other.url]
        two.push(31, attempt=1)
    assert two.versions() == ["31", "31"]
    two.hold(two.adapter(31))
    assert re.search(r"engine 0 is healthy, transformer at '30': stop .* s, start .* s, adapter .* s", caplog.text)
    assert old != killed.url
    assert sorted(router.urls) == sorted(engine.url for engine in two.manager.engines)


@pytest.mark.slow
@pytest.mark.parametrize("mebibytes", [100, 1000])
def test_a_large_adapter_reaches_every_engine(two, mebibytes, capsys):
    """As large as those of large models: the ranks make it so."""
    rank = mebibytes * 2**20 // sum(2 * sum(weight.shape) for weight in two.targets.values())
    adapter = lora.random_adapter(two.targets, rank=rank, size=0.01)
    file = save(dict(lora.named(adapter)))
    fields = {"update_id": f"{mebibytes} MiB", "weight_version": f"{mebibytes} MiB", "lora_alpha": 1.5 * rank}
    begun = time.perf_counter()
    two.manager.update(fields, file)
    took = time.perf_counter() - begun
    assert two.versions() == [f"{mebibytes} MiB"] * 2
    two.hold(adapter)
    with capsys.disabled():
        print(f"\n{len(file) / 2**20:.0f} MiB to two engines, merged: {took:.1f} s")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_updates_while_an_engine_is_killed_every_ten(cluster, zimage_checkpoint, tmp_path, caplog, capsys):
    """At a random moment of a random one of each ten; what has failed is sent again, as a trainer would."""
    chance = random.Random(7)
    kills = []

    def kill(engine):
        kills.append((engine.name, time.time()))
        os.kill(engine.pid, signal.SIGKILL)

    with engines_on_ray(zimage_checkpoint, tmp_path, 3) as three, caplog.at_level(logging.INFO, LOG):
        caplog.clear()
        failed, took = [], 0.3
        for version in range(1, 51):
            if version % 10 == 1:
                doomed = version + chance.randrange(10)
            timer = threading.Timer(chance.uniform(0, took), kill, [chance.choice(three.manager.engines)])
            begun = time.perf_counter()
            if version == doomed:
                timer.start()
            for attempt in range(4):
                try:
                    three.push(version, attempt)
                    break
                except SyncError as error:
                    failed.append((version, str(error).partition(". ")[0]))
            if version == doomed:
                timer.join()
            else:
                took = time.perf_counter() - begun
            assert three.manager.versions == {"transformer": str(version)}
        three.manager.heal()
        assert three.versions() == ["50"] * 3
        three.hold(three.adapter(50))
    assert len(kills) == 5
    story = [record for record in caplog.records if "is healthy, " in record.getMessage()]
    assert len(story) == 5
    with capsys.disabled():
        print()
        for (name, when), healthy in zip(kills, story, strict=True):
            noticed = next(record for record in caplog.records
                           if record.created > when and record.getMessage().endswith("; it is started"))  # fmt: skip
            assert noticed.getMessage().startswith(name)
            assert healthy.getMessage().startswith(name)
            print(f"{name} killed; noticed {noticed.created - when:.2f} s; {healthy.getMessage()}; "
                  f"in all {healthy.created - when:.2f} s")  # fmt: skip
        for version, told in failed:
            print(f"update {version} failed and was sent again: {told}")
