"""The strategies without an engine: what they send, to whom, and what they raise."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from sgld_lora_merge.adapter.file import read_adapter as read_file
from sgld_lora_merge.errors import LoraMergeError, RequestError
from sgld_lora_merge.merge.verify import sha256
from sgld_lora_merge.trainer import (
    DiffusionUpdateWeightFromTensor,
    DiffusionUpdateWeightFromTensorLoRA,
    DiffusionUpdateWeightFromTensorLoRAIPC,
    DiffusionUpdateWeightLoRAUpload,
    SyncError,
)
from sgld_lora_merge.trainer import gather as trainer_gather
from sgld_lora_merge.trainer import memory as trainer_memory
from sgld_lora_merge.wire.described import PayloadReader
from sgld_lora_merge.wire.payload import decode, named_tensors


class Layer(nn.Module):
    """A linear layer as PEFT wraps it."""

    def __init__(self, rank=4, scale=1.5):
        super().__init__()
        self.base_layer = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, 8, bias=False)})
        self.scaling = {"default": scale}


class Recorder:
    """An engine that accepts everything, until it is told to refuse."""

    def __init__(self, *, refuse=None, opened=(), mode="merge", answered=None):
        self.calls, self.refuse, self.opened, self.mode, self.answered = [], refuse, opened, mode, answered
        self.version, self.states = None, {}

    def update(self, fields, file=None):
        self.calls.append(("update", dict(fields), file))
        if self.refuse and not self.refuse.startswith("/"):
            raise SyncError(self.refuse, self.opened)
        if "update_id" in fields:
            self.states[fields["update_id"]] = "live" if fields.get("commit", True) else "staged"
        return self.answer()

    def ask(self, route, fields=None):
        self.calls.append((route, fields, None))
        if self.refuse == route:
            raise SyncError(f"{route} answered {self.answered}", answered=self.answered)
        if route == "/lora_merge/resolve":
            place = {"shape": [8, 8], "dtype": "float32"}
            return {"modules": {name: dict.fromkeys(layers, place) for name, layers in fields["modules"].items()}}
        if route == "/lora_merge/commit":
            self.states[fields["update_id"]] = "live"
        return self.answer()

    def answer(self):
        modules = {
            name: {"merge_mode": self.mode, "weight_version": self.version} for name in ("transformer", "transformer_2")
        }
        return {"success": True, "state": "live", "merge_precision": "fp16", "modules": modules,
                "updates": [{"update_id": name, "state": state} for name, state in self.states.items()]}  # fmt: skip

    def of(self, route):
        return [(fields, file) for name, fields, file in self.calls if name == route]


def arguments(**changes):
    return argparse.Namespace(**{
        "lora_alpha": 6.0, "lora_rank": 4, "update_weight_buffer_size": 2**20, "model_family": None,
        "update_weight_target_module": "transformer", "diffusion_forward_dtype": "fp32",
    } | changes)  # fmt: skip


def model(**layers):
    return nn.ModuleDict({name: nn.ModuleDict({"to_q": layer}) for name, layer in layers.items()})


def add(root, name, layer):
    """Put a layer under a dotted name."""
    *parents, last = name.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = getattr(root, parent)
    root.add_module(last, layer)


def exported_now():
    return [entry for entry in os.listdir("/dev/shm") if entry.startswith(f"torch_{os.getpid()}_")]


def test_the_fields_of_every_bucket_make_one_update():
    engine = Recorder()
    sync = DiffusionUpdateWeightFromTensorLoRAIPC(
        arguments(update_weight_buffer_size=1), model(a=Layer(), b=Layer(), c=Layer(scale=3.0)), engine
    )
    report = sync.update_weights()
    assert (report.version, report.tensors, report.layers, report.buckets, report.nbytes) == (1, 6, 3, 3, 768)
    sent = [fields for fields, _ in engine.of("update")]
    assert len({fields["update_id"] for fields in sent}) == 1
    assert [(fields["bucket_index"], fields["num_buckets"]) for fields in sent] == [(0, 3), (1, 3), (2, 3)]
    assert [fields["layer_scaling"] for fields in sent] == [None, None, {"transformer": {"c.to_q": 3.0}}]
    for fields in sent:
        assert (fields["weight_update_mode"], fields["load_format"]) == ("lora_merge", "flattened_bucket")
        assert (fields["lora_alpha"], fields["lora_rank"], fields["weight_version"]) == (6.0, 4, "1")
        assert (fields["commit"], fields["payload_gpu_uuids"]) == (True, None)
    assert sync.update_weights().version == 2
    assert engine.of("update")[3][0]["update_id"] != sent[0]["update_id"]


def test_a_sync_of_several_buckets_shows_its_progress_on_a_terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    small = arguments(update_weight_buffer_size=1)
    DiffusionUpdateWeightFromTensorLoRAIPC(small, model(a=Layer(), b=Layer()), Recorder()).update_weights()
    assert "LoRA IPC weight sync v1" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


def test_the_buckets_of_all_modules_are_counted_together():
    engine = Recorder()
    modules = {"transformer": model(a=Layer()), "transformer_2": model(b=Layer())}
    assert DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), modules, [engine]).update_weights().buckets == 2
    sent = [(fields["target_modules"], fields["num_buckets"]) for fields, _ in engine.of("update")]
    assert sent == [(["transformer"], 2), (["transformer_2"], 2)]


def test_what_is_wrong_with_any_module_is_told_before_anything_is_sent():
    engine = Recorder()
    odd = model(a=Layer())
    odd["a"]["to_q"].lora_C = nn.ModuleDict({"default": nn.Linear(2, 2, bias=False)})
    modules = {"transformer": odd, "transformer_2": nn.Linear(2, 2)}
    with pytest.raises(RequestError) as caught:
        DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), modules, engine).update_weights()
    assert "transformer: 1 keys of adapter 'default' have no place: a.to_q.lora_C" in str(caught.value)
    assert "transformer_2: the model has no lora_A and lora_B of adapter 'default'" in str(caught.value)
    assert engine.calls == []


def test_n2_n3_every_layer_travels_under_the_trainers_own_name_whatever_an_engine_calls_it():
    """Renaming, fusing and dropping are the engine's, in one place; the report counts what was sent."""
    engine, names = Reading(), ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "norm_added_q")
    trained = nn.Module()
    for name in names:
        add(trained, f"blocks.0.{name}", Layer())
    report = DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), trained, engine).update_weights()
    assert sorted(engine.weights) == sorted(f"blocks.0.{name}.lora_{side}" for name in names for side in "AB")
    assert (report.layers, report.tensors) == (6, 12)


