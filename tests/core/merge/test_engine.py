"""Plan, commit, settle, revert: what is live is computed from W0, or nothing has changed."""

import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.errors import ConflictError, RequestError
from sgld_lora_merge.merge import kernels
from sgld_lora_merge.merge.engine import MergeEngine, ModuleUpdate
from sgld_lora_merge.merge.module_view import LinearModule
from sgld_lora_merge.merge.spans import Span
from sgld_lora_merge.merge.targets import CannotLand, Landing, Target, whole_weight
from sgld_lora_merge.trainer.expected import merged_weight
from sgld_lora_merge.trainer.names import LayerPair

WIDTH = 6
SECTIONS = {"attn.q": 4, "attn.k": 2, "attn.v": 2}


def model(dtype=torch.float32, seed=0, layers=("x", "y", "z")):
    """Linear layers of 4 outputs and 6 inputs, and one layer of another kind."""
    generator = torch.Generator().manual_seed(seed)
    modules = nn.ModuleDict({name: nn.Linear(WIDTH, 4, bias=False, dtype=dtype) for name in layers})
    for layer in modules.values():
        layer.weight.data.normal_(0, 0.02, generator=generator)
    modules["norm"] = nn.LayerNorm(4)
    return modules


class FusedView:
    """A view over one fused weight of three sections, named as a sender names them or as a whole, and a plain one."""

    branches = None

    def __init__(self, dtype=torch.float32, seed=0, copies=1):
        generator = torch.Generator().manual_seed(seed)
        self.weights = {
            "attn.qkv.weight": torch.randn(8, WIDTH, generator=generator).mul(0.02).to(dtype),
            "out.weight": torch.randn(3, WIDTH, generator=generator).mul(0.02).to(dtype),
        }
        self.copies = copies

    def _section(self, index, b_start):
        sizes = list(SECTIONS.values())
        first = sum(sizes[:index])
        rows = Span(first, first + sizes[index])
        b_rows = Span(b_start, b_start + sizes[index])
        return Target("attn.qkv.weight", index, rows, (b_rows,), (Span(0, WIDTH),), self.copies)

    def land(self, layer):
        if layer == "out":
            return whole_weight("out.weight", 3, WIDTH)
        if layer == "attn.qkv":
            return Landing(tuple(self._section(i, start) for i, start in enumerate((0, 4, 6))), 8, WIDTH)
        if layer in SECTIONS:
            return Landing((self._section(list(SECTIONS).index(layer), 0),), SECTIONS[layer], WIDTH)
        if layer == "quantized":
            raise CannotLand("its weight is packed in 4 bits")
        return None

    def weight(self, name):
        return self.weights[name]

    def offloaded(self, names):
        return None

    def layers(self):
        return ["attn.qkv", "out"]


def pair(layer, *, seed=0, rank=2, inputs=WIDTH, outputs=4, scale=0.7071, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, inputs, generator=generator).to(dtype)
    b = torch.randn(outputs, rank, generator=generator).mul(0.05).to(dtype)
    return Pair(layer, a, b, scale)


def engine_of(precision=Precision.FP32, **modules):
    views = {name: LinearModule(m) if isinstance(m, nn.Module) else m for name, m in modules.items()}
    return MergeEngine(lambda: views, precision)


def go_live(engine, *updates, version=None):
    plan = engine.plan(updates)
    stats = engine.commit(plan)
    engine.settle(plan, version)
    return stats


def reset(engine, modules=None):
    plan = engine.plan_reset(modules)
    engine.commit(plan)
    engine.settle(plan, None)


def weights(*modules):
    """Copies of every weight of models and views."""
    copies = {}
    for index, module in enumerate(modules):
        named = module.weights if isinstance(module, FusedView) else dict(module.named_parameters())
        copies |= {(index, name): tensor.detach().clone() for name, tensor in named.items()}
    return copies


def same(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(left[key].contiguous().view(torch.uint8), right[key].contiguous().view(torch.uint8)) for key in left
    )


def merged(base, update, b_rows=None, precision=Precision.FP32):
    """W' of one target from W0 and nothing else, by the kernel that test_reference.py checks."""
    out = torch.empty_like(base)
    rows = (b_rows or Span(0, update.b.shape[0]),)
    term = kernels.Term(update.a, update.b, update.scale, rows, (Span(0, WIDTH),))
    job = kernels.MergeJob(out, base.detach(), (term,))
    kernels.merge([job], precision, kernels.scratch_for([job], precision))
    return out


def faults_of(engine, *updates):
    with pytest.raises(RequestError) as error:
        engine.plan(updates)
    return error.value.faults


# the plan


def test_a_plan_changes_nothing():
    net = model()
    engine = engine_of(transformer=net)
    go_live(engine, ModuleUpdate("transformer", [pair("x")]), version="1")
    before, live = weights(net), engine.state("transformer").live

    plan = engine.plan([ModuleUpdate("transformer", [pair("x", seed=1), pair("y")], whole=True)])

    assert same(weights(net), before)
    assert engine.state("transformer").live is live
    assert engine.state("transformer").weight_version == "1"
    assert (plan.layers, plan.skipped) == (2, [])


def test_a_failed_plan_changes_nothing_and_leaves_no_state():
    net = model()
    engine = engine_of(transformer=net)
    before = weights(net)

    faults_of(engine, ModuleUpdate("transformer", [pair("x"), pair("nope")]))

    assert same(weights(net), before)
    assert engine.states == {}


def test_faults_of_all_modules_come_in_one_error():
    engine = engine_of(transformer=model(), transformer_2=FusedView())

    faults = faults_of(
        engine,
        ModuleUpdate("transformer", [pair("x", inputs=5), pair("y", outputs=3), pair("norm")], faults=["a lone side"]),
        ModuleUpdate("transformer_2", [pair("quantized"), pair("nope")]),
        ModuleUpdate("vae", [pair("x")], faults=["another lone side"]),
    )

    for words in (
        "'x'",
        "'y'",
        "'norm'",
        "a lone side",
        "'quantized'",
        "packed in 4 bits",
        "nope",
        "vae",
        "another lone",
    ):
        assert any(words in fault for fault in faults), words
    assert [fault.split(":")[0] for fault in faults[:4]] == ["transformer"] * 4


def test_an_unknown_module_is_refused_with_the_ones_there_are():
    (fault,) = faults_of(engine_of(transformer=model(), vae=model()), ModuleUpdate("transformer_3", [pair("x")]))

    assert "no module 'transformer_3' here; there are transformer, vae" in fault


def test_layers_that_the_model_does_not_have_are_refused_with_names_of_both_sides():
    """Case N1."""
    engine = engine_of(transformer=model())

    (fault,) = faults_of(engine, ModuleUpdate("transformer", [pair("blocks.0.x"), pair("blocks.1.x")]))

    assert "blocks.0.x, blocks.1.x" in fault
    assert "x" in fault.split("engine")[1]


def test_one_unknown_layer_of_four_refuses_all_four():
    """Case N2: never three of four."""
    net = model(layers=("to_q", "to_k", "to_v", "to_out"))
    engine = engine_of(transformer=net)
    before = weights(net)

    (fault,) = faults_of(
        engine, ModuleUpdate("transformer", [pair(name) for name in ("to_q", "to_k", "to_v", "to_out.0")])
    )

    assert "to_out.0" in fault
    assert "to_out" in fault.split("engine")[1]
    assert same(weights(net), before)


