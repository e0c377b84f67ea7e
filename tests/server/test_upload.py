"""Upload: a safetensors file over HTTP, no pickle, no IPC."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from sgld_lora_merge.trainer import SyncError, UploadTransport, select_weight_sync
from sgld_lora_merge.wire.schema import COMMIT_ROUTE
from support import lora, training
from support.server import environment
from tests.server.trainers import arguments

LAYER = "layers.0.attention.to_q"


def body(adapter, metadata=None, extra=None):
    tensors = dict(lora.named(adapter)) | (extra or {})
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)


def upload(engine, content, **query):
    return engine.server.client.post("/lora_merge/upload", content=content, params=query)


def test_an_uploaded_file_is_merged_byte_for_byte(zimage):
    adapter = zimage.adapter()
    answer = upload(zimage, body(adapter), lora_alpha=6, lora_rank=4, weight_version="7")
    assert answer.status_code == 200, answer.text
    assert (answer.json()["state"], answer.json()["layers"], answer.json()["weight_version"]) == ("live", 14, "7")
    zimage.holds(zimage.expect(adapter))


def test_curl_sends_an_adapter_that_peft_saved(zimage, tmp_path):
    """As it lies in the folder, alpha in the query, whatever content type curl sends."""
    script = """
import sys, examples, peft, torch
from diffusers import ZImageTransformer2DModel
model = ZImageTransformer2DModel.from_pretrained(sys.argv[1] + "/transformer", torch_dtype=torch.bfloat16)
config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=r"layers\\..*\\.(to_q|to_k|to_v|to_out\\.0|w1|w2|w3)")
model = peft.get_peft_model(model, config)
torch.manual_seed(0)
for name, parameter in model.named_parameters():
    if "lora_" in name:
        torch.nn.init.normal_(parameter, std=0.3)
