"""A long run: `pytest -m slow`, about a minute on 2 cores."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_m1_a_thousand_updates_leave_no_drift_and_no_memory(zimage):
    """A fresh B each time; then the first pair again gives the first bytes, and the last 900 updates took no memory."""
    first = zimage.adapter(seed=0)
    zimage.update(first)
    checksum, image = zimage.checksum(), zimage.server.image()
    for seed in range(1, 1001):
        fresh = zimage.adapter(seed=seed)
        adapter = {layer: (first[layer][0], b) for layer, (_, b) in fresh.items()}
        answer = zimage.update(adapter, weight_version=str(seed))
        assert answer.status_code == 200, answer.text
        if seed == 100:
            before = zimage.server.rss_bytes()
    after = zimage.server.rss_bytes()
    zimage.holds(zimage.expect(adapter))
    zimage.update(first)
    assert (zimage.checksum(), zimage.server.image()) == (checksum, image)
    grown = {pid: after[pid] - before[pid] for pid in before}
    assert all(growth < 8 * 2**20 for growth in grown.values()), grown
    print({pid: f"{growth / 2**20:+.2f} MiB of {after[pid] / 2**20:.0f}" for pid, growth in grown.items()})
