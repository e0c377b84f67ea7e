"""sglang's layers as targets, held against what sglang's own weight loaders do with the same rows and columns."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.engine import MergeEngine, ModuleUpdate
from sgld_lora_merge.merge.spans import Span
from sgld_lora_merge.merge.targets import CannotLand
from support.server import before_0_5_23

pytest.importorskip("sglang.multimodal_gen.runtime.layers.quantization")  # 0.5.21 cannot import linear before it
linear = pytest.importorskip("sglang.multimodal_gen.runtime.layers.linear")
from sglang.multimodal_gen.configs.models.dits.flux import FluxArchConfig  # noqa: E402
from sglang.multimodal_gen.configs.models.dits.wanvideo import WanVideoArchConfig  # noqa: E402
from sglang.multimodal_gen.configs.models.dits.zimage import ZImageArchConfig  # noqa: E402
from sglang.multimodal_gen.runtime.models.dits.base import BaseDiT  # noqa: E402

from server_patches.engine_module import EngineModule  # noqa: E402

IN, OUT = 12, 24


@dataclass
class Group:
    """As much of a tensor-parallel group as a layer asks for."""

    world_size: int
    rank_in_group: int


def column(group):
    return linear.ColumnParallelLinear(IN, OUT, bias=False, tp_group=group)


def row(group):
    return linear.RowParallelLinear(IN, OUT, bias=False, tp_group=group)


def row_segments(group):
    if before_0_5_23():
        pytest.skip("no layer of sglang 0.5.21 and 0.5.22 has an input of several segments")
    return linear.RowParallelLinear(IN, OUT, bias=False, tp_group=group, input_sizes=[4, 8])


def merged(group):
    return linear.MergedColumnParallelLinear(IN, [8, 16], bias=False, tp_group=group)


def qkv(group):
    return linear.QKVParallelLinear(IN, 2, 4, bias=False, tp_group=group)


def qkv_gqa(group):
    """4 query heads, 2 key and value heads: over 4 ranks every key head is held twice."""
    return linear.QKVParallelLinear(IN, 2, 4, 2, bias=False, tp_group=group)


def replicated(group):
    return linear.ReplicatedLinear(IN, OUT, bias=False)


def merged_replicated(group):
    return linear.MergedReplicatedLinear(IN, [8, 16], bias=False)


LAYERS = [column, row, row_segments, merged, qkv, qkv_gqa, replicated, merged_replicated]
SHARD_IDS = {qkv: ["q", "k", "v"], qkv_gqa: ["q", "k", "v"], merged: [0, 1], merged_replicated: [0, 1]}


def model_of(layer, **attributes):
    module = nn.Module()
    module.add_module("layer", layer)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def tree(config, **layers):
    """Layers at dotted names (``__`` for the dot), with the tables of a real model."""
    module = nn.Module()
    for name, layer in layers.items():
        *parents, last = name.split("__")
        at = module
        for parent in parents:
            if not hasattr(at, parent):
                at.add_module(parent, nn.Module())
            at = getattr(at, parent)
        at.add_module(last, layer)
    module.param_names_mapping = config.param_names_mapping
    module.lora_param_names_mapping = config.lora_param_names_mapping
    return module


def zimage():
    return tree(
        ZImageArchConfig(),
        layers__0__attention__to_qkv=linear.MergedReplicatedLinear(IN, [4, 4, 4], bias=False),
        layers__0__attention__to_out__0=nn.Linear(IN, OUT),
        layers__0__feed_forward__w13=linear.MergedReplicatedLinear(IN, [8, 16], bias=False),
        layers__0__adaLN_modulation__0=nn.Linear(IN, OUT),
        layers__0__attention_norm1=nn.LayerNorm(4),
    )


def wan():
    names = ("to_q", "to_out", "attn2__to_q", "attn2__to_out", "ffn__fc_in", "ffn__fc_out")
    layers = {f"blocks__{i}__{name}": nn.Linear(IN, OUT) for i in (0, 11) for name in names}
    return tree(
        WanVideoArchConfig(), condition_embedder__text_embedder__fc_in=nn.Linear(IN, OUT), proj_out=nn.Linear(IN, OUT),
        **layers,
    )  # fmt: skip


def flux():
    return tree(
        FluxArchConfig(),
        transformer_blocks__0__attn__to_qkv=linear.MergedReplicatedLinear(IN, [4, 4, 4], bias=False),
        transformer_blocks__0__attn__to_out__0=nn.Linear(IN, OUT),
        transformer_blocks__0__attn__to_add_out=nn.Linear(IN, OUT),
        norm_out__linear=nn.Linear(IN, OUT),
        proj_out=nn.Linear(IN, OUT),
    )


def numbered(rows, columns):
    """A matrix whose every element is another number."""
    return torch.arange(float(rows * columns)).view(rows, columns)


def at(whole, target):
    """The part of a whole section that a target takes."""
    rows = torch.cat([whole[span.start : span.stop] for span in target.b_rows])
    return torch.cat([rows[:, span.start : span.stop] for span in target.a_cols], dim=1)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("make", LAYERS)
def test_a_section_lands_where_the_weight_loader_puts_it(make, tp):
    for rank in range(tp):
        layer = make(Group(tp, rank))
        mapping = {rf"^x\.part{i}\.(weight|lora_A)$": (r"layer.\1", i, 3) for i in range(3)}
        view = EngineModule(model_of(layer, param_names_mapping=mapping), tp)
        for index, shard_id in enumerate(SHARD_IDS.get(make, [None])):
            landing = view.land("layer" if shard_id is None else f"x.part{index}")
            whole = numbered(landing.out_features, landing.in_features)
            layer.weight.data.fill_(-1)
            arguments = [] if shard_id is None else [shard_id]
            layer.weight_loader(layer.weight, whole, *arguments)
            (target,) = landing.targets
            assert torch.equal(layer.weight.data[target.rows.start : target.rows.stop], at(whole, target))
            assert (layer.weight.data != -1).sum() == target.rows.size * layer.weight.shape[1]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("make", [column, row, row_segments, merged, qkv, replicated, merged_replicated])
def test_a_pair_for_the_whole_layer_lands_where_the_weight_loader_puts_it(make, tp):
    """F1: sections of a fused layer are sharded one by one."""
    for rank in range(tp):
        layer = make(Group(tp, rank))
        landing = EngineModule(model_of(layer), tp).land("layer")
        whole = numbered(landing.out_features, landing.in_features)
        layer.weight_loader(layer.weight, whole)
        ours = torch.empty_like(layer.weight.data)
        for target in landing.targets:
            ours[target.rows.start : target.rows.stop] = at(whole, target)
        assert torch.equal(ours, layer.weight.data)
        assert sum(target.rows.size for target in landing.targets) == layer.weight.shape[0]


def test_f1_a_merge_over_two_ranks_is_the_merge_of_the_whole():
    a, b = torch.randn(4, IN), torch.randn(OUT, 4)
    base = torch.randn(OUT, IN)
    parts = []
    for rank in range(2):
        layer = qkv(Group(2, rank))
        layer.weight_loader(layer.weight, base)
        view = EngineModule(model_of(layer), 2)
        engine = MergeEngine(lambda view=view: {"m": view}, Precision.FP32)
        engine.commit(engine.plan([ModuleUpdate("m", [Pair("layer", a, b, 1.5)])]))
        parts.append(layer.weight.data.chunk(3))
    merged_weight = torch.cat([torch.cat([part[i] for part in parts]) for i in range(3)])
    torch.testing.assert_close(merged_weight, base + 1.5 * b @ a)


def test_copies_count_the_ranks_that_hold_the_same_shard():
    def copies(make, replica_size=4, tp=4):
        return [
            target.copies for target in EngineModule(model_of(make(Group(tp, 0))), replica_size).land("layer").targets
        ]

    assert copies(column) == [1]
    assert copies(row) == [1]
    assert copies(replicated) == [4]
    assert copies(qkv_gqa) == [1, 2, 2]
    assert copies(column, replica_size=8) == [2]


def test_a_plain_linear_is_a_target():
    landing = EngineModule(model_of(nn.Linear(IN, OUT)), 1).land("layer")
    assert (landing.out_features, landing.in_features) == (OUT, IN)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.LayerNorm(4), "LayerNorm, not a linear layer or a convolution"),
        (nn.Embedding(4, 4), "Embedding, not a linear layer or a convolution"),
        (nn.ConvTranspose2d(1, 1, 1), "ConvTranspose2d, not a linear layer or a convolution"),
        (nn.Conv2d(4, 4, 1, groups=2), "Conv2d of 2 groups"),
    ],
)
def test_a_layer_of_another_kind_is_refused_by_type(layer, reason):
    with pytest.raises(CannotLand, match=reason):
        EngineModule(model_of(layer), 1).land("layer")


@pytest.mark.parametrize("name", ["patch_embedding", "patch_embedding.proj", "lora_unet_patch_embedding"])
def test_a_patch_embedding_is_a_target_under_the_names_of_its_tables(name):
    module = tree(WanVideoArchConfig(), patch_embedding__proj=nn.Conv3d(16, OUT, (1, 2, 2)))
    view = EngineModule(module, 4)
    landing = view.land(name)
    (target,) = landing.targets
    assert (target.weight, target.copies, landing.shape) == ("patch_embedding.proj.weight", 4, (OUT, 16, 1, 2, 2))
    assert view.weight(target.weight).data_ptr() == module.patch_embedding.proj.weight.data_ptr()
    assert view.weight(target.weight).shape == (OUT, 64)


def test_a_convolution_gets_no_low_rank_branch():
    with pytest.raises(CannotLand, match="Conv2d; a low-rank branch is not defined for it"):
        EngineModule(model_of(nn.Conv2d(4, 4, 3)), 1, mode="dynamic").land("layer")


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 4, 3), nn.Linear(4, 4)])
def test_layers_under_a_fast_path_that_keeps_copies_are_refused(layer):
    module = model_of(nn.Sequential(nn.Sequential(layer)))
    module.layer._sgl_gate = object()
    with pytest.raises(CannotLand, match="a fast path of Sequential keeps copies"):
        EngineModule(module, 1).land("layer.0.0")


def test_m6_a_quantized_layer_is_refused_before_any_layer_changes():
    quantized = linear.ReplicatedLinear(IN, OUT, bias=False)
    quantized.quant_method = linear.LinearMethodBase.__new__(type("Fp8LinearMethod", (linear.LinearMethodBase,), {
        "create_weights": None, "apply": None}))  # fmt: skip
    module = model_of(quantized)
    module.add_module("good", linear.ReplicatedLinear(IN, OUT, bias=False))
    module.good.weight.data.zero_()
    engine = MergeEngine(lambda: {"m": EngineModule(module, 1)}, Precision.FP32)
    pairs = [Pair(name, torch.ones(1, IN), torch.ones(OUT, 1), 1.0) for name in ("good", "layer")]
    with pytest.raises(Exception, match=r"'layer' cannot be merged: its weight is quantized \(Fp8LinearMethod\)"):
        engine.plan([ModuleUpdate("m", pairs)])
    assert not module.good.weight.any()


def test_packed_weights_are_refused():
    layer = linear.ReplicatedLinear(IN, OUT, bias=False)
    del layer.weight
    with pytest.raises(CannotLand, match="no plain weight"):
        EngineModule(model_of(layer), 1).land("layer")


def test_n2_a_renamed_output_projection_is_mapped():
    module = model_of(nn.Module(), param_names_mapping={r"^(.*)\.to_out\.0\.(.*)$": r"\1.to_out.\2"})
    module.layer.to_out = nn.Linear(IN, OUT)
    view = EngineModule(module, 1)
    assert view.land("layer.to_out.0").targets[0].weight == "layer.to_out.weight"
    assert view.land("layer.to_out.1") is None


def test_n3_renames_plain_fused_and_chained():
    """Wan's kind: the adapter's own table first, then the checkpoint's; the section comes from the unmapped name."""
    module = model_of(
        nn.Module(),
        lora_param_names_mapping={r"^blocks\.(\d+)\.attn1\.(.*)$": r"blocks.\1.\2"},
        param_names_mapping={
            r"^blocks\.(\d+)\.to_q\.(weight|lora_A)$": (r"layer.qkv.\2", 0, 3),
            r"^blocks\.(\d+)\.to_k\.(weight|lora_A)$": (r"layer.qkv.\2", 1, 3),
            r"^blocks\.(\d+)\.ffn\.net\.0\.proj\.(.*)$": r"layer.fc_in.\2",
        },
    )
    module.layer.qkv = linear.MergedReplicatedLinear(IN, [4, 4, 4], bias=False)
    module.layer.fc_in = nn.Linear(IN, OUT)
    view = EngineModule(module, 1)
    assert view.land("blocks.0.attn1.to_q").targets[0].section == 0
    assert view.land("blocks.0.attn1.to_k").targets[0].rows == Span(4, 8)
    assert view.land("blocks.0.ffn.net.0.proj").targets[0].weight == "layer.fc_in.weight"
    assert view.land("blocks.0.attn2.norm_added_q") is None


