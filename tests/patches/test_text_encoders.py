"""Text encoders of sglang: projections under the checkpoint's names land in the sections that it loads them into."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.merge.engine import MergeEngine, ModuleUpdate
from sgld_lora_merge.merge.targets import CannotLand

pytest.importorskip("sglang.multimodal_gen.runtime.layers.quantization")  # 0.5.21 cannot import linear before it
linear = pytest.importorskip("sglang.multimodal_gen.runtime.layers.linear")
from sglang.multimodal_gen.runtime.distributed import parallel_state  # noqa: E402
from sglang.multimodal_gen.runtime.server_args import ServerArgs, get_global_server_args  # noqa: E402

from server_patches.engine_module import EngineModule  # noqa: E402

# importing a model imports torch's compiler and sglang's quantization, which warn of themselves
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Only CUDA:UserWarning"),
]

WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN = 32, 4, 2, 8, 48
SIZES = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 1,
         "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD}  # fmt: skip
ROWS = {"self_attn.q_proj": HEADS * HEAD, "self_attn.k_proj": KV_HEADS * HEAD, "self_attn.v_proj": KV_HEADS * HEAD,
        "mlp.gate_proj": HIDDEN, "mlp.up_proj": HIDDEN}  # fmt: skip


@dataclass
class Group:
    """As much of a tensor-parallel group as an encoder asks for."""

    world_size: int
    rank_in_group: int


def llama(sizes):
    from sglang.multimodal_gen.configs.models.encoders.llama import LlamaArchConfig, LlamaConfig
    from sglang.multimodal_gen.runtime.models.encoders.llama import LlamaModel

    arch = LlamaArchConfig(**sizes)
    arch.rope_parameters = {"rope_theta": 10000.0, "rope_type": "default"}
    return LlamaModel(LlamaConfig(arch_config=arch))


def qwen3(sizes):
    from sglang.multimodal_gen.configs.models.encoders.qwen3 import Qwen3TextArchConfig, Qwen3TextConfig
    from sglang.multimodal_gen.runtime.models.encoders.qwen3 import Qwen3ForCausalLM

    arch = Qwen3TextArchConfig(**sizes)
    arch.rope_parameters = {"rope_theta": 10000.0, "rope_type": "default"}
    return Qwen3ForCausalLM(Qwen3TextConfig(arch_config=arch))


def gemma2(sizes):
    """Its table has the sections of gate and up as text."""
    from sglang.multimodal_gen.configs.models.encoders.gemma2 import Gemma2ArchConfig, Gemma2Config
    from sglang.multimodal_gen.runtime.models.encoders.gemma2 import Gemma2Model

    return Gemma2Model(Gemma2Config(arch_config=Gemma2ArchConfig(**sizes)))


def t5():
    from sglang.multimodal_gen.configs.models.encoders.t5 import T5ArchConfig, T5Config
    from sglang.multimodal_gen.runtime.models.encoders.t5 import UMT5EncoderModel

    arch = T5ArchConfig(vocab_size=64, d_model=WIDTH, d_kv=HEAD, d_ff=HIDDEN, num_layers=1, num_heads=HEADS)
    return UMT5EncoderModel(T5Config(arch_config=arch))


@pytest.fixture
def one_rank(monkeypatch):
    """Let encoders be built as one rank of several."""

    defaults = SimpleNamespace(**{each.name: each.default for each in fields(ServerArgs)})
    monkeypatch.setattr(sys.modules[get_global_server_args.__module__], "_global_server_args", defaults)

    def be(tp, rank):
        monkeypatch.setattr(parallel_state, "_TP", Group(tp, rank))

    return be


def random(*size, seed):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def adapter(rows):
    """Layer -> W0 and its pair."""
    return {
        layer: (
            random(count, WIDTH, seed=10 * i),
            Pair(layer, random(3, WIDTH, seed=10 * i + 1), random(count, 3, seed=10 * i + 2), 1.5),
        )
        for i, (layer, count) in enumerate(rows.items())
    }


def merged(w0, pair):
    return (w0.double() + pair.scale * (pair.b.double() @ pair.a.double())).to(w0.dtype)


def merges_as_a_checkpoint_of_merged_weights_loads(build, layers, tp, weights):
    """Zero everything, load W0 by sglang's own loader, merge, and compare all weights with those of a merged one."""
    encoder, expected = build(), build()
    for model in (encoder, expected):
        model.requires_grad_(False)
        for parameter in model.parameters():
            parameter.zero_()
    encoder.load_weights((f"{layer}.weight", w0) for layer, (w0, _) in layers.items())
    expected.load_weights((f"{layer}.weight", merged(*each)) for layer, each in layers.items())
    engine = MergeEngine(lambda: {"m": EngineModule(encoder, tp)}, Precision.FP32)
    engine.commit(engine.plan([ModuleUpdate("m", [pair for _, pair in layers.values()])]))
    differing = [name for name, w in expected.named_parameters() if not torch.equal(w, encoder.get_parameter(name))]
    assert differing == []
    assert sum(bool(w.any()) for w in encoder.parameters()) == weights


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("make", [llama, qwen3, gemma2])
def test_q_k_v_gate_and_up_land_where_sglang_loads_their_weights(make, tp, one_rank):
    """Grouped queries: with four ranks each key head is on two of them."""
    layers = adapter({f"layers.0.{name}": count for name, count in ROWS.items()})
    for rank in range(tp):
        one_rank(tp, rank)
        merges_as_a_checkpoint_of_merged_weights_loads(lambda: make(SIZES), layers, tp, weights=2)


