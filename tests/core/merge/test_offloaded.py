"""Weights that do not lie where merges are computed: written whole, one at a time, with the same bytes."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.engine import MergeEngine, ModuleUpdate
from sgld_lora_merge.merge.module_view import LinearModule


class Host:
    """Keeps weights apart from the module, as sglang does; one is written while the next is merged."""

    device = torch.device("cpu")

    def __init__(self, module):
        self.weights = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
        self.memory = torch.full((max(weight.numel() for weight in self.weights.values()),), torch.nan)
        self.open, self.fails, self.waiting = 0, None, []

    def blank(self, name):
        weight = self.weights[name]
        return self.memory[: weight.numel()].view(weight.shape)

    @contextmanager
    def opened(self, name, rows):
        assert self.open == 0
        self.open += 1
        merged = self.blank(name)
        merged.fill_(torch.nan)
        yield merged
        self.finish()
        if name == self.fails:
            raise RuntimeError("no room")
        parts = [slice(span.start, span.stop) for span in rows]
        self.waiting = [(self.weights[name][part], merged[part].clone()) for part in parts]
        self.open -= 1

    def finish(self):
        for live, part in self.waiting:
            live.copy_(part)
        self.waiting.clear()


class HostModule(LinearModule):
    def __init__(self, module):
        super().__init__(module)
        self.host = Host(module)

    def weight(self, name):
        return self.host.weights[name]

    def offloaded(self, names):
        return self.host


def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"x": nn.Linear(6, 4, bias=False), "y": nn.Linear(5, 7, bias=False)}).requires_grad_(False)


def pair(layer, inputs, outputs, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, inputs, generator=generator), torch.randn(outputs, 2, generator=generator)
    return Pair(layer, a, b, 0.7071)


def update(seed):
    return ModuleUpdate("m", [pair("x", 6, 4, seed), pair("y", 5, 7, seed + 1)], whole=True)


@pytest.mark.parametrize("precision", Precision)
def test_the_bytes_are_those_of_a_merge_in_place(precision):
    plain, view = model(), HostModule(model())
    engines = [MergeEngine(lambda: {"m": LinearModule(plain)}, precision), MergeEngine(lambda: {"m": view}, precision)]
    stats = []
    for engine in engines:
        for seed in (1, 2):
            plan = engine.plan([update(seed)])
            stats.append(engine.commit(plan)["m"])
            engine.settle(plan, str(seed))
    assert stats[1] == stats[3]
    assert all(torch.equal(view.weight(name), tensor) for name, tensor in plain.named_parameters())
    reset = engines[1].plan_reset()
    engines[1].commit(reset)
    assert all(torch.equal(view.weight(name), tensor) for name, tensor in model().named_parameters())


def test_a_revert_writes_back_through_the_same_way():
    view = HostModule(model())
    engine = MergeEngine(lambda: {"m": view}, Precision.FP32)
    first = engine.plan([update(1)])
    engine.commit(first)
    engine.settle(first, "1")
    live = {name: tensor.clone() for name, tensor in view.host.weights.items()}
    plan = engine.plan([update(2)])
    view.host.fails = "y.weight"
    with pytest.raises(RuntimeError, match="no room"):
        engine.commit(plan)
    view.host.fails, view.host.open = None, 0
    assert not torch.equal(view.weight("x.weight"), live["x.weight"])
    engine.revert(plan)
    assert all(torch.equal(view.weight(name), tensor) for name, tensor in live.items())
    engine.restore("m")
    assert all(torch.equal(view.weight(name), tensor) for name, tensor in model().named_parameters())
