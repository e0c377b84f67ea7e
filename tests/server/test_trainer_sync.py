"""A PEFT trainer and the real engine: the strategies end to end, checked by the engine's own checker."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.trainer import HttpTransport, SyncError, UploadTransport, select_weight_sync
from sgld_lora_merge.trainer.engine_client import Unanswered
from support import lora as support_lora
from support import training
from tests.server.trainers import arguments

IPC = ["--lora-ipc-weight-sync", "--colocate"]
UPLOAD = ["--lora-upload-weight-sync"]
ROOT = Path(__file__).parents[2]


def peft_model(engine, **config):
    """PEFT on the checkpoint that the engine serves."""
    return stepped(training.with_lora(training.transformer(engine.checkpoint), **config))


def stepped(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    return model


def strategy(engine, model, *flags, transport=None, lora=True, **kwargs):
    args = arguments(*(["--use-lora"] if lora else []), *flags)
    url = str(engine.server.client.base_url)
    transport = transport or (UploadTransport(url) if "--lora-upload-weight-sync" in flags else HttpTransport(url))
    return select_weight_sync(args)(args, model, [transport], **{"verify": True, **kwargs})


def sent(state):
    """Layer -> (A, B) of a PEFT state dict, read in the test's own way."""
    named = {name.removeprefix("base_model.model."): tensor for name, tensor in state.items() if "lora_" in name}
    layers = sorted({name.partition(".lora_")[0] for name in named})
    return {layer: tuple(named[f"{layer}.lora_{side}.default.weight"] for side in "AB") for layer in layers}


def restore(engine):
    """The checkpoint's weights as the engine's base again."""
    named = list(support_lora.base_weights(engine.checkpoint).items())
    answer = engine.update(named, weight_update_mode=None, lora_alpha=None, lora_rank=None)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("flags", [IPC, UPLOAD], ids=["ipc", "upload"])
def test_every_sync_is_live_and_verified(zimage, flags, caplog):
    model = peft_model(zimage)
    sync = strategy(zimage, model, *flags)
    with caplog.at_level(logging.INFO, "sgld_lora_merge"):
        first = sync.update_weights()
    assert (first.tensors, first.layers, first.buckets) == (28, 14, 1)
    assert first.answer["state"] == "live"
    assert (
        f"sync v{first.version} [transformer]: pushed 28 lora tensors, 14 layer prefixes in 1 buckets (unmapped=0)"
        in caplog.text
    )
    zimage.holds(zimage.expect(sent(model.state_dict())))
    stepped(model)
    second = sync.update_weights()
    assert second.answer["weight_version"] == str(first.version + 1)
    zimage.holds(zimage.expect(sent(model.state_dict())))


def test_small_buckets_go_live_together(zimage):
    model = peft_model(zimage)
    report = strategy(zimage, model, *IPC, "--update-weight-buffer-size", "1").update_weights()
    assert report.buckets == 6  # q, k, v of each layer together, its output projection, its feed-forward layers
    zimage.holds(zimage.expect(sent(model.state_dict())))


@pytest.mark.parametrize("flags", [IPC, UPLOAD], ids=["ipc", "upload"])
def test_s2_s3_rslora_and_patterns_travel_as_layer_scaling(zimage, flags):
    """rsLoRA at rank 4, alpha 6 is 3.0; one layer has rank 8 and alpha 16, another alpha 2."""
    wide, other = "layers.1.attention.to_q", "layers.0.feed_forward.w2"
    model = peft_model(zimage, use_rslora=True, rank_pattern={wide: 8}, alpha_pattern={wide: 16, other: 2})
    strategy(zimage, model, *flags).update_weights()
    adapter = sent(model.state_dict())
    scales = dict.fromkeys(adapter, 3.0) | {wide: 16 / 8**0.5, other: 1.0}
    zimage.holds(zimage.expect(adapter, scales))


@pytest.mark.parametrize("flags", [IPC, UPLOAD], ids=["ipc", "upload"])
def test_fp16_mode_is_verified_by_checksum(sd3, flags):
    model = peft_model(sd3)
    report = strategy(sd3, model, *flags).update_weights()
    assert report.answer["merge_precision"] == "fp16"
    sd3.holds(sd3.expect(sent(model.state_dict())))


