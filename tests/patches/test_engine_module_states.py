"""Layers in the states sglang can put them into: quantized, sharded by FSDP, wrapped for an adapter of its own."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.engine import MergeEngine, ModuleUpdate
from sgld_lora_merge.merge.targets import CannotLand

pytest.importorskip("sglang.multimodal_gen.runtime.layers.quantization")  # 0.5.21 cannot import linear before it
linear = pytest.importorskip("sglang.multimodal_gen.runtime.layers.linear")

from server_patches.engine_module import EngineModule  # noqa: E402

IN, OUT = 12, 10


@dataclass
class Group:
    """As much of a tensor-parallel group as a layer asks for."""

    world_size: int
    rank_in_group: int


def model_of(layer):
    module = nn.Module()
    module.add_module("layer", layer)
    return module


class Packed:
    """As much of a quantization method as decides what may be done with its weight."""


def quantized():
    layer = linear.ReplicatedLinear(IN, OUT, bias=False)
    layer.quant_method = Packed()
    return model_of(layer)


def test_a_quantized_layer_is_never_merged():
    with pytest.raises(CannotLand, match=r"quantized \(Packed\).*--lora-merge-mode auto"):
        EngineModule(quantized(), 1, "merge").land("layer")
    for mode in ("auto", "dynamic"):
        (target,) = EngineModule(quantized(), 1, mode).land("layer").targets
        assert target.dynamic


def test_auto_merges_wherever_a_merge_is_defined():
    view = EngineModule(model_of(linear.ReplicatedLinear(IN, OUT, bias=False)), 1, "auto")
    assert not view.land("layer").targets[0].dynamic


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: linear.ColumnParallelLinear(IN, OUT, gather_output=True, tp_group=Group(2, 0)), "gathers its output"),
        (lambda: linear.RowParallelLinear(IN, OUT, input_is_parallel=False, tp_group=Group(2, 0)), "splits its input"),
    ],
)
def test_layers_that_a_branch_is_not_defined_for_are_refused_and_merged(layer, why):
    with pytest.raises(CannotLand, match=why):
        EngineModule(model_of(layer()), 2, "dynamic").land("layer")
    assert not EngineModule(model_of(layer()), 2, "auto").land("layer").targets[0].dynamic


def test_a_compiled_module_gets_no_branch():
    with pytest.raises(CannotLand, match="--enable-torch-compile"):
        EngineModule(quantized(), 1, "auto", compiled=True).land("layer")


def on_each_rank(check, *args):
    """Run a check as each of four ranks, whose collectives do nothing; torch keeps one mesh for a process."""

    def run(rank):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        check(rank, *args)

    children = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4


def sharded(whole, rank, replicas, section_rows=None):
    """A module whose weight FSDP has sharded by rows over the ranks, as `--use-fsdp-inference` does."""
    shards = 4 // replicas
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    chunks = list(whole.chunk(shards))
    mine = chunks[rank % shards] if rank % shards < len(chunks) else whole[:0]
    if section_rows:
        layer = linear.MergedReplicatedLinear(IN, section_rows, bias=False)
    else:
        layer = linear.ReplicatedLinear(IN, whole.shape[0], bias=False)
    weight = DTensor.from_local(
        mine.clone(), mesh, [Replicate(), Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return model_of(layer), mine


def random(*size, seed):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def merges_its_own_rows(rank, rows, replicas):
    whole = random(rows, IN, seed=0)
    module, mine = sharded(whole, rank, replicas)
    engine = MergeEngine(lambda: {"m": EngineModule(module, 4)}, Precision.FP32)
    a, b = random(3, IN, seed=1), random(rows, 3, seed=2)
    plan = engine.plan([ModuleUpdate("m", [Pair("layer", a, b, 1.5)])])
    engine.commit(plan)
    engine.settle(plan, "1")
    merged = (whole.double() + 1.5 * (b.double() @ a.double())).float()
    start = sum(chunk.shape[0] for chunk in list(whole.chunk(4 // replicas))[: rank % (4 // replicas)])
    local = module.layer.weight._local_tensor
    assert torch.equal(local, merged[start : start + mine.shape[0]])
    assert plan.layers == 1
    (target,) = plan.modules[0].written
    assert target.copies == replicas
    engine.restore("m")
    assert torch.equal(local, mine)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("rows", [10, 4, 3, 1])
def test_each_rank_merges_its_own_rows_of_an_fsdp_shard(rows, replicas):
    """Shards of unequal size and of no row at all included; nothing is gathered."""
    on_each_rank(merges_its_own_rows, rows, replicas)


def cuts_sections(rank):
    whole = random(10, IN, seed=0)
    module, mine = sharded(whole, rank, 1, section_rows=[4, 6])
    engine = MergeEngine(lambda: {"m": EngineModule(module, 4)}, Precision.FP32)
    a, b = random(3, IN, seed=1), random(10, 3, seed=2)
    engine.commit(engine.plan([ModuleUpdate("m", [Pair("layer", a, b, 1.5)])]))
    merged = (whole.double() + 1.5 * (b.double() @ a.double())).float()
    assert torch.equal(module.layer.weight._local_tensor, merged[3 * rank : 3 * rank + mine.shape[0]])


def test_sections_of_a_fused_weight_are_cut_where_fsdp_cuts_the_rows():
    """10 rows of sections 4 and 6 over four ranks: 3, 3, 3, 1."""
    on_each_rank(cuts_sections)


def refuses_columns(rank):
    mesh = init_device_mesh("cpu", (4,))
    layer = linear.ReplicatedLinear(IN, OUT, bias=False)
    local = torch.zeros(OUT, 3)
    layer.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(1)], run_check=False), requires_grad=False)
    with pytest.raises(CannotLand, match="sharded by columns"):
        EngineModule(model_of(layer), 4).land("layer")


def test_a_weight_that_is_sharded_by_columns_is_refused():
    on_each_rank(refuses_columns)