model.save_pretrained(sys.argv[2])
"""
    folder = tmp_path / "adapter"
    with (tmp_path / "log").open("wb") as log:
        subprocess.run([sys.executable, "-c", script, str(zimage.checkpoint), str(folder)], check=True, stdout=log,
                       stderr=log, cwd=Path(__file__).parents[2], env=environment())  # fmt: skip
    file = folder / "adapter_model.safetensors"
    url = f"{zimage.server.client.base_url}/lora_merge/upload?lora_alpha=6"
    answer = subprocess.run(
        ["curl", "-s", "--data-binary", f"@{file}", url], check=True, capture_output=True, text=True
    )
    assert json.loads(answer.stdout)["success"] is True, answer.stdout

    from safetensors.torch import load_file

    saved = {name.removeprefix("base_model.model."): tensor for name, tensor in load_file(file).items()}
    layers = {name.removesuffix(".lora_A.weight") for name in saved if name.endswith(".lora_A.weight")}
    adapter = {layer: (saved[f"{layer}.lora_A.weight"], saved[f"{layer}.lora_B.weight"]) for layer in layers}
    assert len(adapter) == 14
    zimage.holds(zimage.expect(adapter))


def test_the_file_is_the_modules_whole_adapter(zimage):
    some = {layer: pair for layer, pair in zimage.adapter(seed=2).items() if "layers.1" in layer}
    zimage.update(zimage.adapter(seed=1))
    assert upload(zimage, body(some), lora_alpha=6).status_code == 200
    zimage.holds(zimage.expect(some))


def test_scales_may_come_with_the_file(zimage):
    adapter = zimage.adapter()
    alphas = {f"{layer}.alpha": torch.tensor(3.0) for layer in adapter if layer != LAYER}
    answer = upload(zimage, body(adapter, {"layer_scaling": json.dumps({LAYER: 4.0})}, alphas))
    assert answer.status_code == 200, answer.text
    zimage.holds(zimage.expect(adapter, dict.fromkeys(adapter, 0.75) | {LAYER: 4.0}))


def test_n6_a_kohya_file_gives_the_bytes_of_the_dotted_one(zimage):
    """Flattened names, lora_down and lora_up, an alpha for each layer; layer_scaling and verify by the same names."""
    adapter = zimage.adapter()
    assert upload(zimage, body(adapter), lora_alpha=6).status_code == 200
    dotted = zimage.checksum()
    zimage.reset()
    flattened = {f"lora_unet_{layer.replace('.', '_')}": pair for layer, pair in adapter.items()}
    kohya = {f"{layer}.{side}.weight": tensor for layer, pair in flattened.items()
             for side, tensor in zip(("lora_down", "lora_up"), pair, strict=True)}  # fmt: skip
    alphas = {f"{layer}.alpha": torch.tensor(6.0) for layer in flattened}

    answer = upload(zimage, save(kohya | alphas))

    assert (answer.status_code, answer.json()["layers"]) == (200, 14), answer.text
    assert zimage.checksum() == dotted
    zimage.holds(zimage.expect(adapter))
    name = "lora_unet_layers_0_attention_to_q"
    weight = lora.merged(zimage.targets, adapter, 1.5, zimage.merge)[LAYER]
    expected = {"modules": {"transformer": {name: {"sha256": lora.sha256(weight)}}}}
    assert zimage.server.post("/lora_merge/verify", expected).json()["success"] is True
    answer = upload(zimage, save(kohya | alphas, {"layer_scaling": json.dumps({name: 4.0})}))
    assert answer.status_code == 200, answer.text
    zimage.holds(zimage.expect(adapter, dict.fromkeys(adapter, 1.5) | {LAYER: 4.0}))


def test_n6_kohya_names_that_stand_for_nothing_here_are_refused_by_name(zimage):
    checksum = zimage.checksum()
    names = ("lora_unet_joint_blocks_0_context_block_attn_proj", "lora_te1_text_model_encoder_layers_0_mlp_fc1")
    for name, told in zip(names, ("save_lora_adapter", "a text encoder in kohya format"), strict=True):
        a, b = torch.ones(1, 64), torch.ones(64, 1)
        answer = upload(zimage, save({f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b}), lora_alpha=1)
        assert answer.status_code == 400
        assert name in answer.json()["message"]
        assert told in answer.json()["message"]
    assert zimage.checksum() == checksum


def test_with_no_alpha_anywhere_it_is_refused_and_says_where_peft_keeps_it(zimage):
    checksum = zimage.checksum()
    answer = upload(zimage, body(zimage.adapter()))
    assert answer.status_code == 400
    assert "adapter_config.json" in answer.json()["message"]
    assert "lora_alpha=rank" in answer.json()["message"]
    assert zimage.checksum() == checksum


def test_alpha_may_be_each_layers_own_rank(zimage):
    """Ranks 4 and 2 in one file, no alpha in it; by JSON the same word gives the same bytes."""
    fours, twos = zimage.adapter(seed=3), zimage.adapter(seed=4, rank=2)
    adapter = {layer: (twos if "to_" in layer else fours)[layer] for layer in fours}
    assert {a.shape[0] for a, _ in adapter.values()} == {2, 4}
    answer = upload(zimage, body(adapter), lora_alpha="rank")
    assert answer.status_code == 200, answer.text
    zimage.holds(zimage.expect(adapter, 1.0))
    zimage.reset()
    assert zimage.update(adapter, lora_alpha="rank", lora_rank=None).status_code == 200
    zimage.holds(zimage.expect(adapter, 1.0))


def test_another_kind_of_adapter_is_refused_by_what_it_is(zimage):
    checksum = zimage.checksum()
    named = [(f"layers.{block}.attention.to_q.lokr_w1", torch.ones(2, 2)) for block in (0, 1)]
    for answer in (upload(zimage, save(dict(named)), lora_alpha=6), zimage.update(named)):
        assert answer.status_code == 400
        told = "layers.0.attention.to_q.lokr_w1, layers.1.attention.to_q.lokr_w1 are LoKr, of which no pair can be made"
        assert told in answer.json()["message"]
    assert zimage.checksum() == checksum


@pytest.mark.parametrize(
    ("content", "query", "status", "named"),
    [
        (b"hello", {"lora_alpha": 6}, 400, "not a safetensors file"),
        (b"", {"lora_alpha": 6}, 400, "not a safetensors file"),
        (None, {"lora_alpha": "nan"}, 400, "lora_alpha is nan"),
        (None, {"lora_alpha": "six"}, 400, 'lora_alpha: a number is needed, or "rank"'),
        (None, {"lora_alpha": 6, "lora_rank": 8}, 400, "lora_rank 8"),
        (None, {"lora_alpha": 6, "target_module": "transformer_2"}, 400, "transformer_2"),
    ],
)
def test_bad_uploads_are_refused_by_name(zimage, content, query, status, named):
    zimage.update(zimage.adapter(seed=1), weight_version="good")
    checksum = zimage.checksum()
    answer = upload(zimage, body(zimage.adapter()) if content is None else content, **query)
    assert answer.status_code == status
    assert named in answer.json()["message"]
    assert zimage.checksum() == checksum
    assert not zimage.server.uploads_left()


def test_a_lost_answer_is_given_again(zimage):
    adapter = zimage.adapter()
    query = {"lora_alpha": 6, "update_id": "uploaded once"}
    first = upload(zimage, body(adapter), **query)
    assert upload(zimage, body(adapter), **query).json() == first.json()
    assert upload(zimage, body(zimage.adapter(seed=2)), **query).status_code == 409
    assert zimage.update(adapter, update_id="uploaded once").status_code == 409


def test_with_commit_false_it_is_staged_until_it_is_committed(zimage):
    adapter = zimage.adapter(seed=2)
    zimage.update(zimage.adapter(seed=1), weight_version="6")
    before = zimage.checksum()
    query = {"lora_alpha": 6, "weight_version": "7", "commit": "false"}
    for target in ({}, {"target_module": "transformer"}):
        name = f"held {target}"
        answer = upload(zimage, body(adapter), update_id=name, **query, **target).json()
        assert (answer["state"], answer["weight_version"]) == ("staged", "6")
        assert zimage.checksum() == before
    answer = zimage.server.post("/lora_merge/commit", {"update_id": name})
    assert (answer.status_code, answer.json()["weight_version"]) == (200, "7"), answer.text
    zimage.holds(zimage.expect(adapter))
    nameless = upload(zimage, body(adapter), lora_alpha=6, commit="false")
    assert nameless.status_code == 400
    assert "needs an update_id" in nameless.json()["message"]


def test_an_honest_upload_is_through_beside_sixty_that_are_open_and_idle(zimage):
    """90 s by default, here 18."""
    adapter, url = zimage.adapter(seed=5), zimage.server.client.base_url
    head = f"POST /lora_merge/upload HTTP/1.1\r\nhost: {url.host}\r\ncontent-length: 99999999\r\n\r\nx"
    logged = len(zimage.server.log.read_text(errors="replace"))
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection((url.host, url.port))).sendall(head.encode())
        time.sleep(0.5)
        assert len(zimage.server.uploads_left()) == 16
        begun = time.monotonic()
        answer = upload(zimage, body(adapter), lora_alpha=6)
        took = time.monotonic() - begun
    assert answer.status_code == 200, answer.text
    assert took < 18
    zimage.holds(zimage.expect(adapter))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        text = zimage.server.log.read_text(errors="replace")[logged:]
        if text.count('{"event": "upload"') == 61:
            break
        time.sleep(0.2)
    assert text.count('{"event": "upload"') == 61
    assert zimage.server.uploads_left() == []


def test_a_foreign_origin_is_refused(zimage):
    answer = zimage.server.client.post("/lora_merge/upload", content=b"x", headers={"origin": "https://example.org"})
    assert answer.status_code == 403


def test_on_tp_2_every_rank_reads_the_file(tp2):
    from tests.server.test_tensor_parallel import holds

    adapter = tp2.adapter()
    assert upload(tp2, body(adapter), lora_alpha=6).status_code == 200
    holds(tp2, adapter)


class Uncommitted(UploadTransport):
    """Does not reach its engine with a commit, while it is told so."""

    lost = False

    def ask(self, route, fields=None):
        if route == COMMIT_ROUTE and self.lost:
            raise SyncError("the commit is lost")
        return super().ask(route, fields)


def test_of_two_engines_of_which_one_does_not_commit_both_serve_the_version_before(zimage, tp2):
    """And the next sync brings them together."""
    engines = zimage, tp2
    args = arguments("--use-lora", "--lora-upload-weight-sync")
    urls = [str(engine.server.client.base_url) for engine in engines]
    model = training.with_lora(training.transformer(zimage.checkpoint), init_lora_weights=False)
    second = Uncommitted(urls[1])
    sync = select_weight_sync(args)(args, model, [UploadTransport(urls[0]), second], verify=True)
    first = str(sync.update_weights().version)
    before = [engine.checksum() for engine in engines]
    second.lost = True
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.5)
    told = rf"engine 1: the commit is lost\. Now engine 0 has .*'{first}'.*; engine 1 has .*'{first}'"
    with pytest.raises(SyncError, match=told):
        sync.update_weights()
    assert [engine.checksum() for engine in engines] == before
    second.lost = False
    third = str(sync.update_weights().version)
    assert third == str(int(first) + 2)
    assert {engine.status()["modules"]["transformer"]["weight_version"] for engine in engines} == {third}