def test_a_trainer_whose_base_differs_knows_it_after_its_first_sync(zimage):
    model = peft_model(zimage)
    layer = model.base_model.model.layers[1].attention.to_k.base_layer
    with torch.no_grad():
        layer.weight[3, 3] += 0.5
    with pytest.raises(SyncError, match=r"transformer\.layers\.1\.attention\.to_k"):
        strategy(zimage, model, *IPC).update_weights()


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_init_that_changed_the_base_is_for_an_engine_that_serves_the_changed_one(zimage, init):
    model, before = (
        training.with_lora(training.transformer(zimage.checkpoint), init_lora_weights=init),
        zimage.checksum(),
    )
    sync = strategy(zimage, model, *IPC, verify=False)
    told = rf"nothing was sent: .*init_lora_weights='{init}' changed the base weights.*14 of [0-9]+ layers are not what"
    with pytest.raises(SyncError, match=told):
        sync.update_weights()
    assert zimage.checksum() == before
    state = {name.removeprefix("base_model.model."): each for name, each in model.state_dict().items()}
    moved = {layer: state[f"{layer}.base_layer.weight"] for layer in zimage.targets}
    try:
        named = [(f"{layer}.weight", weight) for layer, weight in moved.items()]
        assert zimage.update(named, weight_update_mode=None, lora_alpha=None, lora_rank=None).status_code == 200
        assert sync.update_weights().answer["state"] == "live"
        merged = support_lora.merged(moved, sent(model.state_dict()), 1.5, zimage.merge)
        zimage.holds(support_lora.checksums(zimage.to_engine(merged)))
    finally:
        restore(zimage)


@pytest.mark.parametrize("deleted", [False, True], ids=["merged", "merged and deleted"])
@pytest.mark.parametrize("layers", ["attention.to_q", "adaLN_modulation.0"], ids=["of the adapter", "of no adapter"])
def test_an_adapter_that_was_merged_into_the_trainers_base_is_found_before_anything_is_sent(zimage, deleted, layers):
    model = peft_model(zimage)
    model.add_adapter("sft", training.peft.LoraConfig(r=2, target_modules=[f"layers.0.{layers}"]))
    sync = strategy(zimage, stepped(model), *IPC, verify=False)
    sync.update_weights()
    before = zimage.checksum()
    model.merge_adapter(["sft"])
    if deleted:
        for module in model.modules():
            vars(module).get("merged_adapters", []).clear()  # or PEFT would take it out again
        model.delete_adapter("sft")
    cause = "" if deleted else "adapters that are merged into the trainer's: sft; "
    told = rf"nothing was sent: .*{cause}.*1 of [0-9]+ layers .* transformer\.layers\.0\.{layers}"
    with pytest.raises(SyncError, match=told):
        sync.update_weights()
    assert zimage.checksum() == before
    allowed = strategy(zimage, stepped(model), *IPC, allow_unsynced=[f"*.{layers}.*"], verify=False)
    assert allowed.update_weights().answer["state"] == "live"


def test_a_live_weight_that_somebody_else_changed_is_named(zimage):
    model = peft_model(zimage)
    url = str(zimage.server.client.base_url)

    class Meddling(HttpTransport):
        def update(self, fields, file=None):
            answer = super().update(fields, file)
            zimage.update(zimage.adapter(seed=9))
            return answer

    with pytest.raises(SyncError, match=r"14 of 14 layers are not what they should be"):
        strategy(zimage, model, *IPC, transport=Meddling(url)).update_weights()


def test_n8_what_the_engine_refuses_raises_and_is_not_a_version(zimage):
    model = peft_model(zimage)
    sync = strategy(zimage, model, *IPC)
    first = sync.update_weights().version
    with torch.no_grad():
        model.get_parameter("base_model.model.layers.0.attention.to_q.lora_B.default.weight")[0, 0] = float("nan")
    with pytest.raises(SyncError, match=r"400: .*NaN"):
        sync.update_weights()
    assert sync.version == first
    stepped(model)
    assert sync.update_weights().version == first + 2  # the number of the refused one is used up


def test_n1_an_adapter_for_another_model_names_both_sides(zimage):
    import peft

    model = stepped(peft.get_peft_model(torch.nn.ModuleDict({"elsewhere": torch.nn.Linear(8, 8)}),
                                        peft.LoraConfig(r=4, lora_alpha=6, target_modules=["elsewhere"])))  # fmt: skip
    before = zimage.checksum()
    with pytest.raises(SyncError, match=r"unknown layers elsewhere; the engine's nearest are cap_embedder"):
        strategy(zimage, model, *IPC).update_weights()
    assert zimage.checksum() == before


def test_n8_nothing_to_send_raises(zimage):
    model = peft_model(zimage)
    with pytest.raises(RequestError, match="no lora_A and lora_B of adapter 'other'"):
        strategy(zimage, model, *IPC, adapter="other").update_weights()


def test_i1_i7_the_trainers_shared_memory_stays_flat(zimage):
    def exports():
        return [entry for entry in os.listdir("/dev/shm") if entry.startswith(f"torch_{os.getpid()}_")]

    model = peft_model(zimage)
    sync = strategy(zimage, model, *IPC, verify=False)
    before = exports()
    for _ in range(10):
        sync.update_weights()
    sync.args.lora_rank = 5
    sync.args.lora_alpha = None
    for layer in model.modules():
        getattr(layer, "scaling", {}).pop("default", None)
    for _ in range(10):
        with pytest.raises(SyncError, match="rank 4"):
            sync.update_weights()
    assert exports() == before