def test_unknown_layers_are_left_out_and_reported_where_that_is_allowed():
    net = model()
    engine = engine_of(transformer=net)
    base = net["x"].weight.detach().clone()
    plan = engine.plan([ModuleUpdate("transformer", [pair("x"), pair("nope")], allow_partial=True)])

    engine.commit(plan)

    assert (plan.layers, plan.skipped) == (1, ["nope"])
    assert torch.equal(net["x"].weight, merged(base, pair("x")))


def test_no_known_layer_at_all_is_refused_even_where_unknown_ones_are_allowed():
    engine = engine_of(transformer=model())

    (fault,) = faults_of(engine, ModuleUpdate("transformer", [pair("no"), pair("nope")], allow_partial=True))

    assert "no, nope" in fault
    assert "x" in fault.split("engine")[1]


def test_n6_a_flattened_name_that_stands_for_nothing_is_refused_with_what_to_convert_it_with():
    engine = engine_of(transformer=model())

    unknown, advice = faults_of(engine, ModuleUpdate("transformer", [pair("lora_unet_x"), pair("lora_unet_input_0")]))

    assert "unknown layers lora_unet_input_0;" in unknown
    assert "save_lora_adapter" in advice


def test_n6_a_flattened_name_is_merged_and_counts_as_the_dotted_one():
    net = model()
    engine = engine_of(transformer=net)
    base = net["x"].weight.detach().clone()

    (fault,) = faults_of(engine, ModuleUpdate("transformer", [pair("x"), pair("lora_unet_x")]))
    go_live(engine, ModuleUpdate("transformer", [pair("lora_unet_x")]))

    assert "'lora_unet_x' and 'x' land on the same rows of 'x.weight'" in fault
    assert torch.equal(net["x"].weight, merged(base, pair("x")))


def test_more_than_ten_unknown_layers_are_ten_and_a_count():
    engine = engine_of(transformer=model())

    (fault,) = faults_of(engine, ModuleUpdate("transformer", [pair(f"blocks.{i}") for i in range(13)]))

    assert "blocks.9" in fault
    assert "and 3 more" in fault


def test_faults_found_before_are_reported_with_those_of_the_plan():
    engine = engine_of(transformer=model())

    faults = faults_of(engine, ModuleUpdate("transformer", [pair("nope")], faults=["'y' has lora_A but no lora_B"]))

    assert len(faults) == 2
    assert faults[0] == "transformer: 'y' has lora_A but no lora_B"


def test_a_pair_that_does_not_fit_its_layer_is_refused_with_both_shapes():
    engine = engine_of(transformer=model())

    columns, rows = faults_of(engine, ModuleUpdate("transformer", [pair("x", inputs=5, outputs=7)]))

    assert "'x': lora_A (2, 5) has 5 columns, the layer takes 6 inputs" in columns
    assert "'x': lora_B (7, 2) has 7 rows, the layer gives 4 outputs" in rows


def test_a_weight_that_is_not_of_a_float_dtype_is_refused_by_name():
    """Case M6."""
    net = model()
    net["y"].weight = nn.Parameter(torch.zeros(4, WIDTH, dtype=torch.int8), requires_grad=False)
    engine = engine_of(transformer=net)
    before = weights(net)

    (fault,) = faults_of(engine, ModuleUpdate("transformer", [pair("x"), pair("y")]))

    assert "'y' cannot be merged: its weight 'y.weight' has dtype torch.int8" in fault
    assert same(weights(net), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn], ids=str)
def test_other_float_dtypes_are_refused_too(dtype):
    net = model()
    net["x"].weight = nn.Parameter(torch.zeros(4, WIDTH).to(dtype), requires_grad=False)

    (fault,) = faults_of(engine_of(transformer=net), ModuleUpdate("transformer", [pair("x")]))

    assert str(dtype) in fault


def test_two_pairs_for_the_same_rows_are_refused():
    (fault,) = faults_of(engine_of(transformer=model()), ModuleUpdate("transformer", [pair("x"), pair("x", seed=1)]))

    assert "land on the same rows of 'x.weight'" in fault


def test_a_section_and_the_whole_of_a_fused_weight_are_refused_together():
    engine = engine_of(transformer=FusedView())

    (fault,) = faults_of(engine, ModuleUpdate("transformer", [pair("attn.qkv", outputs=8), pair("attn.k", outputs=2)]))

    assert "'attn.k' and 'attn.qkv' land on the same rows of 'attn.qkv.weight'" in fault


def test_two_updates_of_one_module_in_one_plan_are_refused():
    """Only one of them would become the state."""
    updates = [ModuleUpdate("transformer", [pair("x")]), ModuleUpdate("transformer", [pair("y")])]

    (fault,) = faults_of(engine_of(transformer=model()), *updates)

    assert "transformer" in fault


def tied(first="x", second="y"):
    net = model()
    net[second].weight = net[first].weight
    return net


def test_two_pairs_on_tied_weights_are_refused():
    (fault,) = faults_of(engine_of(transformer=tied()), ModuleUpdate("transformer", [pair("y"), pair("x")]))

    assert "same memory" in fault
    assert "'x.weight'" in fault
    assert "'y.weight'" in fault


def test_rows_that_overlap_in_memory_are_refused():
    view = FusedView()
    view.weights["out.weight"] = view.weights["attn.qkv.weight"][3:6]  # the end of q, and k

    (fault,) = faults_of(
        engine_of(transformer=view), ModuleUpdate("transformer", [pair("out", outputs=3), pair("attn.q")])
    )

    assert all(word in fault for word in ("'attn.q'", "'out'", "same memory"))


def test_neighbours_in_one_buffer_are_not_tied():
    """Wan's q, k and v are views of one buffer."""
    view = FusedView()
    buffer = torch.zeros(11, WIDTH)
    view.weights = {"attn.qkv.weight": buffer[:8], "out.weight": buffer[8:]}
    engine = engine_of(transformer=view)

    go_live(engine, ModuleUpdate("transformer", [pair("out", outputs=3), pair("attn.qkv", outputs=8)]))

    assert torch.equal(view.weights["out.weight"], merged(torch.zeros(3, WIDTH), pair("out", outputs=3)))


def test_column_shards_of_one_buffer_are_not_tied():
    view = FusedView()
    buffer = torch.zeros(8, 2 * WIDTH)
    view.weights = {"attn.qkv.weight": buffer[:, :WIDTH], "out.weight": buffer[:3, WIDTH:]}

    plan = engine_of(transformer=view).plan(
        [ModuleUpdate("transformer", [pair("out", outputs=3), pair("attn.qkv", outputs=8)])]
    )

    assert plan.layers == 2


@pytest.mark.parametrize("whole", [False, True])
def test_tied_weights_named_by_two_updates_are_refused_or_still_have_their_base(whole):
    """The second name's W0 must not be read from a weight into which the first name is merged."""
    net = tied()
    base = net["x"].weight.detach().clone()
    engine = engine_of(transformer=net)
    go_live(engine, ModuleUpdate("transformer", [pair("x")]))

    try:
        go_live(engine, ModuleUpdate("transformer", [pair("y", seed=1)], whole=whole))
    except RequestError as error:
        assert "same memory" in str(error)  # noqa: PT017
    reset(engine)

    assert torch.equal(net["x"].weight, base)