@pytest.mark.parametrize("prefix", ["lora_unet_", "lora_transformer_"])
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (zimage, ["layers.0.attention.to_q", "layers.0.attention.to_v", "layers.0.attention.to_qkv",
                  "layers.0.attention.to_out.0", "layers.0.feed_forward.w1", "layers.0.feed_forward.w3",
                  "layers.0.adaLN_modulation.0"]),
        (wan, ["blocks.0.attn1.to_q", "blocks.0.attn1.to_out.0", "blocks.11.attn2.to_out.0", "blocks.0.ffn.net.0.proj",
               "blocks.0.to_q", "blocks.11.self_attn.q", "blocks.0.cross_attn.o", "blocks.11.ffn.0", "blocks.0.ffn.2",
               "condition_embedder.text_embedder.linear_1", "proj_out"]),
        (flux, ["double_blocks.0.img_attn.qkv", "double_blocks.0.img_attn.proj", "double_blocks.0.txt_attn.proj",
                "transformer_blocks.0.attn.to_add_out", "final_layer.linear"]),
    ],
    ids=["Z-Image", "Wan", "FLUX"],
)  # fmt: skip
def test_n6_a_flattened_name_lands_where_the_tables_put_the_dotted_one(make, names, prefix):
    view = EngineModule(make(), 1)
    for name in names:
        landing = view.land(name)
        assert landing is not None, name
        assert view.land(prefix + name.replace(".", "_")) == landing
    assert view.land(f"{prefix}input_blocks_4_1_proj_in") is None