def test_a_lost_answer_is_asked_for_again_and_the_update_is_applied_once(zimage):
    url = str(zimage.server.client.base_url)
    transport = HttpTransport(url)
    send, lost = transport._client.send, {}

    def losing(method, *args, **kwargs):
        answer = send(method, *args, **kwargs)
        if method == "POST" and args[0] not in lost:
            lost[args[0]] = answer
            raise Unanswered("ReadTimeout: lost on its way")
        return answer

    transport._client.send = losing
    updates = zimage.status()["totals"]["updates"]
    model = peft_model(zimage)
    report = strategy(zimage, model, *IPC, transport=transport).update_weights()
    assert report.answer["state"] == "live"
    assert set(lost) == {"/lora_merge/resolve", "/lora_merge/verify", "/update_weights_from_tensor"}
    assert zimage.status()["totals"]["updates"] == updates + 1


def test_full_weights_and_weights_that_the_trainer_merged_are_the_new_base(zimage):
    """Small buckets, projections of one layer together; the merge is the eager one, in the weight's own dtype."""
    try:
        model = peft_model(zimage)
        small = ("--update-weight-buffer-size", "30000")
        report = strategy(zimage, model, *small).update_weights()
        assert report.buckets > 2
        adapter = sent(model.state_dict())
        merged = support_lora.merged(zimage.targets, adapter, 1.5, support_lora.merge_fp16)
        zimage.holds(support_lora.checksums(zimage.to_engine(merged)))
        with pytest.raises(
            SyncError, match=r"nothing was sent: the engine's base weights are not those .*14 of [0-9]+"
        ):
            strategy(zimage, model, *IPC).update_weights()  # its pairs would be added a second time
        zimage.holds(support_lora.checksums(zimage.to_engine(merged)))
        base = model.unload()
        with torch.no_grad():
            base.layers[0].attention.to_q.weight.add_(1)
        strategy(zimage, base, lora=False).update_weights()
        layer = "layers.0.attention.to_q"
        full = zimage.targets | {layer: zimage.targets[layer] + 1}
        zimage.holds(support_lora.checksums(zimage.to_engine(full)))
    finally:
        restore(zimage)


@pytest.mark.parametrize("example", ["colocated_fsdp2", "colocated_fsdp1"])
def test_two_sharded_ranks_sync_to_the_two_workers_beside_them(tp2, tmp_path, example):
    file = tmp_path / "sent.safetensors"
    command = [sys.executable, "-m", f"examples.{example}", "--engine", str(tp2.server.client.base_url),
               "--checkpoint", str(tp2.checkpoint), "--save", str(file),
               "--update-weight-buffer-size", "4096"]  # fmt: skip
    log = tmp_path / "log"
    with log.open("wb") as out:  # no pipe: torch's manager of shared memory keeps it open as long as the engine lives
        ran = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=240, cwd=ROOT, check=False)
    assert ran.returncode == 0, log.read_text()
    assert re.search("version [0-9]+ is live and verified: 14 layers", log.read_text())
    adapter = sent(load_file(file))
    assert any(b.any() for _, b in adapter.values())
    merged = support_lora.merged(tp2.targets, adapter, 1.5, tp2.merge)
    layers = {layer: {"sha256": support_lora.sha256(weight)} for layer, weight in merged.items()}
    answer = tp2.server.post("/lora_merge/verify", {"modules": {"transformer": layers}}).json()
    assert (answer["success"], answer["checked"]) == (
        True,
        14,
    )  # the stock checker does not know shards of fused layers


@pytest.mark.parametrize(("fixture", "gpus_per_engine"), [("sd3", 1), ("tp2", 2)])
def test_two_ranks_train_a_step_and_sync_by_each_strategy_and_every_weight_is_right(
    fixture, gpus_per_engine, request, tmp_path
):
    """SD3 with one worker in fp16 mode, Z-Image with two in fp32 mode."""
    engine = request.getfixturevalue(fixture)
    url = str(engine.server.client.base_url)
    given = [str(tmp_path / "meet"), url, str(engine.checkpoint), str(gpus_per_engine)]
    try:
        ranks = []
        for rank in range(2):
            with (tmp_path / f"log{rank}").open("wb") as out:
                command = [sys.executable, "-m", "tests.server.two_ranks", str(rank), *given]
                ranks.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT))
        codes = [rank.wait(240) for rank in ranks]
        logs = [(tmp_path / f"log{rank}").read_text() for rank in range(2)]
        assert codes == [0, 0], "\n".join(logs)
        layers = len(engine.targets)
        for name in ("LoRA IPC", "LoRA upload", "Merged", "Full"):
            assert f"{name}: {layers} layers are right" in logs[0]
    finally:
        restore(engine)