def test_weights_tied_across_two_modules_are_refused():
    one, two = model(), model(seed=1)
    two["y"].weight = one["x"].weight
    engine = engine_of(transformer=one, transformer_2=two)

    (fault,) = faults_of(engine, ModuleUpdate("transformer", [pair("x")]), ModuleUpdate("transformer_2", [pair("y")]))

    assert "same memory" in fault


# the commit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_update_is_w0_plus_the_scaled_product(dtype):
    net = model(dtype)
    bases = {name: net[name].weight.detach().clone() for name in "xyz"}

    go_live(engine_of(transformer=net), ModuleUpdate("transformer", [pair("x"), pair("z", seed=3, scale=-3.25)]))

    assert torch.equal(net["x"].weight, merged(bases["x"], pair("x")))
    assert torch.equal(net["z"].weight, merged(bases["z"], pair("z", seed=3, scale=-3.25)))
    assert torch.equal(net["y"].weight, bases["y"])


@pytest.mark.parametrize("scale", [1.5, 0.7071])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fp16_mode_gives_the_trainers_eager_bytes(dtype, scale):
    """Case M3."""
    net = model(dtype)
    base = net["x"].weight.detach().clone()
    update = pair("x", scale=scale)

    go_live(engine_of(Precision.FP16, transformer=net), ModuleUpdate("transformer", [update]))

    assert torch.equal(net["x"].weight, base + ((update.b.to(dtype) @ update.a.to(dtype)) * scale).to(dtype))


def test_several_modules_go_live_together():
    one, two = model(), FusedView()
    engine = engine_of(transformer=one, transformer_2=two)
    base = weights(one, two)

    stats = go_live(
        engine, ModuleUpdate("transformer", [pair("x")]), ModuleUpdate("transformer_2", [pair("out", outputs=3)])
    )

    assert torch.equal(one["x"].weight, merged(base[0, "x.weight"], pair("x")))
    assert torch.equal(two.weights["out.weight"], merged(base[1, "out.weight"], pair("out", outputs=3)))
    assert stats.keys() == {"transformer", "transformer_2"}
    assert all(module.update_sq > 0 and module.non_finite == 0 for module in stats.values())


def test_sections_of_a_fused_weight_are_merged_each_with_its_own_scale():
    view = FusedView()
    base = view.weights["attn.qkv.weight"].clone()
    updates = [pair(name, seed=i, outputs=size, scale=i + 0.5) for i, (name, size) in enumerate(SECTIONS.items())]

    go_live(engine_of(transformer=view), ModuleUpdate("transformer", updates))

    expected = [merged(part, update) for part, update in zip(base.split([4, 2, 2]), updates, strict=True)]
    assert torch.equal(view.weights["attn.qkv.weight"], torch.cat(expected))


def test_a_pair_of_the_whole_fused_weight_is_one_layer():
    view = FusedView()
    base = view.weights["attn.qkv.weight"].clone()
    engine = engine_of(transformer=view)

    plan = engine.plan([ModuleUpdate("transformer", [pair("attn.qkv", outputs=8)])])
    engine.commit(plan)
    engine.settle(plan, "1")

    parts = [merged(base[span.start : span.stop], pair("attn.qkv", outputs=8), span) for _, span, _ in ROWS["attn.qkv"]]
    assert torch.equal(view.weights["attn.qkv.weight"], torch.cat(parts))
    assert plan.layers == 1
    assert len(engine.state("transformer").pairs) == 1


def test_parameters_keep_their_storage_through_updates_and_resets():
    """Case M4."""
    net = model()
    engine = engine_of(transformer=net)
    addresses = {name: p.data_ptr() for name, p in net.named_parameters()}

    for seed in range(3):
        go_live(engine, ModuleUpdate("transformer", [pair("x", seed=seed)]))
    reset(engine)

    assert {name: p.data_ptr() for name, p in net.named_parameters()} == addresses


def test_a_module_made_under_inference_mode_is_updated_and_reset():
    """Case M5."""
    with torch.inference_mode():
        net = model(torch.bfloat16)
    engine, base = engine_of(transformer=net), weights(net)

    go_live(engine, ModuleUpdate("transformer", [pair("x")]))
    assert torch.equal(net["x"].weight, merged(base[0, "x.weight"], pair("x")))
    reset(engine)

    assert same(weights(net), base)


def test_shards_of_zero_rows_are_legal():
    view = FusedView()
    view.weights["out.weight"] = torch.empty(0, WIDTH)
    nothing = Span(0, 0)
    view.land = lambda layer: Landing((Target("out.weight", 0, nothing, (nothing,), (Span(0, WIDTH),)),), 3, WIDTH)
    engine = engine_of(transformer=view)

    stats = go_live(engine, ModuleUpdate("transformer", [pair("out", outputs=3)]))
    reset(engine)

    assert stats["transformer"] == kernels.MergeStats()
    assert engine.state("transformer").live == {}


def test_copies_of_a_shard_share_its_statistics():
    """Several ranks hold it; what is summed over them counts once. An overflow on any of them counts fully."""
    update = pair("attn.q")
    update.b[0, 0] = 1e30
    update.a[0, 0] = 1e30
    one = go_live(engine_of(transformer=FusedView(copies=1)), ModuleUpdate("transformer", [pair("attn.q")]))
    four = go_live(engine_of(transformer=FusedView(copies=4)), ModuleUpdate("transformer", [pair("attn.q")]))
    overflow = go_live(engine_of(transformer=FusedView(copies=4)), ModuleUpdate("transformer", [update]))

    assert four["transformer"].update_sq == one["transformer"].update_sq / 4
    assert four["transformer"].lost_sq == one["transformer"].lost_sq / 4
    assert overflow["transformer"].non_finite == 1


def test_the_modules_are_looked_up_again_for_every_plan():
    """An engine may replace a module; the view of an earlier plan would write into the old one."""
    views = {"transformer": LinearModule(model(seed=0))}
    engine = MergeEngine(lambda: views, Precision.FP32)
    engine.plan([ModuleUpdate("transformer", [pair("x")])])
    replaced = model(seed=1)
    base = replaced["x"].weight.detach().clone()
    views["transformer"] = LinearModule(replaced)

    go_live(engine, ModuleUpdate("transformer", [pair("x")]))

    assert torch.equal(replaced["x"].weight, merged(base, pair("x")))


# what an update does to layers that it does not name


def test_without_whole_a_layer_that_is_not_named_keeps_what_it_has():
    net = model()
    engine, base = engine_of(transformer=net), weights(net)
    go_live(engine, ModuleUpdate("transformer", [pair("x"), pair("y")]))

    go_live(engine, ModuleUpdate("transformer", [pair("x", seed=1)]))

    assert torch.equal(net["x"].weight, merged(base[0, "x.weight"], pair("x", seed=1)))
    assert torch.equal(net["y"].weight, merged(base[0, "y.weight"], pair("y")))


def test_with_whole_a_layer_that_is_not_named_goes_back_to_its_base():
    net = model()
    engine, base = engine_of(transformer=net), weights(net)
    go_live(engine, ModuleUpdate("transformer", [pair("x"), pair("y")]))

    go_live(engine, ModuleUpdate("transformer", [pair("x", seed=1)], whole=True))

    assert torch.equal(net["x"].weight, merged(base[0, "x.weight"], pair("x", seed=1)))
    assert torch.equal(net["y"].weight, base[0, "y.weight"])
    assert [live.layer for live in engine.state("transformer").pairs] == ["x"]


