"""Weights that sglang puts into another order as it loads them: a pair goes where its rows and columns went."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from server_patches.verify import VerifiedLayer
from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.engine import MergeEngine, ModuleUpdate
from sgld_lora_merge.merge.module_view import LinearModule
from sgld_lora_merge.merge.spans import Span
from sgld_lora_merge.merge.targets import CannotLand
from sgld_lora_merge.merge.verify import assemble, sampled, sha256
from sgld_lora_merge.merge.weight_sums import Block, WeightSum, block_sum, read_sums, total_of

pytest.importorskip("sglang.multimodal_gen.runtime.layers.quantization")  # 0.5.21 cannot import linear before it
linear = pytest.importorskip("sglang.multimodal_gen.runtime.layers.linear")
from sglang.multimodal_gen.configs.models.dits.minimax_h3 import MiniMaxH3DiTArchConfig  # noqa: E402
from sglang.multimodal_gen.runtime.distributed import parallel_state  # noqa: E402

from server_patches.engine_module import EngineModule  # noqa: E402

# importing a model imports torch's compiler and sglang's quantization, which warn of themselves
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Only CUDA:UserWarning"),
]

HEADS, HEAD, WIDTH = 4, 8, 32
INNER = HEADS * HEAD
QKV, OUT = "blocks.0.attn.qkv_proj", "blocks.0.attn.out_proj"


@dataclass
class Group:
    """As much of a tensor-parallel group as a layer asks for."""

    world_size: int
    rank_in_group: int


@pytest.fixture
def h3(monkeypatch):
    """Build a block's attention of MiniMax-H3 as one rank has it, under the model's names."""

    def build(tp=1, rank=0, **arch):
        from sglang.multimodal_gen.runtime.models.dits.minimax_h3 import MiniMaxH3Attention

        monkeypatch.setattr(parallel_state, "_TP", Group(tp, rank))
        sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "attention_head_dim": HEAD}
        config = MiniMaxH3DiTArchConfig(**sizes, **arch)
        module = nn.Module()
        block = nn.Module()
        block.attn = MiniMaxH3Attention(config, None, prefix="blocks.0.attn")
        module.blocks = nn.ModuleList([block])
        module.param_names_mapping = config.param_names_mapping
        module.lora_param_names_mapping = config.lora_param_names_mapping
        return module

    return build


def random(*size, seed):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def base():
    return random(3 * INNER, WIDTH, seed=0).bfloat16()


def pair(name, rows=3 * INNER, columns=WIDTH):
    return Pair(name, random(3, columns, seed=1), random(rows, 3, seed=2), 1.5)


def merged(w0, each):
    """W0 + s * B @ A, rounded once."""
    return (w0.double() + each.scale * (each.b.double() @ each.a.double())).to(w0.dtype)


def load(layer, weight):
    layer.weight.weight_loader(layer.weight, weight)


def update(module, pairs, precision=Precision.FP32, mode="merge", replica=1):
    engine = MergeEngine(lambda: {"m": EngineModule(module, replica, mode)}, precision)
    plan = engine.plan([ModuleUpdate("m", pairs)])
    engine.commit(plan)
    engine.settle(plan, "1")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_pair_of_the_checkpoints_rows_goes_where_sglangs_loader_puts_those(h3, tp):
    """MiniMax-H3: q, k and v of head 0, then of head 1; in memory all q, all k, all v, each of them sharded."""
    for rank in range(tp):
        module, expected = h3(tp, rank), h3(tp, rank)
        load(module.get_submodule(QKV), base())
        load(expected.get_submodule(QKV), merged(base(), pair(QKV)))
        update(module, [pair(QKV)], replica=tp)
        assert torch.equal(module.get_submodule(QKV).weight, expected.get_submodule(QKV).weight)


def test_every_merged_row_is_that_of_the_checkpoint_put_through_sglangs_own_transform(h3):
    module = h3()
    weight = module.get_submodule(QKV).weight
    load(module.get_submodule(QKV), base())
    update(module, [pair(QKV)])
    in_memory = merged(base(), pair(QKV)).view(HEADS, 3, HEAD, WIDTH).transpose(0, 1).reshape(3 * INNER, WIDTH)
    assert torch.equal(weight, in_memory)
    assert torch.equal(weight, weight.rank_local_weight_transform(merged(base(), pair(QKV))))


def test_the_0_mode_is_that_of_a_trainer_that_merges_in_the_checkpoints_order(h3):
    module, trainer = h3(), nn.Linear(WIDTH, 3 * INNER, bias=False, dtype=torch.bfloat16)
    load(module.get_submodule(QKV), base())
    trainer.weight.data.copy_(base())
    engine = MergeEngine(lambda: {"m": LinearModule(trainer)}, Precision.FP16)
    engine.commit(engine.plan([ModuleUpdate("m", [pair("")])]))
    update(module, [pair(QKV)], Precision.FP16)
    weight = module.get_submodule(QKV).weight
    assert torch.equal(weight, weight.rank_local_weight_transform(trainer.weight))


@pytest.mark.parametrize("tp", [1, 2])
def test_separately_named_projections_stay_in_their_sections(h3, tp):
    """Diffusers' to_q is all heads' q: the transform is of the fused weight only."""
    local = INNER // tp
    for rank in range(tp):
        module = h3(tp, rank)
        load(module.get_submodule(QKV), base())
        before = module.get_submodule(QKV).weight.detach().clone().chunk(3)
        pairs = [
            Pair(f"transformer_blocks.0.attn.to_{name}", random(3, WIDTH, seed=i), random(INNER, 3, seed=9 + i), 1.5)
            for i, name in enumerate("qkv")
        ]
        update(module, pairs, replica=tp)
        for w0, w, each in zip(before, module.get_submodule(QKV).weight.chunk(3), pairs, strict=True):
            mine = Pair(each.layer, each.a, each.b[rank * local :][:local], each.scale)
            assert torch.equal(w, merged(w0, mine))


def test_layers_and_checkpoints_without_a_transform_keep_their_rows(h3):
    (out,) = EngineModule(h3(), 1).land(OUT).targets
    assert out.b_rows == (Span(0, WIDTH),)
    native = EngineModule(h3(qkv_checkpoint_grouped=False), 1).land(QKV)
    assert [target.b_rows for target in native.targets] == [(Span(i * INNER, (i + 1) * INNER),) for i in range(3)]


def test_a_file_in_kohya_format_keeps_the_rows_that_sglang_gives_it_on_loading_it_from_disk(h3):
    """sglang renames it to blocks.N.attn.qkv_proj and cuts it into q, k and v as it stands."""
    landing = EngineModule(h3(), 1).land("lora_unet_blocks_0_attn_qkv_proj")
    assert [target.b_rows for target in landing.targets] == [(Span(i * INNER, (i + 1) * INNER),) for i in range(3)]


def test_a_low_rank_branch_gives_its_output_in_the_order_of_the_rows_in_memory(h3):
    module, each = h3(), pair(QKV)
    layer = module.get_submodule(QKV)
    load(layer, torch.zeros_like(base()))
    update(module, [each], mode="dynamic")
    x = random(5, WIDTH, seed=4).bfloat16()
    in_checkpoint_order = x.float() @ each.a.T @ each.b.T * each.scale
    in_memory = layer.weight.rank_local_weight_transform(in_checkpoint_order.T).T
    torch.testing.assert_close(layer(x)[0], in_memory.bfloat16(), rtol=2e-2, atol=1e-3)


def test_fsdps_parameters_have_the_order_of_those_that_they_replaced(h3):
    """sglang's loader keeps the parameters that have the transform, under their names."""
    module = h3()
    spans = [target.b_rows for target in EngineModule(module, 1).land(QKV).targets]
    layer = module.get_submodule(QKV)
    module._pre_fsdp_weight_loader_params = {f"{QKV}.weight": layer.weight}
    layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    assert [target.b_rows for target in EngineModule(module, 1).land(QKV).targets] == spans
    assert len(spans[0]) == HEADS


