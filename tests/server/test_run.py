"""A run: updates of one form, one after the other, as our trainer sends them."""

from __future__ import annotations

import math

import pytest

from support import lora

RANK = {"lora_rank": 8, "lora_alpha": 12}


def adapter_of(engine, seed):
    """Of layers and ranks whose pairs a kernel reads where they are: such an update may take an older one's memory."""
    pairs = engine.adapter(seed=seed, rank=8)
    return {layer: (a, b) for layer, (a, b) in pairs.items() if a.shape[1] % 8 == 0}


def verified(engine, adapter):
    layers = lora.merged(engine.targets, adapter, 1.5, engine.merge).items()
    expected = {layer: {"sha256": lora.sha256(weight)} for layer, weight in layers}
    answer = engine.server.post("/lora_merge/verify", {"modules": {"transformer": expected}})
    assert answer.json()["success"] is True, answer.text


@pytest.mark.parametrize("fixture", ["zimage", "sd3", "tp2"])
def test_every_update_of_a_run_is_live_to_the_byte_and_one_that_is_refused_changes_nothing(fixture, request):
    """From the fourth on an update takes the memory of one that is done with."""
    engine = request.getfixturevalue(fixture)

    def update(adapter, step):
        fields = {"update_id": f"{fixture}-{step}", "weight_version": str(step), **RANK}
        return engine.update(adapter, compact=True, **fields)

    for step in range(8):
        answer = update(adapter_of(engine, step), step)
        assert answer.status_code == 200, answer.text
        verified(engine, adapter_of(engine, step))
    image = engine.server.image()
    bad = adapter_of(engine, 8)
    layer, (a, b) = list(bad.items())[-1]
    b[-1, -1] = math.nan
    refused = update(bad, "bad")
    assert refused.status_code == 400
    assert layer in refused.json()["message"]
    overflow = bad | {layer: (a.fill_(1e30), b.fill_(1e30))}
    refused = update(overflow, "overflow")
    assert refused.status_code == 400
    assert "not finite" in refused.json()["message"]
    verified(engine, adapter_of(engine, 7))
    assert engine.server.image() == image
    assert engine.server.post("/lora_merge/rollback").status_code == 200
    verified(engine, adapter_of(engine, 6))
    assert update(adapter_of(engine, 9), 9).status_code == 200
    verified(engine, adapter_of(engine, 9))