def test_b2_a_transposed_matrix_travels_as_what_it_is_and_an_empty_one_is_refused_before_anything_is_sent():
    engine, trained = Reading(), model(a=Layer())
    layer = trained["a"]["to_q"]
    layer.lora_A["default"].weight = nn.Parameter(torch.arange(32.0).view(8, 4).T)
    DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), trained, engine).update_weights()
    assert torch.equal(engine.weights["a.to_q.lora_A"], torch.arange(32.0).view(8, 4).T)
    layer.lora_A["default"].weight = nn.Parameter(torch.zeros(0, 8))
    sent = len(engine.calls)
    with pytest.raises(RequestError, match=r"transformer: layers with an empty tensor .*ZeRO-3.*: a\.to_q"):
        DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), trained, engine).update_weights()
    assert len(engine.calls) == sent


def test_trained_biases_are_refused():
    trained = model(a=Layer())
    trained.peft_config = {"default": argparse.Namespace(bias="lora_only")}
    with pytest.raises(RequestError, match="bias='lora_only'"):
        DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), trained, Recorder()).update_weights()


def test_an_engine_that_is_not_well_is_not_sent_anything():
    engine = Recorder(refuse="/lora_merge/status", answered=503)
    with pytest.raises(SyncError, match=r"is the engine well\? /lora_merge/status answered 503"):
        DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), model(a=Layer()), engine).update_weights()
    assert engine.of("update") == []


