"""Several named adapters at once: the merged weight is W0 plus the sum of all."""

from __future__ import annotations

from support import lora


def both(engine, first, second):
    """What the weights must be with both: one rounding of W0 + D1 + D2."""
    weights = {}
    for layer, base in engine.targets.items():
        exact = base.double()
        for adapter in (first, second):
            if layer in adapter:
                a, b = adapter[layer]
                exact = exact + 1.5 * (b.double() @ a.double())
        weights[layer] = exact.to(base.dtype)
    return lora.checksums(engine.to_engine(weights))


def test_two_adapters_add_up_and_each_is_updated_by_itself(zimage):
    first, second, third = (zimage.adapter(seed=seed) for seed in (1, 2, 3))
    half = {layer: pair for layer, pair in second.items() if "layers.0" in layer}
    assert zimage.update(first, update_id="a1").status_code == 200
    answer = zimage.update(half, adapter="style", update_id="a2", weight_version="two").json()
    assert (answer["success"], answer["layers"]) == (True, len(half))
    zimage.holds(both(zimage, first, half))
    assert zimage.update(third, update_id="a3").status_code == 200
    zimage.holds(both(zimage, third, half))
    module = zimage.status()["modules"]["transformer"]
    assert {name: adapter["layers"] for name, adapter in module["adapters"].items()} == {
        "default": len(third),
        "style": len(half),
    }


def test_one_adapter_is_taken_out_and_rolled_back(zimage):
    first, second = zimage.adapter(seed=1), zimage.adapter(seed=2)
    zimage.update(first)
    zimage.update(second, adapter="style")
    answer = zimage.server.post("/lora_merge/reset", {"adapter": "style"})
    assert answer.status_code == 200, answer.text
    assert "adapter 'style' is taken out" in answer.json()["message"]
    zimage.holds(zimage.expect(first))
    assert zimage.server.post("/lora_merge/rollback").status_code == 200
    zimage.holds(both(zimage, first, second))
    zimage.reset()
    zimage.holds(lora.checksums(zimage.to_engine(zimage.targets)))


def test_an_adapter_that_is_not_live_cannot_be_taken_out(zimage):
    zimage.update(zimage.adapter(seed=1), weight_version="1")
    answer = zimage.server.post("/lora_merge/reset", {"adapter": "stlye"})
    assert answer.status_code == 409
    assert "no adapter 'stlye' is live; live are default" in answer.json()["message"]
    assert zimage.status()["modules"]["transformer"]["weight_version"] == "1"


def test_buckets_of_one_update_belong_to_one_adapter(zimage):
    first = zimage.adapter(seed=1)
    half = {layer: pair for layer, pair in first.items() if "layers.0" in layer}
    rest = {layer: pair for layer, pair in first.items() if layer not in half}
    place = {"update_id": "one adapter", "num_buckets": 2}
    assert zimage.update(half, adapter="style", bucket_index=0, **place).status_code == 200
    answer = zimage.update(rest, bucket_index=1, **place)
    assert answer.status_code == 409
    assert "adapter is None here, 'style' before" in answer.json()["message"]
    assert zimage.update(rest, adapter="style", bucket_index=1, **place).status_code == 200
    zimage.holds(zimage.expect(first))