def test_a_flattened_name_of_a_layer_of_another_kind_is_refused_by_type():
    with pytest.raises(CannotLand, match="LayerNorm, not a linear layer"):
        EngineModule(zimage(), 1).land("lora_unet_layers_0_attention_norm1")


def test_a_flattened_name_that_stands_for_two_layers_is_refused_with_both():
    module = tree(WanVideoArchConfig(), blocks__0__ffn__0=nn.Linear(IN, OUT), blocks__0__ffn_0=nn.Linear(IN, OUT))
    view = EngineModule(module, 1)
    with pytest.raises(CannotLand, match=r"'blocks.0.ffn.0' and for 'blocks.0.ffn_0'"):
        view.land("lora_unet_blocks_0_ffn_0")


@pytest.mark.parametrize("name", ["final_layer.adaLN_modulation.1", "lora_unet_final_layer_adaLN_modulation_1"])
def test_the_modulation_whose_halves_stand_in_another_order_is_refused(name):
    view = EngineModule(flux(), 1)
    with pytest.raises(CannotLand, match=r"its scale and shift are swapped in 'norm_out.linear'"):
        view.land(name)
    assert view.land("norm_out.linear") is not None


def test_a_table_for_weights_only_is_used_too():
    module = model_of(nn.Linear(IN, OUT), param_names_mapping={r"^old\.weight$": "layer.weight"})
    assert EngineModule(module, 1).land("old").targets[0].weight == "layer.weight"