@pytest.mark.parametrize("whole", [False, True])
def test_a_section_that_is_not_named_keeps_what_it_has_or_goes_back(whole):
    """Case F3: only q and v of a fused qkv."""
    view = FusedView()
    engine = engine_of(transformer=view)
    q, k, v = view.weights["attn.qkv.weight"].clone().split([4, 2, 2])
    first = [pair(name, outputs=size) for name, size in SECTIONS.items()]
    go_live(engine, ModuleUpdate("transformer", first))

    second = [pair("attn.q", seed=1), pair("attn.v", seed=1, outputs=2)]
    go_live(engine, ModuleUpdate("transformer", second, whole=whole))

    expected_k = k if whole else merged(k, first[1])
    assert torch.equal(
        view.weights["attn.qkv.weight"], torch.cat([merged(q, second[0]), expected_k, merged(v, second[1])])
    )


def test_modules_that_no_update_names_are_untouched_even_with_whole():
    one, two = model(), model(seed=1)
    engine = engine_of(transformer=one, transformer_2=two)
    go_live(engine, ModuleUpdate("transformer", [pair("x")]), ModuleUpdate("transformer_2", [pair("x")]))
    before = weights(two)

    go_live(engine, ModuleUpdate("transformer", [pair("y")], whole=True))

    assert same(weights(two), before)
    assert [live.layer for live in engine.state("transformer_2").pairs] == ["x"]


# always from W0


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
def test_a_thousand_updates_leave_no_drift(precision):
    """Case M1: a fresh B each, bf16, back to the first pair."""
    net = model(torch.bfloat16)
    engine = engine_of(precision, transformer=net)
    first = pair("x", dtype=torch.bfloat16)
    go_live(engine, ModuleUpdate("transformer", [first]))
    expected = weights(net)

    for seed in range(1, 1000):
        go_live(engine, ModuleUpdate("transformer", [pair("x", seed=seed, dtype=torch.bfloat16)]))
    assert not same(weights(net), expected)
    go_live(engine, ModuleUpdate("transformer", [first]))

    assert same(weights(net), expected)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
def test_the_same_update_twice_is_merged_once(precision):
    """Case M2."""
    net = model(torch.bfloat16)
    engine = engine_of(precision, transformer=net)
    go_live(engine, ModuleUpdate("transformer", [pair("x")]))
    expected = weights(net)

    go_live(engine, ModuleUpdate("transformer", [pair("x")]))

    assert same(weights(net), expected)


def test_a_layer_that_becomes_a_target_later_has_its_base_too():
    net = model()
    engine, base = engine_of(transformer=net), weights(net)
    go_live(engine, ModuleUpdate("transformer", [pair("x")]))
    go_live(engine, ModuleUpdate("transformer", [pair("y")]))

    reset(engine)

    assert same(weights(net), base)


# back


@pytest.mark.parametrize("whole", [False, True])
def test_a_revert_brings_back_what_was_live(whole):
    net, view = model(torch.bfloat16), FusedView(torch.bfloat16)
    engine = engine_of(transformer=net, transformer_2=view)
    sections = [pair(name, outputs=size) for name, size in SECTIONS.items()]
    go_live(engine, ModuleUpdate("transformer", [pair("x"), pair("y")]), ModuleUpdate("transformer_2", sections))
    before, live = weights(net, view), dict(engine.state("transformer").live)
    plan = engine.plan(
        [
            ModuleUpdate("transformer", [pair("x", seed=1), pair("z", seed=1)], whole=whole),
            ModuleUpdate("transformer_2", [pair("attn.qkv", seed=1, outputs=8), pair("out", outputs=3)], whole=whole),
        ]
    )
    engine.commit(plan)
    assert not same(weights(net, view), before)

    engine.revert(plan)

    assert same(weights(net, view), before)
    assert engine.state("transformer").live == live


def test_a_revert_of_the_first_update_brings_the_base_back():
    net = model()
    engine, base = engine_of(transformer=net), weights(net)
    plan = engine.plan([ModuleUpdate("transformer", [pair("x")])])
    engine.commit(plan)

    engine.revert(plan)

    assert same(weights(net), base)
    assert engine.states == {}


def test_an_update_after_a_revert_starts_from_the_base():
    net = model()
    engine, base = engine_of(transformer=net), weights(net)
    plan = engine.plan([ModuleUpdate("transformer", [pair("x", seed=1)])])
    engine.commit(plan)
    engine.revert(plan)

    go_live(engine, ModuleUpdate("transformer", [pair("x")]))

    assert torch.equal(net["x"].weight, merged(base[0, "x.weight"], pair("x")))


@pytest.mark.parametrize("jobs_before_the_failure", [0, 1, 2])
def test_a_commit_that_stops_half_way_can_be_reverted(monkeypatch, jobs_before_the_failure):
    net, other = model(), model(seed=1)
    engine = engine_of(transformer=net, transformer_2=other)
    go_live(engine, ModuleUpdate("transformer", [pair("x"), pair("y")]))
    before = weights(net, other)
    plan = engine.plan(
        [
            ModuleUpdate("transformer", [pair(name, seed=1) for name in "xyz"], whole=True),
            ModuleUpdate("transformer_2", [pair("x")]),
        ]
    )

    def merge_some(jobs, precision, scratch):
        real_begin(jobs[:jobs_before_the_failure], precision, scratch)()
        raise RuntimeError("the device is gone")

    real_begin = kernels.begin
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "begin", merge_some)
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.commit(plan)

    engine.revert(plan)

    assert same(weights(net, other), before)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
def test_an_overflow_is_counted_and_can_be_reverted(precision):
    """fp16 overflows from finite inputs."""
    net = model(torch.float16)
    engine = engine_of(precision, transformer=net)
    go_live(engine, ModuleUpdate("transformer", [pair("x"), pair("y")]))
    before = weights(net)
    huge = pair("y")
    huge.a.fill_(300.0)
    huge.b.fill_(300.0)
    plan = engine.plan([ModuleUpdate("transformer", [pair("x", seed=1), huge])])

    stats = engine.commit(plan)
    engine.revert(plan)

    assert stats["transformer"].non_finite == 4 * WIDTH
    assert same(weights(net), before)


def test_a_reset_is_the_base_bit_for_bit():
    net, view = model(torch.bfloat16), FusedView(torch.float16)
    engine, base = engine_of(transformer=net, transformer_2=view), weights(net, view)
    go_live(engine, ModuleUpdate("transformer", [pair("x")]), ModuleUpdate("transformer_2", [pair("out", outputs=3)]))
    go_live(engine, ModuleUpdate("transformer", [pair("x", seed=1), pair("z")], whole=True))

    reset(engine)

    assert same(weights(net, view), base)
    assert engine.state("transformer").live == {}
    assert engine.state("transformer").weight_version is None


