"""Twenty optimiser steps: what the trainer merges and what the engine merges are the same bytes, every time.

Z-Image, with an engine of its own, is slow: a full-weight update takes sglang a second.
"""

from __future__ import annotations

import pytest

from sgld_lora_merge.trainer import (
    DiffusionUpdateWeightFromTensor,
    DiffusionUpdateWeightFromTensorLoRA,
    DiffusionUpdateWeightFromTensorLoRAIPC,
    HttpTransport,
)
from support import training
from tests.server.trainers import arguments

STEPS = 20


@pytest.fixture(scope="module")
def zimage_fp16(serve_zimage):
    with serve_zimage("--num-gpus", "1", SGLANG_DIFFUSION_LORA_MERGE_FP32="0") as engine:
        yield engine


@pytest.mark.parametrize("fixture", ["sd3", pytest.param("zimage_fp16", marks=pytest.mark.slow)])
def test_a_merge_in_the_trainer_and_one_in_the_engine_give_the_same_bytes_at_every_step(fixture, request):
    """fp16 mode, scale 1.5, A and B in float32; plain layers (SD3) and fused ones (Z-Image)."""
    engine = request.getfixturevalue(fixture)
    model = training.with_lora(training.transformer(engine.checkpoint))
    optimiser = training.optimiser_of(model)
    transport, args = HttpTransport(str(engine.server.client.base_url)), arguments("--use-lora")
    by_engine = DiffusionUpdateWeightFromTensorLoRAIPC(args, model, transport)
    by_trainer = DiffusionUpdateWeightFromTensorLoRA(args, model, transport)
    base = DiffusionUpdateWeightFromTensor(args, training.transformer(engine.checkpoint), transport)
    live, adapters = [engine.checksum()], []
    try:
        for _ in range(STEPS):
            training.step(model, optimiser)
            adapters.append({name: each.clone() for name, each in model.state_dict().items() if "lora_" in name})
            by_engine.update_weights()
            live.append(engine.checksum())
        assert len(set(live)) == 1 + STEPS  # every step changed something
        for adapter, checksum in zip(adapters, live[1:], strict=True):
            model.load_state_dict(adapter, strict=False)
            by_trainer.update_weights()
            assert engine.checksum() == checksum
    finally:
        base.update_weights()  # what the trainer merged is the engine's base
    assert engine.checksum() == live[0]