def test_a_section_that_a_layer_does_not_have_is_refused():
    module = model_of(nn.Linear(IN, OUT), param_names_mapping={r"^q\.weight$": ("layer.weight", 2, 3)})
    with pytest.raises(CannotLand, match="section 2 of a layer of 1 sections"):
        EngineModule(module, 1).land("q")


@pytest.mark.parametrize("tp", [1, 2])
def test_halves_are_swapped_where_sglang_swaps_them_on_loading_from_disk(tp):
    """MiniMax-H3: ff.net.0.proj [value; gate] onto mlp.fc1 [gate; value]."""
    mapping = {r"^(.*)\.ff\.net\.0\.proj\.(.*)$": r"\1.mlp.fc1.\2"}
    b = torch.arange(16.0).view(16, 1)
    value, gate = b.chunk(2)
    for rank in range(tp):
        module = model_of(nn.Module(), param_names_mapping=mapping)
        module.layer.mlp = nn.Module()
        fc1 = linear.MergedColumnParallelLinear(IN, [8, 8], bias=False, tp_group=Group(tp, rank))
        module.layer.mlp.fc1 = fc1
        fc1.weight_loader(fc1.weight, torch.cat([gate, value]).expand(16, IN))
        for target in EngineModule(module, tp).land("layer.ff.net.0.proj").targets:
            rows = torch.cat([b[span.start : span.stop] for span in target.b_rows])
            assert torch.equal(fc1.weight.data[target.rows.start : target.rows.stop, :1], rows)


