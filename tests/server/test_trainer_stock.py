"""The trainer and sglang as it is, without the plugin: what works, and what the trainer says of the rest."""

from __future__ import annotations

import logging

import pytest
import torch

from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.trainer import (
    DiffusionUpdateWeightFromTensor,
    DiffusionUpdateWeightFromTensorLoRA,
    DiffusionUpdateWeightFromTensorLoRAIPC,
    DiffusionUpdateWeightLoRAUpload,
    HttpTransport,
    UploadTransport,
    engine_config,
)
from support import lora, server, training
from tests.server.conftest import Engine
from tests.server.trainers import arguments

pytestmark = pytest.mark.skipif(server.before_0_5_23(), reason="by itself it takes no adapter on a CPU")


@pytest.fixture(scope="module")
def stock(zimage_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    config = engine_config(arguments("--use-lora"))
    env = {"SGLANG_PLUGINS": "none"}
    with server.running(zimage_checkpoint, "Z-Image", folder, config=config, env=env) as running:
        assert '"lora_target_modules": ["to_q", "to_k"' in running.log.read_text()
        assert running.client.get("/lora_merge/status").status_code == 404
        yield Engine(running, zimage_checkpoint, lora.ZIMAGE_SUFFIXES, lora.engine_zimage, lora.merge_fp32)


def on_a_grid(model):
    """Few bits: sums in float32 are exact then, in whatever order the engine adds."""
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(512).round_().div_(512)
    return model


def trained(base):
    model = training.with_lora(base)
    training.step(model, training.optimiser_of(model))
    return on_a_grid(model)


def pairs(model):
    state = {name.removeprefix("base_model.model."): each for name, each in model.state_dict().items()}
    layers = [name.removesuffix(".lora_A.default.weight") for name in state if ".lora_A." in name]
    return {layer: tuple(state[f"{layer}.lora_{side}.default.weight"] for side in "AB") for layer in layers}


def test_full_weights_merged_ones_and_pairs_arrive_and_the_trainer_is_warned_once(stock, caplog):
    """In this order: an engine without the plugin takes no full weights for layers that have had LoRA."""
    transport, args = HttpTransport(str(stock.server.client.base_url)), arguments("--use-lora")
    base = on_a_grid(training.transformer(stock.checkpoint))
    model = trained(on_a_grid(training.transformer(stock.checkpoint)))
    adapter, targets = pairs(model), lora.layers(base.state_dict(), lora.ZIMAGE_SUFFIXES)
    with caplog.at_level(logging.WARNING, "sgld_lora_merge"):
        merged = DiffusionUpdateWeightFromTensorLoRA(args, model, transport)
        merged.update_weights()
        merged.update_weights()
    [warned] = caplog.records
    assert "an engine has no sgld-lora-merge" in warned.message
    by_trainer = lora.merged(targets, adapter, 1.5, lora.merge_fp16)
    stock.holds(lora.checksums(stock.to_engine(by_trainer)))
    DiffusionUpdateWeightFromTensor(args, base, transport).update_weights()
    stock.holds(lora.checksums(stock.to_engine(targets)))
    report = DiffusionUpdateWeightFromTensorLoRAIPC(args, model, transport).update_weights()
    assert "Updated 14 LoRA layers" in report.answer["message"]
    by_engine = stock.to_engine(lora.merged(targets, adapter, 1.5, stock.merge))
    stock.holds({name.replace(".weight", ".base_layer.weight"): sha for name, sha in lora.checksums(by_engine).items()})


def test_what_needs_the_plugin_is_refused_with_a_sentence(stock):
    url = str(stock.server.client.base_url)
    before, model = stock.checksum(), trained(training.transformer(stock.checkpoint))
    for strategy, transport in (
        (DiffusionUpdateWeightFromTensorLoRAIPC, HttpTransport(url)),
        (DiffusionUpdateWeightFromTensorLoRA, HttpTransport(url)),
        (DiffusionUpdateWeightLoRAUpload, UploadTransport(url)),
    ):
        with pytest.raises(RequestError, match="an engine has no sgld-lora-merge: verify=True asks for a route"):
            strategy(arguments("--use-lora"), model, transport, verify=True).update_weights()
    patterned = training.with_lora(training.transformer(stock.checkpoint), use_rslora=True)
    with pytest.raises(RequestError, match=r"layers whose scale is not 6\.0 / 4 cannot be sent: layers\.0"):
        DiffusionUpdateWeightFromTensorLoRAIPC(arguments("--use-lora"), patterned, HttpTransport(url)).update_weights()
    assert stock.checksum() == before
