"""Low-rank branches: what PEFT's unmerged forward computes, on layers that keep their weights and their names."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.merge.branches import Branches
from sgld_lora_merge.merge.engine import MergeEngine, ModuleUpdate
from sgld_lora_merge.merge.kernels import Term
from sgld_lora_merge.merge.module_view import LinearModule
from sgld_lora_merge.merge.spans import Span

IN, OUT = 6, 4


class DynamicModule(LinearModule):
    """A plain module whose layers named in ``dynamic`` get branches."""

    def __init__(self, module, dynamic=("x", "y")):
        super().__init__(module)
        self.dynamic = dynamic
        self.branches = Branches(lambda weight: module.get_submodule(weight.rpartition(".")[0]), torch.device("cpu"))

    def land(self, layer):
        landing = super().land(layer)
        targets = tuple(replace(target, dynamic=layer in self.dynamic) for target in landing.targets)
        return replace(landing, targets=targets)


def model():
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(IN, OUT) for name in ("x", "y", "z")}).requires_grad_(False)


def pair(layer, seed=0, rank=2, scale=1.5):
    generator = torch.Generator().manual_seed(seed)
    return Pair(layer, torch.randn(rank, IN, generator=generator), torch.randn(OUT, rank, generator=generator), scale)


def engine_of(view):
    return MergeEngine(lambda: {"m": view}, Precision.FP32)


def go_live(engine, plan, version="1"):
    stats = engine.commit(plan)
    engine.settle(plan, version)
    return stats


INPUT = torch.randn(5, 3, IN, generator=torch.Generator().manual_seed(9))


def expected(linear, *pairs):
    out = linear(INPUT)
    for each in pairs:
        out = out + INPUT @ each.a.T @ each.b.T * each.scale
    return out


def test_a_branch_is_what_peft_computes():
    from peft import LoraConfig, get_peft_model

    net = model()
    peft = get_peft_model(nn.Sequential(net["x"]), LoraConfig(r=2, lora_alpha=3, target_modules=["0"]))
    lora = peft.base_model.model[0]
    update = pair("x")
    lora.lora_A["default"].weight.data, lora.lora_B["default"].weight.data = update.a, update.b
    with torch.no_grad():
        reference = peft(INPUT)
    plain = model()
    engine = engine_of(DynamicModule(plain))
    go_live(engine, engine.plan([ModuleUpdate("m", [update])]))
    assert torch.equal(plain["x"](INPUT), reference)


def test_weights_and_names_stay_and_reset_takes_the_branch_out():
    net = model()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    base = net["x"](INPUT)
    engine = engine_of(DynamicModule(net))
    go_live(engine, engine.plan([ModuleUpdate("m", [pair("x")])]))
    assert not torch.equal(net["x"](INPUT), base)
    assert type(net["x"]) is not nn.Linear  # no short cut past it
    assert isinstance(net["x"], nn.Linear)
    assert net.state_dict().keys() == before.keys()
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())
    assert engine.state("m").store.nbytes == 0
    go_live(engine, engine.plan_reset(), None)
    assert torch.equal(net["x"](INPUT), base)
    assert type(net["x"]) is nn.Linear
    assert vars(net["x"]).keys() == vars(net["z"]).keys()
    back = engine.plan_rollback()
    engine.commit(back)
    engine.settle_rollback(back, {})
    assert torch.equal(net["x"](INPUT), expected(model()["x"], pair("x")))


def test_a_plan_changes_nothing_and_a_revert_brings_the_old_branch_back():
    net = model()
    engine = engine_of(DynamicModule(net))
    go_live(engine, engine.plan([ModuleUpdate("m", [pair("x", 1)])]))
    first = net["x"](INPUT)
    plan = engine.plan([ModuleUpdate("m", [pair("x", 2), pair("y", 3)])])
    assert torch.equal(net["x"](INPUT), first)
    engine.commit(plan)
    assert not torch.equal(net["x"](INPUT), first)
    engine.revert(plan)
    assert torch.equal(net["x"](INPUT), first)
    assert torch.equal(net["y"](INPUT), expected(model()["y"]))


def test_some_layers_are_merged_and_some_are_not():
    net = model()
    engine = engine_of(DynamicModule(net, dynamic=("x",)))
    plan = engine.plan([ModuleUpdate("m", [pair("x"), pair("z")])])
    assert plan.modules[0].merge_mode == "mixed"
    stats = go_live(engine, plan)["m"]
    assert stats.update_sq > 0
    torch.testing.assert_close(net["z"](INPUT), expected(model()["z"], pair("z")))
    assert torch.equal(net["z"].weight, engine.effective("m", plan.modules[0].merged[0]))
    (dynamic,) = [target for target in plan.modules[0].written if target.dynamic]
    exact = (net["x"].weight.double() + 1.5 * (pair("x").b.double() @ pair("x").a.double())).float()
    assert torch.equal(engine.effective("m", dynamic), exact)
    assert torch.equal(engine.base("m", dynamic), net["x"].weight)


def test_several_adapters_add_up():
    net = model()
    engine = engine_of(DynamicModule(net))
    go_live(engine, engine.plan([ModuleUpdate("m", [pair("x", 1)])]))
    go_live(engine, engine.plan([ModuleUpdate("m", [pair("x", 2)], adapter="style")]))
    torch.testing.assert_close(net["x"](INPUT), expected(model()["x"], pair("x", 1), pair("x", 2)))


def test_restore_and_resume():
    net = model()
    base = net["x"](INPUT)
    engine = engine_of(DynamicModule(net))
    go_live(engine, engine.plan([ModuleUpdate("m", [pair("x"), pair("z")])]))
    live = net["x"](INPUT), net["z"].weight.clone()
    engine.suspend("m")
    assert torch.equal(net["x"](INPUT), base)
    assert torch.equal(net["z"].weight, model()["z"].weight)
    assert engine.state("m").store.nbytes == 0
    engine.resume("m")
    assert torch.equal(net["x"](INPUT), live[0])
    assert torch.equal(net["z"].weight, live[1])
    assert engine.state("m").weight_version == "1"


def test_a_layer_that_cannot_be_merged_for_its_dtype_may_be_dynamic():
    net = model()
    net["x"].weight = nn.Parameter(net["x"].weight.to(torch.float8_e4m3fn), requires_grad=False)
    engine = engine_of(DynamicModule(net))
    plan = engine.plan([ModuleUpdate("m", [pair("x")])])
    go_live(engine, plan)
    with pytest.raises(RequestError, match="float8"):
        engine.effective("m", plan.modules[0].written[0])


def branches_of(layer):
    return Branches(lambda _: layer, torch.device("cpu"))


def test_sections_of_a_fused_layer_and_layers_that_give_tuples():
    """Rows of the weight are columns of the output; sglang's layers give their output and a bias."""

    class Fused(nn.Linear):
        def forward(self, input_):
            return super().forward(input_), "bias"

    layer = Fused(IN, 8).requires_grad_(False)
    base, _ = layer(INPUT)
    update = pair("k")
    term = Term(update.a, update.b, 1.5, (Span(2, 4), Span(0, 1)), (Span(3, 6), Span(0, 3)))
    branches = branches_of(layer)
    branches.set(("w", 1), branches.make(Span(4, 7), [term]))
    assert branches.idle == ["w"]
    out, bias = layer(input_=INPUT)
    assert branches.idle == []
    a = torch.cat([update.a[:, 3:6], update.a[:, 0:3]], dim=1)
    b = torch.cat([update.b[2:4], update.b[0:1]])
    torch.testing.assert_close(out[..., 4:7], base[..., 4:7] + 1.5 * INPUT @ a.T @ b.T)
    assert torch.equal(out[..., :4], base[..., :4])
    assert bias == "bias"
    branches.set(("w", 1), None)
    branches.set(("w", 1), None)
    assert torch.equal(layer(INPUT)[0], base)


def test_a_branch_computes_in_the_dtype_of_its_pair_so_that_nothing_of_it_is_rounded():
    view = DynamicModule(model().bfloat16())
    engine = MergeEngine(lambda: {"m": view}, Precision.FP16)
    plans = [engine.plan([ModuleUpdate("m", [pair(layer)])]) for layer in ("x", "z")]
    assert [plan.modules[0].pairs_rounded for plan in plans] == [False, True]  # z is merged


def test_partial_products_are_summed_over_ranks():
    layer = nn.Linear(IN, OUT).requires_grad_(False)
    update = pair("x")
    branches = Branches(lambda _: layer, torch.device("cpu"), lambda _, hidden: hidden * 2)
    term = Term(update.a, update.b, 1.0, (Span(0, OUT),), (Span(0, IN),))
    branches.set(("w", 0), branches.make(Span(0, OUT), [term]))
    torch.testing.assert_close(layer(INPUT) - nn.functional.linear(INPUT, layer.weight, layer.bias),
                               2 * INPUT @ update.a.T @ update.b.T)  # fmt: skip