def test_a_reset_may_name_modules():
    one, two = model(), model(seed=1)
    engine, base = engine_of(transformer=one, transformer_2=two), weights(one, two)
    go_live(engine, ModuleUpdate("transformer", [pair("x")]), ModuleUpdate("transformer_2", [pair("x")]))
    merged_two = weights(two)

    reset(engine, ["transformer", "transformer"])

    assert torch.equal(one["x"].weight, base[0, "x.weight"])
    assert same(weights(two), merged_two)


def test_a_reset_of_a_module_that_was_never_updated_does_nothing():
    net = model()
    engine, base = engine_of(transformer=net), weights(net)

    reset(engine, ["transformer"])

    assert same(weights(net), base)


def test_a_reset_of_an_unknown_module_is_refused_with_the_ones_there_are():
    with pytest.raises(RequestError, match="no module vae here; there are transformer"):
        engine_of(transformer=model()).plan_reset(["transformer", "vae"])


def test_a_reset_can_be_reverted():
    net = model()
    engine = engine_of(transformer=net)
    go_live(engine, ModuleUpdate("transformer", [pair("x")]))
    before = weights(net)
    plan = engine.plan_reset()
    engine.commit(plan)

    engine.revert(plan)

    assert same(weights(net), before)


# one step back


def rollback(engine):
    plan = engine.plan_rollback()
    stats = engine.commit(plan)
    engine.settle_rollback(plan, {name: module.rounding_loss for name, module in stats.items()})


def test_a_rollback_is_the_version_before_scales_and_version_included():
    net = model(torch.bfloat16)
    engine = engine_of(transformer=net)
    go_live(engine, ModuleUpdate("transformer", [pair("x", scale=4.0), pair("y")]), version="6")
    before = weights(net)
    go_live(engine, ModuleUpdate("transformer", [pair("x", seed=1, scale=0.5), pair("z")], whole=True), version="7")

    rollback(engine)

    assert same(weights(net), before)
    assert engine.state("transformer").weight_version == "6"
    assert {p.layer: p.scale for p in engine.state("transformer").pairs} == {"x": 4.0, "y": 0.7071}


def test_a_rollback_of_the_first_update_is_the_base():
    net = model()
    engine, base = engine_of(transformer=net), weights(net)
    go_live(engine, ModuleUpdate("transformer", [pair("x")]))

    rollback(engine)

    assert same(weights(net), base)
    assert engine.state("transformer").live == {}
    assert engine.state("transformer").weight_version is None


def test_a_rollback_after_a_reset_brings_the_adapter_back():
    net = model()
    engine = engine_of(transformer=net)
    go_live(engine, ModuleUpdate("transformer", [pair("x")]), version="6")
    before = weights(net)
    reset(engine)

    rollback(engine)

    assert same(weights(net), before)
    assert engine.state("transformer").weight_version == "6"


def test_a_second_rollback_is_a_conflict():
    """Exactly one step is kept."""
    engine = engine_of(transformer=model())
    go_live(engine, ModuleUpdate("transformer", [pair("x")]))
    go_live(engine, ModuleUpdate("transformer", [pair("x", seed=1)]))
    rollback(engine)

    with pytest.raises(ConflictError, match="nothing to roll back"):
        engine.plan_rollback()


def test_without_an_update_there_is_nothing_to_roll_back():
    with pytest.raises(ConflictError, match="nothing to roll back"):
        engine_of(transformer=model()).plan_rollback()


def test_after_a_full_weight_update_there_is_nothing_to_roll_back():
    engine = engine_of(transformer=model())
    go_live(engine, ModuleUpdate("transformer", [pair("x")]))
    engine.restore("transformer")
    engine.forget("transformer", "2")

    with pytest.raises(ConflictError, match="nothing to roll back"):
        engine.plan_rollback()


def test_a_rollback_takes_one_request_back_in_all_its_modules_and_in_no_others():
    one, two, three = model(), model(seed=1), model(seed=2)
    engine = engine_of(transformer=one, transformer_2=two, text_encoder=three)
    go_live(engine, ModuleUpdate("text_encoder", [pair("x")]), version="5")
    base, merged_three = weights(one, two), weights(three)
    go_live(engine, ModuleUpdate("transformer", [pair("x")]), ModuleUpdate("transformer_2", [pair("y")]), version="6")

    rollback(engine)

    assert same(weights(one, two), base)
    assert same(weights(three), merged_three)
    assert engine.state("text_encoder").weight_version == "5"


def test_an_update_after_a_rollback_can_be_rolled_back_too():
    net = model()
    engine = engine_of(transformer=net)
    go_live(engine, ModuleUpdate("transformer", [pair("x")]), version="6")
    before = weights(net)
    go_live(engine, ModuleUpdate("transformer", [pair("x", seed=1)]), version="7")
    rollback(engine)
    go_live(engine, ModuleUpdate("transformer", [pair("x", seed=2)]), version="8")

    rollback(engine)

    assert same(weights(net), before)
    assert engine.state("transformer").weight_version == "6"


def test_a_rollback_can_be_reverted():
    net = model()
    engine = engine_of(transformer=net)
    go_live(engine, ModuleUpdate("transformer", [pair("x")]))
    go_live(engine, ModuleUpdate("transformer", [pair("y")], whole=True))
    before = weights(net)
    plan = engine.plan_rollback()
    engine.commit(plan)

    engine.revert(plan)

    assert same(weights(net), before)
    assert [p.layer for p in engine.state("transformer").pairs] == ["y"]


# the state


def test_settle_records_what_is_live_and_what_was_before():
    engine = engine_of(transformer=model())
    go_live(engine, ModuleUpdate("transformer", [pair("x")]), version="6")
    first = engine.state("transformer").live
    plan = engine.plan([ModuleUpdate("transformer", [pair("x", seed=1)])])
    engine.commit(plan)

    engine.settle(plan, "7", {"transformer": 0.25})

    state = engine.state("transformer")
    assert (state.weight_version, state.previous_versions.version, state.rounding_loss) == ("7", "6", 0.25)
    assert state.previous == first
    assert torch.equal(state.pairs[0].a, pair("x", seed=1).a)
    assert state.pairs[0].scale == 0.7071


def test_the_first_update_has_the_base_before_it():
    engine = engine_of(transformer=model())

    go_live(engine, ModuleUpdate("transformer", [pair("x")]), version="1")

    state = engine.state("transformer")
    assert (state.previous, state.previous_versions.version, state.rounding_loss) == ({}, None, None)


def layers_by_version(engine):
    return dict(engine.state("transformer").versions.counts)


def test_each_layer_has_the_version_of_the_request_that_wrote_it_last():
    engine = engine_of(transformer=model())
    go_live(engine, ModuleUpdate("transformer", [pair("x"), pair("y")]), version="1")
    assert (engine.state("transformer").weight_version, layers_by_version(engine)) == ("1", {"1": 2})

    go_live(engine, ModuleUpdate("transformer", [pair("y", seed=1)]), version="2")

    state = engine.state("transformer")
    assert (state.weight_version, state.versions.is_mixed) == (None, True)
    assert state.versions.named_counts == {"1": 1, "2": 1}
    go_live(engine, ModuleUpdate("transformer", [pair("x", seed=1)]), version="2")
    assert (engine.state("transformer").weight_version, layers_by_version(engine)) == ("2", {"2": 2})


