"""Generation at the engine's capacity while an update arrives every second.

Run it with `pytest -m slow -s tests/server/test_load.py`; ``SGLD_LOAD_SECONDS`` is how long, by default 1800.
``SGLD_LOAD_SCRAPES`` is a file for what the metrics say every five seconds; `support.dashboard` makes a picture of it.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

SECONDS = float(os.environ.get("SGLD_LOAD_SECONDS", "1800"))
CLIENTS = 3  # more than the engine works on at once, so that it never waits
POLICIES = 5
PROMPT = "a photo of a cat"
SCRAPES = os.environ.get("SGLD_LOAD_SCRAPES", os.devnull)
SCRAPED_EVERY_S = 5


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_no_image_fails_or_mixes_policies_while_updates_arrive_every_second(zimage):
    adapters = [zimage.adapter(seed=seed) for seed in range(POLICIES)]
    images = []
    for number, adapter in enumerate(adapters):
        zimage.update(adapter, weight_version=str(number))
        images.append(zimage.server.image(PROMPT))
    assert len(set(images)) == POLICIES

    started, made, updates = time.monotonic(), [], []  # (begin, end), in seconds since then
    end = started + SECONDS

    def generate():
        while (begin := time.monotonic()) < end:
            image, version = zimage.server.image_and_version(PROMPT)
            made.append((begin - started, time.monotonic() - started))
            assert image == images[int(version) % POLICIES], f"an image of version {version} is another policy's"

    def update():
        number = POLICIES
        while (begin := time.monotonic()) < end:
            answer = zimage.update(adapters[number % POLICIES], weight_version=str(number))
            assert answer.status_code == 200, answer.text
            updates.append((begin - started, time.monotonic() - started))
            number += 1
            time.sleep(max(0.0, begin + 1 - time.monotonic()))

    def scrape():
        with open(SCRAPES, "w") as file:
            while (now := time.monotonic()) < end:
                text = zimage.server.client.get("/lora_merge/metrics").text
                print(json.dumps({"seconds": now - started, "text": text}), file=file, flush=True)
                time.sleep(SCRAPED_EVERY_S)

    warm = threading.Timer(SECONDS / 5, lambda: memory.update(zimage.server.rss_bytes()))
    memory: dict[int, int] = {}
    warm.start()
    with ThreadPoolExecutor(CLIENTS + 2) as pool:
        for done in [pool.submit(work) for work in (*[generate] * CLIENTS, update, scrape)]:
            done.result()
    grown = {pid: rss - memory[pid] for pid, rss in zimage.server.rss_bytes().items() if pid in memory}

    zimage.holds(zimage.expect(adapters[(POLICIES + len(updates) - 1) % POLICIES]))
    meets = [any(a < end and begin < b for a, b in updates) for begin, end in made]
    print(f"\n{SECONDS:g} s, {CLIENTS} clients: {len(made)} images, {len(updates)} updates")
    for what, wanted in (("image with an update in its time:", True), ("image without one:", False)):
        print(what, told([end - begin for (begin, end), met in zip(made, meets, strict=True) if met is wanted]))
    print("update, waiting for images:", told([e - b for b, e in updates]))
    print("memory since a fifth of the time:", {pid: f"{growth / 2**20:+.1f} MiB" for pid, growth in grown.items()})
    assert all(growth < 32 * 2**20 for growth in grown.values()), grown


def told(seconds):
    if len(seconds) < 2:
        return f"{len(seconds)}"
    ordered = sorted(seconds)
    p95 = ordered[int(0.95 * len(ordered))]
    return f"{len(seconds)}; median {statistics.median(seconds):.3f} s, p95 {p95:.3f}, longest {ordered[-1]:.3f}"
