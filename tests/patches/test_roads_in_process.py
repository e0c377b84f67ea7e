"""Code in a worker's own process that asks sglang for an update: what it gets, without an engine."""

from __future__ import annotations

import types

import pytest
from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import UpdateWeightFromTensorReqInput

from server_patches import worker_patches
from server_patches.worker_request import from_stock
from sgld_lora_merge.errors import LoraMergeError, RequestError


def updated(self, named_tensors, load_format=None, target_modules=None, weight_update_mode=None, **_):
    return True, f"sglang's own {weight_update_mode}"


def test_sglangs_own_merge_is_refused_however_its_mode_is_passed():
    for arguments in (([], None, None, "lora_merge"), ([],)):
        keywords = {} if len(arguments) > 1 else {"weight_update_mode": "lora_merge"}
        success, message = worker_patches.refuse_own_merge(updated, object(), *arguments, **keywords)
        assert success is False
        assert "sglang's own merge is not run" in message
    assert worker_patches.refuse_own_merge(updated, object(), []) == (True, "sglang's own None")


def test_an_update_asked_of_the_worker_is_handled_by_ours(monkeypatch):
    seen = []

    def handle_stock(reqs):
        seen.extend(reqs)
        return types.SimpleNamespace(output={"success": False, "message": "no"})

    request = UpdateWeightFromTensorReqInput(["x"])
    assert worker_patches.update_in_worker(lambda *_: (True, "before the plugin"), None, request) == (
        True,
        "before the plugin",
    )
    monkeypatch.setattr(worker_patches, "_worker", types.SimpleNamespace(handle_stock=handle_stock))
    assert worker_patches.update_in_worker(lambda *_: (True, "sglang's own"), None, request) == (False, "no")
    assert seen == [request]


def test_a_stock_request_has_the_fields_of_ours_and_bytes_are_read_too():
    stock = UpdateWeightFromTensorReqInput(
        [b"pickle", "cGlja2xl"], target_modules=["m"], weight_update_mode="lora_merge", lora_alpha=6, lora_rank=4
    )
    req = from_stock(stock)
    assert req.serialized_named_tensors == ["cGlja2xl", "cGlja2xl"]
    assert (req.target_modules, req.lora_alpha, req.lora_rank, req.update_id) == (["m"], 6.0, 4, None)
    assert not req.is_full_update


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"weight_update_mode": "lora_mergee"}, RequestError),
        ({"serialized_named_tensors": None}, RequestError),
        ({"serialized_named_tensors": "x"}, LoraMergeError),
        ({"lora_rank": 0, "weight_update_mode": "lora_merge"}, RequestError),
        ({"lora_rank": "4", "weight_update_mode": "lora_merge"}, LoraMergeError),
    ],
)
def test_a_stock_request_with_wrong_fields_is_refused_as_by_http(fields, error):
    with pytest.raises(error):
        from_stock(UpdateWeightFromTensorReqInput(**({"serialized_named_tensors": ["x"]} | fields)))