STOCK_FIELDS = {"serialized_named_tensors", "payload_gpu_uuids", "load_format", "target_modules", "weight_update_mode",
                "lora_alpha", "lora_rank"}  # fmt: skip


def stock(refuse="/lora_merge/status"):
    return Recorder(refuse=refuse, answered=404)


def test_an_engine_without_the_plugin_is_sent_what_it_knows_and_the_trainer_is_warned_once(caplog):
    engine = stock()
    small = arguments(update_weight_buffer_size=1)
    sync = DiffusionUpdateWeightFromTensorLoRAIPC(small, model(a=Layer(), b=Layer()), engine)
    assert [sync.update_weights().version for _ in range(2)] == [1, 2]
    assert [set(fields) for fields, _ in engine.of("update")] == [STOCK_FIELDS] * 4
    [warned] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "an engine has no sgld-lora-merge" in warned.message
    assert len(engine.of("/lora_merge/status")) == 1


def test_what_an_engine_without_the_plugin_cannot_do_is_refused_before_anything_is_sent():
    engine, scaled = stock(), model(a=Layer(), b=Layer(scale=3.0))
    for strategy, trained, verify, told in (
        (DiffusionUpdateWeightFromTensorLoRAIPC, scaled, False, r"scale is not 6\.0 / 4 cannot be sent: b\.to_q"),
        (DiffusionUpdateWeightFromTensorLoRAIPC, model(a=Layer()), True, "no sgld-lora-merge: verify=True asks"),
        (DiffusionUpdateWeightFromTensor, nn.Linear(4, 2), True, "no sgld-lora-merge: verify=True asks"),
        (DiffusionUpdateWeightLoRAUpload, model(a=Layer()), False, "no sgld-lora-merge: uploads are a route of its"),
    ):
        with pytest.raises(RequestError, match=told):
            strategy(arguments(), trained, engine, verify=verify).update_weights()
    assert engine.of("update") == []


def test_a_lora_sync_that_fails_on_an_engine_without_the_plugin_says_how_far_it_came():
    class Second(Recorder):
        def update(self, fields, file=None):
            self.refuse = "full" if self.of("update") else self.refuse
            return super().update(fields, file)

    engine = Second(refuse="/lora_merge/status", answered=404)
    sync = DiffusionUpdateWeightFromTensorLoRAIPC(
        arguments(update_weight_buffer_size=1), model(a=Layer(), b=Layer(), c=Layer()), engine
    )
    with pytest.raises(SyncError, match="1 of 3 buckets are live on the engines before this one failed: full"):
        sync.update_weights()
    assert engine.of("/lora_merge/abort") == []


@pytest.mark.parametrize("opened", [[False], [True], []])
def test_i7_an_export_that_the_engine_has_not_opened_is_taken_back(opened):
    engine = Recorder(refuse="no", opened=opened)
    sync = DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), model(a=Layer()), engine)
    before = len(exported_now())
    with pytest.raises(SyncError, match="no"):
        sync.update_weights()
    assert engine.of("/lora_merge/abort") == []  # nothing was staged
    assert len(exported_now()) - before == (0 if opened == [False] else 1)
    assert sync.version == 0


def test_i7_an_export_is_taken_back_when_there_is_no_memory_for_the_next_bucket(monkeypatch):
    original = trainer_gather.prepare

    def prepare(tensors, gather):
        if engine.of("update"):
            raise RuntimeError("out of memory")
        return original(tensors, gather)

    monkeypatch.setattr(trainer_gather, "prepare", prepare)
    engine, before = Recorder(), len(exported_now())
    trained = model(a=Layer(), b=Layer(), c=Layer())
    sync = DiffusionUpdateWeightFromTensorLoRAIPC(arguments(update_weight_buffer_size=1), trained, engine)
    with pytest.raises(RuntimeError, match="out of memory"):
        sync.update_weights()
    assert len(engine.of("update")) == 1
    assert len(exported_now()) - before == 1  # that of the bucket which the engine took, and here nobody opens