def test_requests_of_one_version_are_one_step_back():
    engine = engine_of(transformer=model())
    go_live(engine, ModuleUpdate("transformer", [pair("x"), pair("y")]), version="1")
    for layer in ("x", "y"):
        go_live(engine, ModuleUpdate("transformer", [pair(layer, seed=1)]), version="2")
    plan = engine.plan_rollback()
    engine.settle_rollback(plan, {})
    assert (engine.state("transformer").weight_version, layers_by_version(engine)) == ("1", {"1": 2})
    assert torch.equal(engine.state("transformer").pairs[0].a, pair("x").a)
    with pytest.raises(ConflictError, match="nothing to roll back"):
        engine.plan_rollback()


@pytest.mark.parametrize("between", ["reset", "another version", "whole update", "no version"])
def test_another_step_in_between_ends_a_step(between):
    engine = engine_of(transformer=model())
    go_live(engine, ModuleUpdate("transformer", [pair("x")]), version="2")
    if between == "reset":
        engine.settle(engine.plan_reset(), None)
    else:
        version = {"another version": "3", "no version": None}.get(between, "2")
        go_live(engine, ModuleUpdate("transformer", [pair("y")], whole=between == "whole update"), version=version)
    before = engine.state("transformer").live
    go_live(engine, ModuleUpdate("transformer", [pair("x", seed=1)]), version="2")
    assert engine.state("transformer").previous is before


def test_two_requests_without_a_version_are_two_steps():
    engine = engine_of(transformer=model())
    go_live(engine, ModuleUpdate("transformer", [pair("x")]))
    first = engine.state("transformer").live
    go_live(engine, ModuleUpdate("transformer", [pair("y")]))
    assert engine.state("transformer").previous is first
    assert engine.state("transformer").versions.named_counts == {}


def test_a_step_goes_over_all_modules_that_its_requests_name():
    engine = engine_of(transformer=model(), other=model())
    for module in ("transformer", "other", "transformer"):
        go_live(engine, ModuleUpdate(module, [pair("x", seed=3)]), version="2")
    plan = engine.plan_rollback()
    assert {part.module for part in plan.modules} == {"transformer", "other"}


def test_layers_that_a_whole_update_does_not_name_are_no_mixture():
    engine = engine_of(transformer=model())
    go_live(engine, ModuleUpdate("transformer", [pair("x"), pair("y")]), version="1")
    go_live(engine, ModuleUpdate("transformer", [pair("x")], whole=True), version="2")
    assert (engine.state("transformer").weight_version, layers_by_version(engine)) == ("2", {"2": 1})


def test_two_adapters_of_different_versions_are_a_mixture():
    engine = engine_of(transformer=model())
    go_live(engine, ModuleUpdate("transformer", [pair("x")]), version="1")
    go_live(engine, ModuleUpdate("transformer", [pair("x", seed=1)], adapter="style"))
    assert engine.state("transformer").versions.named_counts == {"1": 1, "unnamed": 1}
    plan = engine.plan_reset(adapter="style")
    engine.settle(plan, None)
    assert engine.state("transformer").weight_version == "1"


def test_a_module_without_updates_has_an_empty_state():
    engine = engine_of(transformer=model())

    state = engine.state("transformer")

    assert (state.live, state.previous, state.weight_version, state.pairs) == ({}, None, None, [])
    assert engine.states == {}


def test_the_store_holds_w0_of_target_layers_and_of_no_others():
    """Once, however often they are updated."""
    net, view = model(torch.bfloat16), FusedView(torch.float32)
    engine = engine_of(transformer=net, transformer_2=view)

    for seed in range(3):
        go_live(
            engine,
            ModuleUpdate("transformer", [pair("x", seed=seed)]),
            ModuleUpdate("transformer_2", [pair("attn.k", seed=seed, outputs=2)]),
        )

    assert engine.state("transformer").store.nbytes == 4 * WIDTH * 2
    assert engine.state("transformer_2").store.nbytes == 2 * WIDTH * 4
    assert engine.state("transformer").store.kind == "host"


def test_a_failed_or_reverted_update_keeps_no_w0():
    engine = engine_of(transformer=model())
    go_live(engine, ModuleUpdate("transformer", [pair("x")]))
    plan = engine.plan([ModuleUpdate("transformer", [pair("y")])])
    engine.commit(plan)
    engine.revert(plan)

    assert engine.state("transformer").store.nbytes == 4 * WIDTH * 4


def test_nothing_of_the_senders_is_kept():
    """Case I5, in the engine: its tensors are overwritten after the plan, and after the update is live."""
    net = model()
    engine, base = engine_of(transformer=net), weights(net)
    sent = pair("x")
    plan = engine.plan([ModuleUpdate("transformer", [sent])])
    sent.a.fill_(math.nan)
    sent.b.fill_(math.nan)

    engine.commit(plan)
    engine.settle(plan, "1")

    assert torch.equal(net["x"].weight, merged(base[0, "x.weight"], pair("x")))
    (live,) = engine.state("transformer").pairs
    assert torch.equal(live.a, pair("x").a)
    assert torch.equal(live.b, pair("x").b)


def test_own_copies_do_not_hold_on_to_a_larger_buffer():
    bucket = torch.randn(1000)
    sent = Pair("x", bucket[: 2 * WIDTH].view(2, WIDTH), bucket[100:108].view(4, 2), 1.0)
    engine = engine_of(transformer=model())

    go_live(engine, ModuleUpdate("transformer", [sent]))

    (live,) = engine.state("transformer").pairs
    assert live.a.untyped_storage().nbytes() == live.a.nbytes
    assert live.b.untyped_storage().nbytes() == live.b.nbytes