def test_a_weight_that_was_replaced_after_loading_is_refused_under_the_fused_name(h3):
    module = h3()
    layer = module.get_submodule(QKV)
    layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    with pytest.raises(CannotLand, match=r"was replaced after it was loaded.*send to_q, to_k and to_v"):
        EngineModule(module, 1).land(QKV)
    assert EngineModule(module, 1).land("transformer_blocks.0.attn.to_k").targets[0].section == 1


def doubled(weight):
    return weight * 2


def flipped_columns(weight):
    return weight.flip(1)


def shortened(weight):
    return weight[1:]


def repeated(weight):
    return weight[[0, *range(len(weight) - 1)]]


def failing(weight):
    raise ValueError(f"no {weight.dim()} dimensions")


@pytest.mark.parametrize("transform", [doubled, flipped_columns, shortened, repeated])
def test_a_transform_that_does_more_than_reorder_rows_is_refused_by_name(h3, transform):
    module = h3()
    module.get_submodule(QKV).weight.rank_local_weight_transform = transform
    with pytest.raises(CannotLand, match=rf"by more than the order of its rows \({transform.__name__}\)"):
        EngineModule(module, 1).land(QKV)


def test_a_transform_that_cannot_be_learnt_is_refused_with_its_error(h3):
    module = h3()
    module.get_submodule(QKV).weight.rank_local_weight_transform = failing
    with pytest.raises(CannotLand, match="failing failed on row numbers: no 2 dimensions"):
        EngineModule(module, 1).land(QKV)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_checkpoints_weight_is_verified_in_the_checkpoints_order(h3, tp):
    """By checksum, by sum and by samples: all ranks together hold exactly the trainer's weight."""
    layers = []
    for rank in range(tp):
        module = h3(tp, rank)
        load(module.get_submodule(QKV), base())
        view = EngineModule(module, tp)
        landing = view.land(QKV)
        weight = view.weight(f"{QKV}.weight")
        whole = WeightSum("bfloat16", 3 * INNER, WIDTH, 0)
        rows = lambda target, weight=weight: weight[target.rows.start : target.rows.stop]  # noqa: E731
        layers.append(VerifiedLayer(QKV, landing, rows, torch.bfloat16, None, [], whole))
    pieces = [piece for layer in layers for piece in layer.pieces()]
    assert torch.equal(assemble(landing, pieces), base())
    assert sha256(assemble(landing, pieces)) == sha256(base())
    parts = [dict(zip(sums, read_sums(list(sums.values())), strict=True)) for sums in (x.block_sums() for x in layers)]
    everything = Block(Span(0, 3 * INNER), Span(0, WIDTH))
    (expected,) = read_sums([block_sum(base(), everything, WIDTH, torch.bfloat16)])
    assert total_of(parts, 3 * INNER, WIDTH) == expected % 2**64
    samples = [(row, row % WIDTH, 0.0, 0.0) for row in range(3 * INNER)]
    (values,) = sampled([(pieces, samples)])
    assert values == {row: base()[row, row % WIDTH].item() for row in range(3 * INNER)}


