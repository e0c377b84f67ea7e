"""A run: updates of one form, one after the other, as our trainer sends them."""

from __future__ import annotations

import math

import pytest

from support import lora

RANK = {"lora_rank": 8, "lora_alpha": 12}


@pytest.mark.parametrize("fixture", ["zimage", "sd3", "tp2"])
def test_every_update_of_a_run_is_live_to_the_byte_and_one_that_is_refused_changes_nothing(fixture, request):
    """From the fourth on an update takes the memory of one that is done with."""
    engine = request.getfixturevalue(fixture)

    def verified(adapter):
        engine.verified(lora.merged(engine.targets, adapter, 1.5, engine.merge))

    def update(adapter, step):
        fields = {"update_id": f"{fixture}-{step}", "weight_version": str(step), **RANK}
        return engine.update(adapter, compact=True, **fields)

    for step in range(8):
        answer = update(engine.readable_adapter(step), step)
        assert answer.status_code == 200, answer.text
        verified(engine.readable_adapter(step))
    image = engine.server.image()
    bad = engine.readable_adapter(8)
    layer, (a, b) = list(bad.items())[-1]
    b[-1, -1] = math.nan
    refused = update(bad, "bad")
    assert refused.status_code == 400
    assert layer in refused.json()["message"]
    overflow = bad | {layer: (a.fill_(1e30), b.fill_(1e30))}
    refused = update(overflow, "overflow")
    assert refused.status_code == 400
    assert "not finite" in refused.json()["message"]
    verified(engine.readable_adapter(7))
    assert engine.server.image() == image
    assert engine.server.post("/lora_merge/rollback").status_code == 200
    verified(engine.readable_adapter(6))
    assert update(engine.readable_adapter(9), 9).status_code == 200
    verified(engine.readable_adapter(9))