class ShardView:
    """One of two ranks' part of a fused layer of two sections, whose columns come in two segments."""

    branches = None

    def __init__(self, whole, rank):
        self.rows = [(Span(0 + 2 * rank, 2 + 2 * rank),), (Span(4 + rank, 5 + rank),)]
        self.cols = (Span(rank, 1 + rank), Span(2 + 2 * rank, 4 + 2 * rank))
        rows = torch.cat([whole[span.start : span.stop] for (span,) in self.rows])
        self.live = torch.cat([rows[:, span.start : span.stop] for span in self.cols], dim=1)

    def land(self, layer):
        parts = zip((Span(0, 2), Span(2, 3)), self.rows, strict=True)
        targets = [Target("w", i, rows, b_rows, self.cols) for i, (rows, b_rows) in enumerate(parts)]
        return Landing(tuple(targets), 6, WIDTH)

    def weight(self, name):
        return self.live

    def layers(self):
        return ["x"]

    def offloaded(self, names):
        return None

    def of(self, whole):
        """This rank's part of a whole weight."""
        return ShardView(whole, self.rows[0][0].start // 2).live


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("precision", Precision)
def test_a_rank_keeps_only_what_it_takes_of_a_pair_and_merges_the_same_bytes(precision, rank):
    """In FP16 mode all of it: the product is that of the whole layer."""
    whole = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()
    view = ShardView(whole, rank)
    engine, updates = engine_of(precision, m=view), [pair("x", outputs=6, seed=seed) for seed in (1, 2)]
    expected = [view.of(merged(whole, update, precision=precision)) for update in updates]

    for update, weight in zip(updates, expected, strict=True):
        go_live(engine, ModuleUpdate("m", [update]))
        assert torch.equal(view.live, weight)

    (kept,) = engine.state("m").pairs
    fp16 = precision is Precision.FP16
    assert (kept.a.shape, kept.b.shape) == (((2, 6), (6, 2)) if fp16 else ((2, 3), (3, 2)))
    assert kept.a.untyped_storage().nbytes() == kept.a.nbytes
    rollback(engine)
    assert torch.equal(view.live, expected[0])
    reset(engine)
    assert torch.equal(view.live, view.of(whole))


def test_after_many_updates_the_engine_holds_two_sets_of_pairs(monkeypatch):
    """And nobody collects garbage for it: that is 0.85 s of a 0.86 s update."""
    monkeypatch.setattr(gc, "collect", lambda *args: pytest.fail("gc.collect was called"))
    engine = engine_of(transformer=model())
    held = []
    gc.disable()
    try:
        for seed in range(50):
            go_live(engine, ModuleUpdate("transformer", [pair(name, seed=seed) for name in "xyz"]))
            held.extend(weakref.ref(tensor) for p in engine.state("transformer").pairs for tensor in (p.a, p.b))
        alive = [index for index, reference in enumerate(held) if reference() is not None]
    finally:
        gc.enable()

    assert alive == list(range(48 * 6, 50 * 6))


def test_what_is_kept_from_an_earlier_update_is_not_copied_again():
    engine = engine_of(transformer=model())
    go_live(engine, ModuleUpdate("transformer", [pair("x"), pair("y")]))
    kept = next(p for p in engine.state("transformer").pairs if p.layer == "y")

    go_live(engine, ModuleUpdate("transformer", [pair("x", seed=1)]))

    assert kept in engine.state("transformer").pairs


# the base changes


def test_restore_writes_w0_into_every_live_target():
    net, view = model(torch.bfloat16), FusedView()
    engine, base = engine_of(transformer=net, transformer_2=view), weights(net, view)
    go_live(engine, ModuleUpdate("transformer", [pair("x")]), ModuleUpdate("transformer_2", [pair("attn.q")]))

    engine.restore("transformer")
    engine.restore("transformer_2")

    assert same(weights(net, view), base)


def test_restore_of_a_module_that_was_never_updated_does_nothing():
    net = model()
    engine, base = engine_of(transformer=net), weights(net)

    engine.restore("transformer")

    assert same(weights(net), base)


def test_after_a_full_weight_update_the_new_base_is_the_base():
    """Case M7."""
    net = model()
    engine = engine_of(transformer=net)
    go_live(engine, ModuleUpdate("transformer", [pair("x")]), version="1")
    engine.restore("transformer")
    net.load_state_dict(model(seed=9).state_dict())
    engine.forget("transformer", "2")

    assert engine.state("transformer").weight_version == "2"
    assert engine.state("transformer").store.nbytes == 0
    go_live(engine, ModuleUpdate("transformer", [pair("x")]), version="3")
    assert torch.equal(net["x"].weight, merged(model(seed=9)["x"].weight, pair("x")))
    reset(engine)
    assert same(weights(net), weights(model(seed=9)))


def test_what_the_base_is_survives_all_but_another_base():
    engine = engine_of(transformer=model())
    seen = [engine.state("transformer").base]
    steps = {
        "update": lambda: go_live(engine, ModuleUpdate("transformer", [pair("x")]), version="4"),
        "full": lambda: engine.forget("transformer", "3", base="full weights, version '3'"),
        "first": lambda: go_live(engine, ModuleUpdate("transformer", [pair("x")]), version="4"),
        "second": lambda: go_live(engine, ModuleUpdate("transformer", [pair("x", seed=1)]), version="5"),
        "rollback": lambda: rollback(engine),
        "reset": lambda: reset(engine),
        "sleep": lambda: (engine.suspend("transformer"), engine.resume("transformer")),
        "other adapters": lambda: engine.forget("transformer"),
        "disk": lambda: engine.forget("transformer", base="loaded from disk"),
    }
    for step in steps.values():
        step()
        seen.append(engine.state("transformer").base)

    assert seen == ["loaded"] * 2 + ["full weights, version '3'"] * 7 + ["loaded from disk"]


def test_a_new_base_is_that_of_its_module_alone():
    engine = engine_of(transformer=model(), transformer_2=model(seed=1))
    engine.forget("transformer", base="full weights")

    assert (engine.state("transformer").base, engine.state("transformer_2").base) == ("full weights", "loaded")


# pairs that have more precision than the weight


def test_fp16_mode_rounds_float32_pairs_as_our_trainer_does_and_not_as_a_merge_of_its_masters():
    net = model(torch.bfloat16, layers=("x",))
    base, masters = net["x"].weight.detach().clone(), pair("x", rank=4)
    engine = engine_of(Precision.FP16, transformer=net)

    plan = engine.plan([ModuleUpdate("transformer", [masters])])
    engine.commit(plan)

    assert plan.modules[0].pairs_rounded
    live = net["x"].weight
    assert torch.equal(live, merged_weight(base, LayerPair(masters.a, masters.b), masters.scale))
    assert not torch.equal(live, base + ((masters.b @ masters.a) * masters.scale).to(base.dtype))


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("weight", "sent", "rounded"),
    [(BF16, F32, True), (BF16, F16, True), (BF16, BF16, False), (F16, F32, True), (F16, BF16, True), (F16, F16, False)]
    + [(F32, sent, False) for sent in (F32, BF16, F16)],
)
def test_pairs_are_rounded_where_the_weight_cannot_hold_them_and_in_fp16_mode_only(weight, sent, rounded):
    for precision, expected in ((Precision.FP16, rounded), (Precision.FP32, False)):
        engine = engine_of(precision, transformer=model(weight))
        plan = engine.plan([ModuleUpdate("transformer", [pair("x", dtype=sent)])])
        assert plan.modules[0].pairs_rounded is expected


def test_one_side_of_one_pair_is_enough_to_be_rounded():
    exact, wide = pair("x", dtype=torch.bfloat16), pair("y", dtype=torch.bfloat16)
    wide = Pair("y", wide.a, wide.b.float(), wide.scale)
    engine = engine_of(Precision.FP16, transformer=model(torch.bfloat16))

    assert engine.plan([ModuleUpdate("transformer", [exact, wide])]).modules[0].pairs_rounded


def test_pairs_are_rounded_by_the_change_that_makes_them_live_and_by_no_other():
    engine = engine_of(Precision.FP16, transformer=model(torch.bfloat16))
    go_live(engine, ModuleUpdate("transformer", [pair("x")]), version="1")
    plan = engine.plan([ModuleUpdate("transformer", [pair("y", dtype=torch.bfloat16)])])
    assert not plan.modules[0].pairs_rounded  # x keeps what it has
    assert not engine.plan_reset().modules[0].pairs_rounded
    reset(engine)

    assert engine.plan_rollback().modules[0].pairs_rounded


# any sequence

LAYERS = {"attn.q": 4, "attn.k": 2, "attn.v": 2, "attn.qkv": 8, "out": 3}
ROWS = {  # layer -> (weight, rows of the weight, rows of B)
    "attn.q": [("attn.qkv.weight", Span(0, 4), Span(0, 4))],
    "attn.k": [("attn.qkv.weight", Span(4, 6), Span(0, 2))],
    "attn.v": [("attn.qkv.weight", Span(6, 8), Span(0, 2))],
    "attn.qkv": [("attn.qkv.weight", span, span) for span in (Span(0, 4), Span(4, 6), Span(6, 8))],
    "out": [("out.weight", Span(0, 3), Span(0, 3))],
}


