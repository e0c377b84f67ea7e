"""The steps of a run differ in values only: from the fourth on an update takes the memory of one that is done with."""

import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from sgld_lora_merge.adapter.pairing import pair_up
from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.merge import kernels
from sgld_lora_merge.merge.engine import MergeEngine, ModuleUpdate
from sgld_lora_merge.merge.module_view import LinearModule
from sgld_lora_merge.merge.spans import Span
from sgld_lora_merge.wire.bucket import flatten, unflatten
from sgld_lora_merge.wire.layout import layout_text, read_layout

LAYERS = {"x": (24, 16), "y": (16, 16), "z": (8, 32)}


def model():
    generator = torch.Generator().manual_seed(0)
    net = nn.ModuleDict({name: nn.Linear(i, o, bias=False) for name, (o, i) in LAYERS.items()}).requires_grad_(False)
    for layer in net.values():
        layer.weight.normal_(0, 0.02, generator=generator)
    return net


def pairs(seed, *, rank=8, layers=LAYERS, scale=1.5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        Pair(
            name,
            torch.randn(rank, LAYERS[name][1], generator=generator).to(dtype),
            torch.randn(LAYERS[name][0], rank, generator=generator).to(dtype),
            scale,
        )
        for name in layers
    ]


def update(seed, *, whole=True, adapter="default", **kwargs):
    return ModuleUpdate("m", pairs(seed, **kwargs), whole=whole, adapter=adapter)


def in_a_bucket(seed, *, whole=True, adapter="default", scale=1.5, **kwargs):
    """`update` as our trainer sends it: a bucket, whose layout is text."""
    sent = pairs(seed, **kwargs)
    named = [(f"{p.layer}.lora_{side}", tensor) for p in sent for side, tensor in (("A", p.a), ("B", p.b))]
    flat, entries = flatten(named)
    received = unflatten(flat, read_layout(layout_text(entries)))
    pairing = pair_up(received, alpha=scale * sent[0].rank)
    assert pairing.faults == ()
    return ModuleUpdate("m", pairing.pairs, whole=whole, adapter=adapter)


def engine_of(net, precision=Precision.FP32):
    view = LinearModule(net)
    return MergeEngine(lambda: {"m": view}, precision)


def go_live(engine, wanted):
    plan = engine.plan([wanted])
    stats = engine.commit(plan)
    engine.settle(plan, "v")
    return plan, stats["m"]


def after_four_updates():
    """A model and its engine, whose next update takes the memory of an older one; the fourth is live."""
    net = model()
    engine = engine_of(net)
    for seed in range(1, 5):
        go_live(engine, update(seed))
    return net, engine


def alone(wanted, precision=Precision.FP32):
    """The weights that an update alone gives."""
    net = model()
    go_live(engine_of(net, precision), wanted)
    return net.state_dict()


def same(net, expected):
    return all(torch.equal(tensor, expected[name]) for name, tensor in net.state_dict().items())


def memory(plan):
    return [placed.pair.a.data_ptr() for placed in plan.modules[0].after["default"].values()]


@pytest.mark.parametrize("made", [update, in_a_bucket])
@pytest.mark.parametrize("precision", Precision)
def test_every_update_gives_the_bytes_that_it_gives_alone(precision, made):
    net = model()
    engine = engine_of(net, precision)
    plans = []
    for seed in range(1, 9):
        wanted = made(seed)
        plan, stats = go_live(engine, wanted)
        plans.append(memory(plan))
        assert same(net, alone(update(seed), precision))
        assert stats.update_sq > 0
    assert plans[3:6] == plans[0:3] == plans[6:] + plans[5:6]