def test_an_update_of_which_one_bucket_is_refused_is_aborted():
    class Second(Recorder):
        def update(self, fields, file=None):
            self.refuse = "no" if fields["bucket_index"] else None
            return super().update(fields, file)

    engine = Second()
    small = arguments(update_weight_buffer_size=1)
    with pytest.raises(SyncError, match="no"):
        DiffusionUpdateWeightFromTensorLoRAIPC(small, model(a=Layer(), b=Layer(), c=Layer()), engine).update_weights()
    [first, second] = [fields["update_id"] for fields, _ in engine.of("update")]
    assert engine.of("/lora_merge/abort") == [({"update_id": first}, None)]
    assert first == second


def test_fewer_ranks_than_gpus_is_an_error():
    with pytest.raises(LoraMergeError, match="2 engines of 1 GPUs"):
        DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), model(a=Layer()), [Recorder(), Recorder()])


def test_verify_asks_for_base_weights_once_and_for_merged_ones_always():
    engine = Recorder()
    sync = DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), model(a=Layer()), engine, verify=True)
    sync.update_weights()
    sync.update_weights()
    asked = [
        (fields["weights"], list(fields["modules"]["transformer"])) for fields, _ in engine.of("/lora_merge/verify")
    ]
    assert asked == [("base", ["a.to_q"]), ("live", ["a.to_q"]), ("live", ["a.to_q"])]


def test_verify_may_be_asked_for_by_the_environment_and_knows_that_a_dynamic_engine_keeps_the_base(monkeypatch, caplog):
    monkeypatch.setenv("SGLD_LORA_VERIFY", "1")
    engine = Recorder(mode="dynamic")
    sync = DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), model(a=Layer()), engine)
    sync.update_weights()
    sync.update_weights()
    before_the_first, *after_each = [fields["weights"] for fields, _ in engine.of("/lora_merge/verify")]
    assert (before_the_first, after_each) == ("base", ["base", "base"])
    assert "only base weights are verified" in caplog.text


def test_a_layer_without_a_base_weight_cannot_be_verified():
    bare = model(a=Layer())
    del bare["a"]["to_q"].base_layer
    with pytest.raises(RequestError, match=r"'a\.to_q' cannot be verified"):
        DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), bare, Recorder(), verify=True).update_weights()


def test_an_upload_is_one_file_for_every_engine(tmp_path):
    engines = [Recorder(), Recorder()]
    trained = model(a=Layer(), b=Layer(scale=3.0))
    DiffusionUpdateWeightLoRAUpload(arguments(), trained, engines).update_weights()
    assert engines[0].of("update") == engines[1].of("update")
    [(fields, file)] = engines[0].of("update")
    assert (fields["target_module"], fields["lora_alpha"], fields["lora_rank"]) == ("transformer", 6.0, 4)
    (tmp_path / "file").write_bytes(file)
    named, scaling = read_file(str(tmp_path / "file"))
    assert sorted(name for name, _ in named) == ["a.to_q.lora_A", "a.to_q.lora_B", "b.to_q.lora_A", "b.to_q.lora_B"]
    assert torch.equal(dict(named)["b.to_q.lora_B"], trained["b"]["to_q"].lora_B["default"].weight)
    assert scaling == {"b.to_q": 3.0}


def test_an_upload_of_two_modules_has_the_prefixes_of_the_familys_routes(tmp_path):
    engine = Recorder()
    modules = {"transformer": model(a=Layer()), "transformer_2": model(a=Layer(scale=3.0))}
    DiffusionUpdateWeightLoRAUpload(arguments(model_family="wan2_2"), modules, engine).update_weights()
    [(fields, file)] = engine.of("update")
    assert fields["target_module"] is None
    (tmp_path / "file").write_bytes(file)
    named, scaling = read_file(str(tmp_path / "file"))
    assert sorted({name.partition(".")[0] for name, _ in named}) == ["high_noise", "low_noise"]
    assert scaling == {"low_noise.a.to_q": 3.0}
    with pytest.raises(RequestError, match=r"\['transformer_2'\]|'zimage' has no route"):
        DiffusionUpdateWeightLoRAUpload(arguments(model_family="zimage"), modules, engine).update_weights()


