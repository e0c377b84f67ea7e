"""The real engine on a GPU: updates over CUDA IPC from this process, bytes by the stock checker. No generation: where
sgl_kernel is not to be had, only the weights' path runs."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from sgld_lora_merge import pack
from support import lora

pytest.importorskip("sglang")
from support import checkpoints, server

ARGUMENTS = ("--num-gpus", "1", "--dit-cpu-offload", "false", "--text-encoder-cpu-offload", "false")


class GpuEngine:
    def __init__(self, running, checkpoint):
        self.server = running
        base = lora.layers(lora.base_weights(checkpoint), lora.ZIMAGE_SUFFIXES)
        self.targets = {layer: weight.cuda() for layer, weight in base.items()}
        self.uuid = str(torch.cuda.get_device_properties(0).uuid)

    def adapter(self, seed):
        pairs = lora.random_adapter({layer: weight.cpu() for layer, weight in self.targets.items()}, seed=seed)
        return {layer: (a.cuda(), b.cuda()) for layer, (a, b) in pairs.items()}

    def update(self, adapter, **fields):
        payload, self.sent = pack({"transformer": lora.named(adapter)})
        body = {"serialized_named_tensors": [payload], "payload_gpu_uuids": [f"GPU-{self.uuid}"],
                "load_format": "flattened_bucket", "weight_update_mode": "lora_merge", "lora_alpha": 6,
                "lora_rank": 4} | fields  # fmt: skip
        return self.server.post("/update_weights_from_tensor", body)

    def full_update(self, tensors):
        payload, self.sent = pack({"transformer": tensors})
        body = {"serialized_named_tensors": [payload], "load_format": "flattened_bucket"}
        return self.server.post("/update_weights_from_tensor", body)

    def holds(self, adapter, scale=1.5, merge=lora.merge_fp16):
        merged = lora.merged(self.targets, adapter, scale, merge)
        cpu = {layer: weight.cpu() for layer, weight in merged.items()}
        body = {"target_module": "transformer",
                "expected_named_tensors_sha256": lora.checksums(lora.engine_zimage(cpu))}  # fmt: skip
        answer = self.server.post("/update_weights_from_tensor_checker", body)
        assert answer.status_code == 200, answer.text


@contextmanager
def serve(tmp_path_factory, arguments, precision):
    checkpoint = checkpoints.zimage(tmp_path_factory.mktemp("zimage"))
    env = {"SGLANG_DIFFUSION_LORA_MERGE_FP32": precision}
    folder = tmp_path_factory.mktemp("server")
    with server.running(checkpoint, "Z-Image", folder, arguments=arguments, env=env) as running:
        yield GpuEngine(running, checkpoint)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with serve(tmp_path_factory, ARGUMENTS, "0") as engine:
        yield engine


def test_a_transformer_that_is_parked_on_the_host(tmp_path_factory):
    """--dit-cpu-offload: updates, rollback and reset reach the weights that the engine keeps."""
    arguments = [argument if argument != "false" else "true" for argument in ARGUMENTS]
    with serve(tmp_path_factory, arguments, "1") as engine:
        first, second = engine.adapter(1), engine.adapter(2)
        for adapter in (first, second):
            answer = engine.update(adapter)
            assert answer.status_code == 200, answer.text
            engine.holds(adapter, merge=lora.merge_fp32)
        assert engine.server.post("/lora_merge/rollback").status_code == 200
        engine.holds(first, merge=lora.merge_fp32)
        assert engine.server.post("/lora_merge/reset").status_code == 200
        engine.holds({})


def test_updates_over_cuda_ipc_equal_the_trainers_eager_merge(engine):
    for seed in range(3):
        adapter = engine.adapter(seed)
        answer = engine.update(adapter, weight_version=str(seed))
        assert answer.status_code == 200, answer.text
        assert answer.json()["base_store"] == "device"
        assert answer.json()["payload_opened"] == [True]
        engine.holds(adapter)


def test_i5_the_engine_is_unaffected_by_what_the_sender_does_after_the_answer(engine):
    adapter = engine.adapter(7)
    assert engine.update(adapter).status_code == 200
    for buffer in engine.sent:
        buffer.zero_()
    engine.holds(adapter)
    half = {layer: pair for layer, pair in engine.adapter(8).items() if "layers.0" in layer}
    assert engine.update(half).status_code == 200
    engine.holds(adapter | half)


def test_refused_updates_change_nothing(engine):
    adapter = engine.adapter(9)
    assert engine.update(adapter).status_code == 200
    nan = {
        "layers.0.attention.to_q": (
            adapter["layers.0.attention.to_q"][0] * float("nan"),
            adapter["layers.0.attention.to_q"][1],
        )
    }
    assert engine.update(nan).status_code == 400
    assert engine.update(adapter, lora_rank=5).status_code == 400
    unknown = engine.update(adapter, payload_gpu_uuids=["GPU-00000000-0000-0000-0000-000000000000"])
    assert unknown.status_code == 400
    assert "no payload was exported from this worker's GPU" in unknown.json()["message"]
    assert unknown.json()["payload_opened"] == [False]
    engine.holds(adapter)


def test_fifty_updates_leave_device_memory_flat(engine):
    def free():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    for seed in range(5):
        engine.update(engine.adapter(seed))
    before = free()
    for seed in range(50):
        assert engine.update(engine.adapter(seed)).status_code == 200
    engine.sent = []
    assert abs(free() - before) < 8 * 2**20


def test_reset_gives_the_base_back(engine):
    engine.update(engine.adapter(1))
    assert engine.server.post("/lora_merge/reset").status_code == 200
    engine.holds({})