@pytest.mark.parametrize("tp", [1, 2])
def test_t5s_q_k_and_v_land_where_sglang_loads_their_weights(tp, one_rank):
    layers = adapter({f"encoder.block.0.layer.0.SelfAttention.{name}": HEADS * HEAD for name in "qkv"})
    for rank in range(tp):
        one_rank(tp, rank)
        merges_as_a_checkpoint_of_merged_weights_loads(t5, layers, tp, weights=1)


@pytest.mark.parametrize("make", [qwen3, gemma2])
def test_names_of_transformers_models_with_a_head_land_as_sglang_loads_them(make, one_rank):
    one_rank(1, 0)
    layers = adapter({f"model.layers.0.{name}": count for name, count in ROWS.items()})
    layers |= adapter({"model.layers.0.self_attn.o_proj": WIDTH})
    merges_as_a_checkpoint_of_merged_weights_loads(lambda: make(SIZES), layers, 1, weights=3)


def test_shards_that_several_ranks_hold_are_counted_once(one_rank):
    one_rank(4, 0)
    view = EngineModule(llama(SIZES), 4)
    copies = {name: view.land(f"layers.0.{name}").targets[0].copies for name in ROWS}
    assert copies == dict(zip(ROWS, [1, 2, 2, 1, 1], strict=True))


def test_a_pair_that_does_not_fit_its_section_is_refused_with_the_sections_size(one_rank):
    one_rank(1, 0)
    engine = MergeEngine(lambda: {"m": EngineModule(llama(SIZES), 1)}, Precision.FP32)
    pair = Pair("layers.0.self_attn.k_proj", torch.ones(1, WIDTH), torch.ones(HEADS * HEAD, 1), 1.0)
    with pytest.raises(RequestError, match=rf"has {HEADS * HEAD} rows, the layer gives {KV_HEADS * HEAD} outputs"):
        engine.plan([ModuleUpdate("m", [pair])])


def test_an_unknown_projection_is_refused_by_name_with_the_nearest_ones(one_rank):
    one_rank(1, 0)
    engine = MergeEngine(lambda: {"m": EngineModule(llama(SIZES), 1)}, Precision.FP32)
    pair = Pair("layers.0.self_attn.x_proj", torch.ones(1, WIDTH), torch.ones(4, 1), 1.0)
    with pytest.raises(
        RequestError, match=r"unknown layers layers\.0\.self_attn\.x_proj; the engine's nearest are"
    ) as e:
        engine.plan([ModuleUpdate("m", [pair])])
    assert "layers.0.self_attn.qkv_proj" in str(e.value)


def test_whole_words_are_replaced_only():
    """The table's ``.q`` is T5's layer ``q``, not the first letter of another one."""
    module = nn.Module()
    module.qkv_proj = linear.MergedReplicatedLinear(WIDTH, [4, 4, 4], bias=False)
    module.config = SimpleNamespace(stacked_params_mapping=[(".qkv_proj", ".q", "q")])
    view = EngineModule(module, 1)
    assert view.land("q").targets[0].section == 0
    assert view.land("qkv_proj").out_features == 12
    assert view.land("query") is None


def test_a_section_that_the_layer_does_not_have_is_refused():
    module = nn.Module()
    module.w13 = linear.MergedReplicatedLinear(WIDTH, [4, 4], bias=False)
    module.config = SimpleNamespace(stacked_params_mapping=[("w13", "w1", "gate"), ("w13", "w3", 2)])
    for name, section in (("w1", "'gate'"), ("w3", "2")):
        with pytest.raises(CannotLand, match=f"section {section} of a layer of 2 sections"):
            EngineModule(module, 1).land(name)
