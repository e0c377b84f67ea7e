"""A long run: `pytest -m slow`, about a minute on 2 cores."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_m1_a_thousand_updates_leave_no_drift_and_no_memory(zimage):
    """A fresh B each time, as our trainer sends it.

    Then the first pair again gives the first bytes, and the last 900 updates took no memory.
    """

    def update(adapter, seed):
        fields = {"weight_version": str(seed), "lora_rank": 8, "lora_alpha": 12}
        answer = zimage.update(adapter, update_id=f"thousand-{seed}", compact=True, **fields)
        assert answer.status_code == 200, answer.text

    first = zimage.readable_adapter(0)
    update(first, 0)
    checksum, image = zimage.checksum(), zimage.server.image()
    for seed in range(1, 1001):
        fresh = zimage.readable_adapter(seed)
        adapter = {layer: (a, fresh[layer][1]) for layer, (a, _) in first.items()}
        update(adapter, seed)
        if seed == 100:
            before = zimage.server.rss_bytes()
    after = zimage.server.rss_bytes()
    zimage.holds(zimage.expect(adapter))
    update(first, 1001)
    assert (zimage.checksum(), zimage.server.image()) == (checksum, image)
    grown = {pid: after[pid] - before[pid] for pid in before}
    assert all(growth < 8 * 2**20 for growth in grown.values()), grown
    print({pid: f"{growth / 2**20:+.2f} MiB of {after[pid] / 2**20:.0f}" for pid, growth in grown.items()})