@st.composite
def layers_of_an_update(draw):
    """Layers that do not write the same rows."""
    chosen = draw(st.sets(st.sampled_from(sorted(LAYERS)), min_size=1))
    return sorted(chosen - SECTIONS.keys() if "attn.qkv" in chosen else chosen)


STEPS = st.one_of(
    st.tuples(st.just("update"), layers_of_an_update(), st.booleans()),
    st.tuples(st.just("revert"), layers_of_an_update(), st.booleans()),
    st.tuples(st.just("rollback"), layers_of_an_update(), st.booleans()),
    st.tuples(st.just("only plan"), layers_of_an_update(), st.booleans()),
    st.tuples(st.just("fail"), layers_of_an_update(), st.booleans()),
    st.tuples(st.just("reset"), st.just([]), st.just(True)),
    st.tuples(st.just("reset and revert"), st.just([]), st.just(True)),
)


def expected_weights(base, live, precision):
    """Every weight from W0 and the pair that is live in each of its rows; in fp16 mode as a trainer computes it."""
    result = {name: tensor.clone() for name, tensor in base.items()}
    for (weight, rows), (update, b_rows) in live.items():
        part = base[weight][rows.start : rows.stop]
        if precision is Precision.FP32:
            new = merged(part, update, b_rows)
        else:
            a, b = update.a.to(part.dtype), update.b.to(part.dtype)
            new = part + ((b @ a) * update.scale)[b_rows.start : b_rows.stop]
        result[weight][rows.start : rows.stop] = new
    return result


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.lists(STEPS, min_size=1, max_size=10),
    st.sampled_from(list(Precision)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_after_any_sequence_every_weight_is_w0_plus_what_is_live(steps, precision, dtype):
    view = FusedView(dtype)
    engine = engine_of(precision, transformer=view)
    base = {name: tensor.clone() for name, tensor in view.weights.items()}
    live, versions = {}, {}
    for number, (kind, layers, whole) in enumerate(steps):
        pairs = [pair(name, seed=100 * number + i, outputs=LAYERS[name]) for i, name in enumerate(layers)]
        update = ModuleUpdate("transformer", pairs, whole=whole)
        if kind == "fail":
            wrong = ModuleUpdate("transformer", [*pairs, pair("nope")], whole=whole)
            with pytest.raises(RequestError):
                engine.plan([wrong])
        elif kind == "only plan":
            engine.plan([update])
        else:
            plan = engine.plan_reset() if kind.startswith("reset") else engine.plan([update])
            engine.commit(plan)
            if kind.endswith("revert"):
                engine.revert(plan)
            elif kind == "rollback":
                engine.settle(plan, str(number))
                rollback(engine)
            else:
                new_version = None if kind == "reset" else str(number)
                engine.settle(plan, new_version)
                live = {} if whole else dict(live)
                live |= {(weight, rows): (p, b_rows) for p in pairs for weight, rows, b_rows in ROWS[p.layer]}
                versions |= dict.fromkeys(layers, new_version)

        assert same(view.weights, expected_weights(base, live, precision)), (number, kind)
        there = {p.layer for p, _ in live.values()}
        assert engine.state("transformer").versions.layers.get("default", {}) == {
            each: versions[each] for each in there
        }
        assert {p.layer for p in engine.state("transformer").pairs} == there


# several named adapters


def two_adapters(engine, *, order=("style", "default")):
    updates = {
        "default": ModuleUpdate("transformer", [pair("x", seed=1), pair("y", seed=2)], whole=True),
        "style": ModuleUpdate("transformer", [pair("y", seed=3, rank=5), pair("z", seed=4)], adapter="style"),
    }
    for name in order:
        go_live(engine, updates[name])


@pytest.mark.parametrize("precision", Precision)
def test_adapters_add_up_whatever_order_they_came_in(precision):
    """FP32: one rounding of the whole sum. FP16: what a trainer gets that adds one after the other, by name."""
    net, other = model(torch.bfloat16), model(torch.bfloat16)
    base = weights(net)[0, "y.weight"]
    engine = engine_of(precision, transformer=net)
    two_adapters(engine)
    two_adapters(engine_of(precision, transformer=other), order=("default", "style"))
    assert same(weights(net), weights(other))
    first, second = pair("y", seed=2), pair("y", seed=3, rank=5)
    if precision is Precision.FP16:
        expected = merged(merged(base, first, precision=precision), second, precision=precision)
    else:
        scale = float(torch.tensor(0.7071, dtype=torch.float32))
        update = scale * (first.b.double() @ first.a.double()) + scale * (second.b.double() @ second.a.double())
        expected = (base.double() + update).to(torch.bfloat16)
    assert torch.equal(net["y"].weight, expected)
    assert len(engine.state("transformer").pairs) == 4


def test_an_update_of_one_adapter_leaves_the_others():
    net = model()
    base = weights(net)
    engine = engine_of(transformer=net)
    two_adapters(engine)
    go_live(engine, ModuleUpdate("transformer", [pair("x", seed=9)], whole=True))
    assert torch.equal(net["x"].weight, merged(base[0, "x.weight"], pair("x", seed=9)))
    assert torch.equal(net["y"].weight, merged(base[0, "y.weight"], pair("y", seed=3, rank=5)))
    assert torch.equal(net["z"].weight, merged(base[0, "z.weight"], pair("z", seed=4)))


def test_one_adapter_is_taken_out_and_comes_back():
    net = model()
    base = weights(net)
    engine = engine_of(transformer=net)
    two_adapters(engine)
    both = weights(net)
    plan = engine.plan_reset(adapter="style")
    engine.commit(plan)
    engine.settle(plan, "without")
    assert torch.equal(net["y"].weight, merged(base[0, "y.weight"], pair("y", seed=2)))
    assert torch.equal(net["z"].weight, base[0, "z.weight"])
    assert set(engine.state("transformer").live) == {"default"}
    back = engine.plan_rollback()
    engine.commit(back)
    engine.settle_rollback(back, {})
    assert same(weights(net), both)
    reset(engine)
    assert same(weights(net), base)


def test_an_adapter_that_is_not_there_cannot_be_taken_out():
    net = model()
    engine = engine_of(transformer=net)
    go_live(engine, ModuleUpdate("transformer", [pair("x")]))
    with pytest.raises(ConflictError, match="no adapter 'style' is live; live are default"):
        engine.plan_reset(adapter="style")


def test_the_rounding_loss_of_several_adapters_is_that_of_their_sum():
    net = model()
    base = weights(net)[0, "y.weight"].double()
    engine = engine_of(transformer=net)
    first, second = pair("y", seed=1), pair("y", seed=2)
    go_live(engine, ModuleUpdate("transformer", [first]))
    stats = go_live(engine, ModuleUpdate("transformer", [second], adapter="style"))["transformer"]
    scale = float(torch.tensor(0.7071, dtype=torch.float32))
    update = scale * (first.b.double() @ first.a.double() + second.b.double() @ second.a.double())
    assert stats.update_sq == pytest.approx(float(update.norm()) ** 2)
    assert stats.lost_sq == pytest.approx(float((net["y"].weight.detach().double() - base - update).norm()) ** 2)