def opened(request):
    """The tensors of a request, read as a worker reads them."""
    [payload] = request["serialized_named_tensors"]
    content = decode(payload, PayloadReader(lambda uuid: 0))
    named = named_tensors(content, request["load_format"], request["target_modules"])["transformer"]
    return {name: tensor.clone() for name, tensor in named}


class Reading(Recorder):
    """Opens what it is sent at once, as an engine does."""

    def update(self, fields, file=None):
        answer = super().update(fields, file)
        self.weights = getattr(self, "weights", {}) | opened(fields)
        return answer


@pytest.mark.parametrize("strategy", [DiffusionUpdateWeightFromTensorLoRAIPC, DiffusionUpdateWeightFromTensorLoRA])
def test_while_a_bucket_is_sent_only_the_next_one_is_whole(strategy):
    """Beside the export that is two buckets in memory; the same while a bucket is being exported."""
    alive, seen = weakref.WeakSet(), []

    def gather(tensor):
        alive.add(copy := tensor.clone())
        return copy

    class Counting(Recorder):
        def update(self, fields, file=None):
            seen.append(len(alive))
            return super().update(fields, file)

    trained = model(**{name: Layer() for name in "abcd"})
    strategy(arguments(update_weight_buffer_size=1), trained, Counting(), gather=gather).update_weights()
    each = 2 if strategy is DiffusionUpdateWeightFromTensorLoRAIPC else 3
    assert seen == [each, each, each, 0]


def test_merged_weights_travel_under_the_names_of_the_checkpoint():
    engine, trained = Reading(), model(a=Layer(scale=0.7071), b=Layer())
    trained["norm"] = nn.LayerNorm(8)
    del trained["b"]["to_q"].lora_A, trained["b"]["to_q"].lora_B
    sync = DiffusionUpdateWeightFromTensorLoRA(arguments(update_weight_buffer_size=1), trained, engine, verify=True)
    report = sync.update_weights()
    assert (report.tensors, report.layers, report.buckets) == (4, 3, 3)
    assert sorted(engine.weights) == ["a.to_q.weight", "b.to_q.weight", "norm.bias", "norm.weight"]
    layer = trained["a"]["to_q"]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert torch.equal(engine.weights["a.to_q.weight"], layer.base_layer.weight + (b @ a) * 0.7071)
    assert torch.equal(engine.weights["b.to_q.weight"], trained["b"]["to_q"].base_layer.weight)
    for fields, _ in engine.of("update"):
        assert set(fields) == {"serialized_named_tensors", "payload_gpu_uuids", "load_format", "target_modules",
                               "weight_version", "payload_fingerprint"}  # fmt: skip
    [(asked, _)] = engine.of("/lora_merge/verify")
    assert asked["modules"]["transformer"] == {
        f"{name}.to_q": {"sha256": sha256(engine.weights[f"{name}.to_q.weight"])} for name in "ab"
    }


def test_base_weights_travel_as_they_are_and_a_model_with_lora_is_refused():
    engine, plain = Reading(), nn.Linear(4, 2)
    DiffusionUpdateWeightFromTensor(arguments(), plain, engine).update_weights()
    assert torch.equal(engine.weights["weight"], plain.weight)
    for wrong, told in ((model(a=Layer()), "has LoRA"), (nn.Identity(), "no parameters")):
        with pytest.raises(RequestError, match=told):
            DiffusionUpdateWeightFromTensor(arguments(), wrong, engine).update_weights()