@pytest.mark.parametrize("made", [update, in_a_bucket])
@pytest.mark.parametrize(("dtype", "rounded"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_plan_in_old_memory_knows_whether_its_pairs_are_rounded(made, dtype, rounded):
    engine = engine_of(model().bfloat16(), Precision.FP16)
    plans = [go_live(engine, made(seed, dtype=dtype))[0] for seed in range(1, 7)]
    assert memory(plans[5]) == memory(plans[2])
    assert [plan.modules[0].pairs_rounded for plan in plans] == [rounded] * 6


def test_of_a_bucket_that_takes_old_memory_no_tensor_is_looked_at():
    net = model()
    engine = engine_of(net)
    for seed in range(1, 7):
        wanted = in_a_bucket(seed)
        go_live(engine, wanted)
        made = {"made" in vars(wanted.pairs), "made" in vars(wanted.pairs.bucket)}
        assert made == ({True} if seed < 4 else {False})
    assert same(net, alone(update(6)))


def test_of_a_bucket_that_is_live_nothing_of_the_senders_is_kept():
    engine = engine_of(model())
    for seed in range(1, 7):
        wanted = in_a_bucket(seed)
        storage = weakref.ref(wanted.pairs.bucket.flat.untyped_storage())
        go_live(engine, wanted)
        del wanted
        gc.collect()
        assert storage() is None


def test_a_part_of_a_bucket_lands_where_a_part_of_a_list_does():
    """A rank of a tensor-parallel engine takes rows of B, which no copy of the whole bucket gives it."""

    class Half(LinearModule):
        def land(self, layer):
            (target,) = super().land(layer).targets
            half = target.rows.size // 2
            rows = Span(0, half)
            part = replace(target, rows=rows, b_rows=(rows,))
            return replace(super().land(layer), targets=(part,))

    nets = [model(), model()]
    for net, made in zip(nets, (update, in_a_bucket), strict=True):
        view = Half(net)
        engine = MergeEngine(lambda view=view: {"m": view}, Precision.FP32)
        for seed in range(1, 7):
            go_live(engine, made(seed))
    assert same(nets[0], nets[1].state_dict())
    assert not same(nets[0], alone(update(6)))


def test_an_update_that_was_refused_leaves_what_is_live_and_what_was_before():
    net, engine = after_four_updates()
    plan = engine.plan([update(5)])
    engine.commit(plan)
    engine.revert(plan)
    assert same(net, alone(update(4)))
    back = engine.plan_rollback()
    engine.commit(back)
    engine.settle_rollback(back, {})
    assert same(net, alone(update(3)))


def test_two_plans_at_a_time_have_memory_of_their_own():
    net, engine = after_four_updates()
    first, second = engine.plan([update(5)]), engine.plan([update(6)])
    engine.commit(first)
    engine.settle(first, "v")
    assert same(net, alone(update(5)))
    assert not set(memory(first)) & set(memory(second))


@pytest.mark.parametrize(
    "other",
    [
        update(9, rank=16),
        update(9, scale=0.7071),
        update(9, dtype=torch.bfloat16),
        update(9, layers=("x", "y")),
        update(9, whole=False, layers=("x",)),
    ],
    ids=["rank", "scale", "dtype", "layers", "some layers"],
)
def test_an_update_of_another_outline_goes_its_own_way_and_so_does_the_next(other):
    net, engine = after_four_updates()
    go_live(engine, other)
    expected = alone(other)
    if not other.whole:
        expected |= {name: tensor for name, tensor in alone(update(4)).items() if name != "x.weight"}
    assert same(net, expected)
    for seed in range(10, 15):
        go_live(engine, update(seed))
        assert same(net, alone(update(seed)))


def test_faults_are_found_in_an_update_of_a_known_outline():
    _, engine = after_four_updates()
    with pytest.raises(RequestError, match="'x' holds NaN"):
        engine.plan([ModuleUpdate("m", pairs(5), whole=True, faults=["'x' holds NaN"])])


def test_a_second_adapter_is_merged_with_the_first():
    net, engine = after_four_updates()
    go_live(engine, update(7, adapter="style"))
    twin = model()
    other = engine_of(twin)
    go_live(other, update(4))
    go_live(other, update(7, adapter="style"))
    assert same(net, twin.state_dict())
    for seed in range(5, 10):
        go_live(engine, update(seed))
        go_live(other, update(seed))
        assert same(net, twin.state_dict())


def test_weights_that_moved_are_looked_at_again():
    net, engine = after_four_updates()
    net["x"].weight.data = net["x"].weight.data.clone()
    go_live(engine, update(5))
    assert same(net, alone(update(5)))


def test_asleep_nothing_holds_the_weights():
    net, engine = after_four_updates()
    engine.suspend("m")
    storage = weakref.ref(net["x"].weight.data.untyped_storage())
    net["x"].weight.data = net["x"].weight.data.clone()
    gc.collect()
    assert storage() is None
    engine.resume("m")
    assert same(net, alone(update(4)))


def test_three_sets_of_pairs_are_kept_however_many_updates_come():
    engine = engine_of(model())
    for seed in range(1, 12):
        go_live(engine, update(seed))
        gc.collect()
        kept = {id(each) for each in gc.get_objects() if type(each) is Pair and each.owned}
        assert len(kept) <= 3 * len(LAYERS)


def test_any_sequence_of_steps_ends_where_an_engine_ends_that_never_refills():
    seed = random.SystemRandom().randrange(2**31)
    chance = random.Random(seed)
    nets = [model(), model()]
    engines = [engine_of(net) for net in nets]
    engines[1].plan = lambda updates: engines[1]._allocate(engines[1].check(updates))
    for number in range(150):
        step = chance.choice(("update",) * 6 + ("bucket",) * 12 + ("refused", "partial", "rollback", "reset", "sleep"))
        for engine in engines:
            match step:
                case "update" | "partial":
                    go_live(engine, update(number, whole=step == "update"))
                case "bucket":
                    go_live(engine, in_a_bucket(number))
                case "refused":
                    plan = engine.plan([update(number)])
                    engine.commit(plan)
                    engine.revert(plan)
                case "rollback" if engine.state("m").previous is not None:
                    plan = engine.plan_rollback()
                    engine.commit(plan)
                    engine.settle_rollback(plan, {})
                case "reset":
                    plan = engine.plan_reset(["m"])
                    engine.commit(plan)
                    engine.settle(plan, None)
                case "sleep":
                    engine.suspend("m")
                    engine.resume("m")
        assert same(nets[0], nets[1].state_dict()), (seed, number, step)


def test_what_is_alike_is_of_one_size_and_readable_where_it_is():
    def job(rank=8, dtype=torch.float32):
        net = model()
        (target,) = LinearModule(net).land("x").targets
        (pair,) = pairs(1, rank=rank, layers=("x",), dtype=dtype)
        term = kernels.Term(pair.a, pair.b, 1.0, target.b_rows, target.a_cols)
        return kernels.MergeJob(net["x"].weight, net["x"].weight.clone(), (term,))

    assert kernels.share_scratch(job(), job())
    assert not kernels.share_scratch(job(), job(rank=16))
    assert not kernels.share_scratch(job(), job(dtype=torch.bfloat16))
    assert not kernels.share_scratch(job(rank=3), job(rank=3))
