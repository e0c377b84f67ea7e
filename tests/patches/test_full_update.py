"""A full update as sglang runs it, on one rank whose neighbour is made up: what the base is called afterwards."""

from __future__ import annotations

import types

import pytest
import torch

pytest.importorskip("sglang.multimodal_gen.runtime.layers.quantization")  # 0.5.21 cannot import linear before it
linear = pytest.importorskip("sglang.multimodal_gen.runtime.layers.linear")
weights_updater = pytest.importorskip("sglang.multimodal_gen.runtime.post_training.weights_updater")

from server_patches import operations, worker_patches  # noqa: E402
from server_patches.engine_states import EngineStates  # noqa: E402
from server_patches.rank_result import RankResult, RejectedByRank  # noqa: E402
from server_patches.request_context import RequestContext  # noqa: E402
from server_patches.worker_request import MergeReq  # noqa: E402
from sgld_lora_merge.adapter.pairs import Pair  # noqa: E402
from sgld_lora_merge.adapter.precision import Precision  # noqa: E402
from sgld_lora_merge.merge.base_store import StorePolicy  # noqa: E402
from sgld_lora_merge.merge.engine import ModuleUpdate  # noqa: E402

MODULES = ("transformer", "transformer_2")


def around(hook, original):
    """As sglang puts a hook around a function."""
    return lambda *args, **kwargs: hook(original, *args, **kwargs)


class Rank:
    """A rank with two modules, an adapter in each, and a neighbour that answers what it is told to."""

    def __init__(self, neighbour):
        self.modules = {name: torch.nn.ModuleDict({"x": linear.ReplicatedLinear(6, 4, bias=False)}) for name in MODULES}
        for module in self.modules.values():
            module["x"].weight.data = torch.ones(4, 6)
        args = types.SimpleNamespace(lora_merge_mode="merge", enable_torch_compile=False)
        pipeline = types.SimpleNamespace(modules=self.modules)
        self.gpu_worker = types.SimpleNamespace(pipeline=pipeline, server_args=args, is_sleeping=lambda: False)
        self.states = EngineStates(self.gpu_worker, 1, Precision.FP32, StorePolicy())
        self.group = types.SimpleNamespace(gather_results=lambda mine, written: [mine, neighbour(mine)])
        pair = Pair("x", torch.ones(2, 6), torch.ones(4, 2), 1.0)
        plan = self.engine.plan([ModuleUpdate(name, [pair]) for name in MODULES])
        self.engine.commit(plan)
        self.engine.settle(plan, "1")

    @property
    def engine(self):
        return self.states.engine

    def base_weights_change(self, module):
        return self.states.base_weights_change(module)

    def seen(self, module):
        """What the base is called, its version, whether an adapter is live, and the first weight."""
        state = self.engine.state(module)
        return state.base, state.weight_version, bool(state.live), float(self.modules[module]["x"].weight[0, 0])


@pytest.fixture
def rank(monkeypatch):
    """Make a rank, and put the plugin's changes around sglang's functions."""

    def made(neighbour=lambda mine: mine):
        rank = Rank(neighbour)
        monkeypatch.setattr(worker_patches, "_worker", rank)
        return rank

    for owner, name, hook in (
        (weights_updater, "_load_weights_into_module", worker_patches.base_weights_change),
        (weights_updater.WeightsUpdater, "update_weights_from_tensor", worker_patches.refuse_own_merge),
    ):
        monkeypatch.setattr(owner, name, around(hook, getattr(owner, name)))
    return made


def weights(*shapes):
    return {name: [("x.weight", torch.full(shape, 2.0))] for name, shape in zip(MODULES, shapes, strict=False)}


def push(rank, sent, version="3"):
    """Run a full update of both modules on this rank."""
    req = MergeReq([], target_modules=list(MODULES), weight_version=version)
    return operations.FullUpdate(rank, None).apply(sent, RequestContext(req, 2))


GOOD, BAD = (4, 6), (3, 3)


@pytest.mark.parametrize(("version", "base"), [("3", "full weights, version '3'"), (None, "full weights")])
def test_a_full_update_is_the_base_under_its_version(rank, version, base):
    one = rank()
    push(one, weights(GOOD, GOOD), version)
    assert [one.seen(name) for name in MODULES] == [(base, version, False, 2.0)] * 2


def test_a_full_update_that_fails_half_way_is_the_base_without_a_version(rank):
    """The second module was begun: what of it is written nobody knows."""
    one = rank()
    with pytest.raises(RejectedByRank, match="Failed to update module 'transformer_2'"):
        push(one, weights(GOOD, BAD))
    assert one.seen("transformer") == ("full weights", None, False, 2.0)
    assert one.seen("transformer_2") == ("full weights", None, False, 1.0)


def test_a_module_that_another_rank_has_begun_to_write_has_no_adapter_here_either(rank):
    one = rank(lambda mine: RankResult(begun=MODULES))
    with pytest.raises(RejectedByRank, match="Failed to update module 'transformer'"):
        push(one, weights(BAD, GOOD))
    assert [one.seen(name) for name in MODULES] == [("full weights", None, False, 1.0)] * 2


def test_a_full_update_that_another_rank_has_failed_has_no_version_here_either(rank):
    one = rank(lambda mine: RankResult(400, "full_update", ("no room",), begun=MODULES[:1]))
    with pytest.raises(RejectedByRank, match="rank 1: no room"):
        push(one, weights(GOOD, GOOD))
    assert [one.seen(name) for name in MODULES] == [("full weights", None, False, 2.0)] * 2


def test_a_full_update_that_is_refused_before_it_writes_leaves_adapter_and_base(rank):
    one = rank()
    with pytest.raises(RejectedByRank, match="Missing tensor payload"):
        push(one, weights(GOOD))
    assert [one.seen(name) for name in MODULES] == [("loaded", "1", True, 3.0)] * 2


def test_what_code_in_the_worker_loads_by_itself_is_called_what_it_is(rank):
    one = rank()
    updater = weights_updater.WeightsUpdater(one.gpu_worker.pipeline)
    assert updater.update_weights_from_tensor(weights(GOOD), target_modules=["transformer"])[0]
    weights_updater._load_weights_into_module(one.modules["transformer_2"], iter(weights(GOOD, GOOD)["transformer_2"]))
    assert one.seen("transformer") == ("full weights", None, False, 2.0)
    assert one.seen("transformer_2") == ("loaded from disk", None, False, 2.0)