def test_a_wrapper_may_stand_in_the_names_of_parameters_and_not_in_the_keys_of_the_state_dict():
    """As FSDP1 has it."""

    def unwrap(module, state, prefix, metadata):
        for key in list(state):
            state[key.replace("_fsdp_wrapped_module.", "")] = state.pop(key)

    engine, sharded = Reading(), nn.Module()
    sharded._fsdp_wrapped_module = nn.Linear(4, 2)
    sharded.register_state_dict_post_hook(unwrap)
    DiffusionUpdateWeightFromTensor(arguments(), sharded, engine).update_weights()
    assert sorted(engine.weights) == ["bias", "weight"]


def test_a_pair_whose_scale_nobody_knows_is_not_merged():
    trained = model(a=Layer())
    trained["a"]["to_q"].scaling = {}
    with pytest.raises(RequestError, match=r"without a weight or PEFT's scale: a\.to_q"):
        DiffusionUpdateWeightFromTensorLoRA(arguments(), trained, Recorder()).update_weights()


def test_a_full_sync_that_fails_says_how_far_it_came():
    engine = Recorder(refuse="no room", opened=[False])
    with pytest.raises(SyncError, match="0 of 1 buckets are live on the engines before this one failed: no room"):
        DiffusionUpdateWeightFromTensor(arguments(), nn.Linear(4, 2), engine).update_weights()


def test_i3_expandable_segments_are_off_while_an_export_is_allocated(monkeypatch):
    told = []
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "a:1,expandable_segments:True")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    with trainer_memory.exportable_memory(torch.device("cuda", 0)):
        assert told == ["a:1,expandable_segments:False"]  # torch resets what it is not told
    assert told[1:] == ["a:1,expandable_segments:True"]
    with trainer_memory.exportable_memory(torch.device("cpu")):
        assert len(told) == 2


def test_i3_a_torch_that_does_not_tell_its_settings_has_those_of_the_environment(monkeypatch):
    told = []
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", told.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments: True")
    with trainer_memory.exportable_memory(torch.device("cuda", 0)):
        assert told == ["expandable_segments: False"]
    assert told[1:] == ["expandable_segments: True"]
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    with trainer_memory.exportable_memory(torch.device("cuda", 0)):
        assert len(told) == 2


WORKER = """
import sys, torch.distributed as dist
sys.path.insert(0, "tests/core/trainer")
from test_trainer_strategies import *
rank, refusal, told = int(sys.argv[1]), *sys.argv[3:]
torch.manual_seed(0)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
engines = [Recorder(), Recorder(refuse=refusal)]
sync = DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), model(a=Layer()), engines)
try:
    sync.update_weights()
except SyncError as error:
    assert told and told in str(error), error
else:
    assert not told
mine, other = engines[rank], engines[1 - rank]
assert other.calls == []
[(fields, _)] = mine.of("update")
assert fields["commit"] is False and len(fields["serialized_named_tensors"]) == 1
ended = [{"update_id": fields["update_id"]}]
full, uncommitted = refusal == "full", refusal == "/lora_merge/commit"
assert [f for f, _ in mine.of("/lora_merge/abort")] == (ended if full or (uncommitted and rank == 1) else [])
assert [f for f, _ in mine.of("/lora_merge/commit")] == ([] if full else ended)
assert [f for f, _ in mine.of("/lora_merge/rollback")] == ([{}] if uncommitted and rank == 0 else [])
mine.refuse = None
assert sync.update_weights().version == 2 and sync.version == 2
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        ("", ""),
        ("full", "full"),
        ("/lora_merge/commit", "did not become live everywhere. engine 1: /lora_merge/commit"),
    ],
    ids=["accepted", "refused", "not committed"],
)
def test_two_engines_go_live_together_or_go_back_and_the_next_sync_brings_them_together(tmp_path, refusal, told):
    command = [sys.executable, "-W", "ignore", "-c", WORKER]
    arguments = [str(tmp_path / "meet"), refusal, told]
    root = Path(__file__).parents[3]
    ranks = [subprocess.Popen([*command, str(rank), *arguments], cwd=root) for rank in range(2)]
    assert [rank.wait(200) for rank in ranks] == [0, 0]