@pytest.mark.parametrize("rank", [0, 1])
def test_columns_go_where_a_loader_on_the_layer_puts_them(rank):
    """FLUX's single blocks in sglang 0.5.21 and 0.5.22: a part of the attention's columns, a part of the MLP's."""
    layer = linear.RowParallelLinear(24, 10, bias=False, tp_group=Group(2, rank))

    def loader(param, loaded):
        parts = [loaded.narrow(param.input_dim, rank * 4, 4), loaded.narrow(param.input_dim, 8 + rank * 8, 8)]
        param.data.copy_(torch.cat(parts, dim=param.input_dim))

    layer.weight_loader = layer.weight.weight_loader = loader
    module = nn.Module()
    module.layer = layer
    w0, each = random(10, 24, seed=5), pair("layer", 10, 24)
    load(layer, w0)
    update(module, [each], replica=2)
    ours = layer.weight.detach().clone()
    load(layer, merged(w0, each))
    assert torch.equal(ours, layer.weight)


# Where a model of sglang sets a loader of its own on a parameter, and what it does: file -> why pairs land right.
OWN_LOADERS = {
    "dits/minimax_h3.py": "rows of qkv_proj: checkpoint_rows",
    "dits/flux.py": "columns of single blocks' proj_out, before 0.5.23: checkpoint_columns",
    "dits/flux_2.py": "columns of single blocks' to_out, before 0.5.23: checkpoint_columns",
    "dits/longcat_image.py": "columns of single blocks' proj_out, before 0.5.23: checkpoint_columns",
    "dits/ltx_2.py": "shards of a norm's weight, which takes no pair",
    "dits/minimax_h3_vdn.py": "shards of parameters that are no layer's",
}


def test_no_model_of_this_sglang_sets_any_other_loader_on_a_parameter():
    """If this fails in a new version: read the loader, and see that a pair lands where it puts the rows and columns."""
    (root,) = importlib.util.find_spec("sglang").submodule_search_locations
    models = Path(root) / "multimodal_gen" / "runtime" / "models"
    sets_one = re.compile(r"\._?weight_loader = |setattr\([^()]*\"weight_loader\"|\.rank_local_weight_transform = ")
    found = {
        file.relative_to(models).as_posix()
        for file in models.rglob("*.py")
        if file.name != "parameter.py" and sets_one.search(file.read_text())
    }
    assert found <= OWN_LOADERS.keys()
