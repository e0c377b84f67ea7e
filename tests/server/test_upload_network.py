"""Uploads over a network that is slow, or that breaks: an engine in a network namespace of its own, and a proxy."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time

import httpx
import pytest
from safetensors.torch import save

from sgld_lora_merge.rollout.engine_process import EngineProcess, EngineSpec, sglang_script
from sgld_lora_merge.trainer import SyncError, UploadTransport, transport
from support import lora, server

RATE = "200mbit"


class Proxy:
    """Passes connections on to an engine; the first ``cuts`` of them end after ``after`` bytes of the request."""

    def __init__(self, port, cuts, after):
        self.cuts, self.after, self.to, self.cut = cuts, after, port, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self):
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self.listener.accept()
                self.threads.append(threading.Thread(target=self.serve, args=(client,)))
                self.threads[-1].start()

    def serve(self, client):
        with client, socket.create_connection(("127.0.0.1", self.to)) as engine:
            back = threading.Thread(target=self.copy, args=(engine, client))
            back.start()
            self.copy(client, engine, counted=True)
            for each in (client, engine):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            back.join()

    def copy(self, source, sink, counted=False):
        passed = 0
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                sink.sendall(chunk)
                passed += len(chunk)
                if counted and passed > self.after and self.cut < self.cuts:
                    self.cut += 1
                    return
            sink.shutdown(socket.SHUT_WR)

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join()


@pytest.fixture
def proxy(zimage):
    made = []

    def make(**kwargs):
        made.append(Proxy(zimage.server.client.base_url.port, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def one_client(monkeypatch):
    """Transports without a pause between tries."""
    monkeypatch.setattr(transport, "PAUSE_S", 0.01)
    return UploadTransport


def large(engine, seed, rank=1024):
    """An adapter, and its file of 4 MB: much more than sockets buffer."""
    adapter = lora.random_adapter(engine.targets, rank=rank, seed=seed, size=0.02)
    return adapter, save(dict(lora.named(adapter)))


def fields(name):
    return {"update_id": name, "weight_version": name, "lora_alpha": 1024, "lora_rank": 1024}


def test_an_upload_whose_connection_is_cut_is_sent_again_and_merged_once(zimage, proxy, one_client):
    adapter, file = large(zimage, seed=3)
    assert len(file) > 3_000_000
    cutting = proxy(cuts=2, after=1_000_000)
    updates = zimage.status()["totals"]["updates"]
    answer = one_client(cutting.url).update(fields("cut twice"), file)
    assert (answer["state"], cutting.cut) == ("live", 2)
    assert zimage.status()["totals"]["updates"] == updates + 1
    zimage.holds(zimage.expect(adapter, 1.0))
    assert zimage.server.uploads_left() == []


def test_an_upload_that_never_gets_through_fails_and_changes_nothing(zimage, proxy, one_client):
    zimage.update(zimage.adapter(seed=1), weight_version="old", update_id="before the cut")
    before = zimage.checksum()
    cutting = proxy(cuts=100, after=1_000_000)
    with pytest.raises(
        SyncError, match=r"did not answer: .* What became of the update is not known; its status is None"
    ):
        one_client(cutting.url).update(fields("always cut"), large(zimage, seed=4)[1])
    assert cutting.cut == transport.TRIES
    assert zimage.checksum() == before
    assert zimage.status()["modules"]["transformer"]["weight_version"] == "old"
    assert zimage.server.uploads_left() == []
    adapter, file = large(zimage, seed=4)
    assert one_client(str(zimage.server.client.base_url)).update(fields("in the end"), file)["state"] == "live"
    zimage.holds(zimage.expect(adapter, 1.0))


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def host():
    """A network namespace behind a link of 200 Mbit/s: the command that runs something there, and its address."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces need root, ip and tc")
    name, near, far = "sgld-test-host", "sgld-near", "sgld-far"
    try:
        run("ip", "netns", "add", name)
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        for command in (
            ("ip", "addr", "add", "10.213.7.1/30", "dev", near),
            ("ip", "link", "set", near, "up"),
            ("ip", "netns", "exec", name, "ip", "addr", "add", "10.213.7.2/30", "dev", far),
            ("ip", "netns", "exec", name, "ip", "link", "set", far, "up"),
            ("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up"),
            ("tc", "qdisc", "add", "dev", near, "root", "tbf", "rate", RATE, "burst", "256kb", "latency", "50ms"),
        ):
            run(*command)
    except subprocess.CalledProcessError as error:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
        pytest.skip(f"no network namespaces here: {error.stderr}")
    yield ("ip", "netns", "exec", name), "10.213.7.2"
    run("ip", "netns", "del", name)


@pytest.mark.slow
def test_an_engine_on_a_host_of_its_own_takes_an_upload_over_a_slow_link(
    host, zimage_checkpoint, tmp_path, one_client, capsys
):
    within, address = host
    started = EngineProcess(
        EngineSpec(
            ["--model-path", str(zimage_checkpoint), "--model-id", "Z-Image", "--backend", "sglang",
             "--warmup-mode", "off"],
            tmp_path, {"PYTHONPATH": server.environment()["PYTHONPATH"], "HF_HUB_OFFLINE": "1"},
            host=address, command=(*within, sglang_script()), start_timeout=400,
        ),
        "far", [],
    )  # fmt: skip
    targets = lora.layers(lora.base_weights(zimage_checkpoint), lora.ZIMAGE_SUFFIXES)
    adapter = lora.random_adapter(targets, rank=4096, seed=5, size=0.02)
    file = save(dict(lora.named(adapter)))
    try:
        started.start()
        url = f"http://{address}:{started.port}"
        begun = time.perf_counter()
        sent = {"update_id": "slow", "weight_version": "7", "lora_alpha": 4096}
        answer = one_client(url).update(sent, file)
        took = time.perf_counter() - begun
        assert (answer["state"], answer["weight_version"]) == ("live", "7")
        weights = lora.checksums(lora.engine_zimage(lora.merged(targets, adapter, 1.0, lora.merge_fp32)))
        body = {"target_module": "transformer", "expected_named_tensors_sha256": weights}
        checked = httpx.post(f"{url}/update_weights_from_tensor_checker", json=body, timeout=60)
        assert checked.status_code == 200, checked.text
    finally:
        started.stop()
    with capsys.disabled():
        print(f" [{len(file) / 1e6:.1f} MB over {RATE}: {took:.2f} s, {8 * len(file) / took / 1e6:.0f} Mbit/s]", end="")