class Model(BaseDiT):
    """A model class with opinions of its own."""

    param_names_mapping: dict = {}  # noqa: RUF012
    _compile_conditions: list = []  # noqa: RUF012
    _fsdp_shard_conditions: list = []  # noqa: RUF012

    def __init__(self):
        nn.Module.__init__(self)
        self.layer = nn.Linear(IN, OUT)

    def forward(self):
        raise NotImplementedError


PAIRS = [Pair("layer", torch.ones(1, IN), torch.ones(OUT, 1), 1.0)]


def test_a_model_without_objections():
    assert EngineModule(Model(), 1).objections(PAIRS) == []
    assert EngineModule(model_of(nn.Linear(1, 1)), 1).objections(PAIRS) == []


def test_a_model_is_asked_about_dotted_names():
    asked = []
    model = Model()
    object.__setattr__(model, "validate_lora_layers", asked.extend)
    EngineModule(model, 1).objections([Pair("lora_unet_layer", torch.ones(1, IN), torch.ones(OUT, 1), 1.0)])
    assert asked == ["layer"]


@pytest.mark.parametrize("method", ["validate_lora_layers", "validate_weight_update_source"])
def test_a_model_that_refuses_the_layers_is_heard(method):
    def refuse(*_, **__):
        raise ValueError("pruned at load time")

    model = Model()
    object.__setattr__(model, method, refuse)
    assert EngineModule(model, 1).objections(PAIRS) == ["pruned at load time"]


def test_a_model_that_rewrites_adapters_is_refused_where_it_would_rewrite():
    class Rewriting(Model):
        def prepare_lora_adapter(self, adapter):
            return {name: tensor * 2 if "lora_A" in name else tensor for name, tensor in adapter.items()}

    (objection,) = EngineModule(Rewriting(), 1).objections(PAIRS)
    assert "Rewriting changes 'layer.lora_A'" in objection


def test_permuted_rows_of_a_quantized_checkpoint_are_refused():
    module = model_of(nn.Linear(IN, OUT), scale_shift_swap_params=("layer.weight",), quant_config=object())
    with pytest.raises(CannotLand, match="permutes the rows"):
        EngineModule(module, 1).land("layer")
