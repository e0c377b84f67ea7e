"""sglang's layers as targets: fused sections, tensor-parallel shards, and the model's own names for them.

Shapes come from the attributes that sglang's own weight loaders use, names from the tables it loads checkpoints and
adapters with, so that a pair lands where loading it from disk would have put it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from sglang.multimodal_gen.runtime.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    MergedReplicatedLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from sglang.multimodal_gen.runtime.loader.utils import get_param_names_mapping
from sglang.multimodal_gen.runtime.models.dits.base import BaseDiT
from sglang.multimodal_gen.runtime.pipelines_core.lora.pipeline import _swap_peft_swiglu_fc1_lora_b
from torch import nn
from torch.distributed.tensor import DTensor

from sgld_lora_merge.pairs import Pair
from sgld_lora_merge.targets import CannotLand, Landing, Span, Target

Section = int | str | None
_QKV = {"q": 0, "k": 1, "v": 2}


class EngineModule:
    """`ModuleView` of one module of an sglang pipeline, on one rank.

    Args:
        module: a transformer, or any other module with linear layers.
        replica_size: ranks of the replica; shards that several of them hold are counted once.
    """

    def __init__(self, module: nn.Module, replica_size: int) -> None:
        self._module = module
        self._model: Any = module  # with the attributes that its class adds
        self._replica_size = replica_size
        self._layers = dict(module.named_modules())
        self._landings: dict[str, Landing | None] = {}
        mappings = (getattr(module, "lora_param_names_mapping", None), getattr(module, "param_names_mapping", None))
        self._mappings = [get_param_names_mapping(mapping) for mapping in mappings if mapping]

    def land(self, layer: str) -> Landing | None:
        if layer not in self._landings:
            self._landings[layer] = self._find(layer)
        return self._landings[layer]

    def weight(self, name: str) -> torch.Tensor:
        return self._module.get_parameter(name).data

    def layers(self) -> Sequence[str]:
        return sorted(name for name, layer in self._layers.items() if _is_linear(layer))

    def objections(self, pairs: Sequence[Pair]) -> list[str]:
        """What the model class itself has against these pairs; sentences."""
        if not isinstance(self._model, BaseDiT):
            return []
        try:
            self._model.validate_lora_layers([pair.layer for pair in pairs])
            self._model.validate_weight_update_source(weights_path=None)
            if type(self._model).prepare_lora_adapter is not BaseDiT.prepare_lora_adapter:
                return self._rewritten(pairs)
        except ValueError as error:
            return [str(error)]
        return []

    def _rewritten(self, pairs: Sequence[Pair]) -> list[str]:
        """Pairs that this model class computes anew when it loads an adapter from disk."""
        adapter: dict[str, torch.Tensor] = {}
        for pair in pairs:
            name = self._from_disk(pair.layer)[0]
            adapter |= {f"{name}.lora_A": pair.a, f"{name}.lora_B": pair.b}
        prepared = self._model.prepare_lora_adapter(dict(adapter))
        changed = sorted(key for key, tensor in adapter.items() if prepared.get(key) is not tensor)
        return [f"{type(self._module).__name__} rewrites {key!r} from disk, which is not built yet" for key in changed]

    def _find(self, layer: str) -> Landing | None:
        for name, section in self._candidates(layer):
            found = self._layers.get(name)
            if found is not None and _is_linear(found):
                self._refuse_permuted(name)
                return self._landing(name, found, section, _swaps_halves(layer, name))
        if layer in self._layers:
            raise CannotLand(f"it is a {type(self._layers[layer]).__name__}, not a linear layer")
        return None

    def _candidates(self, layer: str) -> Iterator[tuple[str, Section]]:
        """Engine names for a sender's layer: as it is, as an adapter on disk is mapped, as a weight on disk is."""
        yield layer, None
        yield self._from_disk(layer)
        yield self._mapped(layer, ".weight")

    def _from_disk(self, layer: str) -> tuple[str, Section]:
        return self._mapped(layer, ".lora_A")

    def _mapped(self, layer: str, suffix: str) -> tuple[str, Section]:
        name, section = layer + suffix, None
        for mapping in self._mappings:
            name, index, _ = mapping(name)
            section = section if index is None else index
        return name.removesuffix(suffix), section

    def _refuse_permuted(self, name: str) -> None:
        permuted = getattr(self._module, "scale_shift_swap_params", ())
        if f"{name}.weight" in permuted and getattr(self._module, "quant_config", None) is not None:
            raise CannotLand("the engine permutes the rows of this layer when it loads a quantized checkpoint")

    def _landing(self, name: str, layer: nn.Module, section: Section, swapped: bool) -> Landing:
        _refuse_unmergeable(layer)
        rows, cols, shards = _partition(layer)
        sections = [_Section(*row) for row in rows]
        in_features = sum(size for size, _ in cols)
        a_cols = tuple(span.shifted(offset) for (_, span), offset in zip(cols, _offsets(cols), strict=True))
        chosen = range(len(sections)) if section is None else [_section_index(section, len(sections))]
        whole = sum(sections[i].out_features for i in chosen)
        targets, b_offset = [], 0
        local = [0, *accumulate(s.source.size for s in sections)]
        for i in chosen:
            b_rows = (sections[i].source.shifted(b_offset),)
            b_offset += sections[i].out_features
            distinct = shards // sections[i].replicas
            targets.append(
                Target(
                    weight=f"{name}.weight",
                    section=i,
                    rows=Span(local[i], local[i] + sections[i].source.size),
                    b_rows=_swap_halves(b_rows, whole) if swapped else b_rows,
                    a_cols=a_cols,
                    copies=self._replica_size // distinct,
                )
            )
        return Landing(tuple(targets), whole, in_features)


class _Section:
    """One logical projection of a weight: its whole height, and the rows of it that this rank holds."""

    def __init__(self, out_features: int, source: Span, replicas: int = 1) -> None:
        self.out_features, self.source, self.replicas = out_features, source, replicas


_Rows = list[tuple[int, Span] | tuple[int, Span, int]]


def _partition(layer: Any) -> tuple[_Rows, list[tuple[int, Span]], int]:
    """Sections of the rows, segments of the columns, each with its whole size and this rank's part; shards."""
    shards = getattr(layer, "tp_size", 1) if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)) else 1
    rank = layer.tp_rank if shards > 1 else 0
    everything: Callable[[int], tuple[int, Span]] = lambda size: (size, Span(0, size))  # noqa: E731
    if isinstance(layer, QKVParallelLinear):
        q, kv = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
        replicas = layer.num_kv_head_replicas
        kv_rows = (layer.total_num_kv_heads * layer.head_size, _part(rank // replicas, kv), replicas)
        return (
            [(layer.total_num_heads * layer.head_size, _part(rank, q)), kv_rows, kv_rows],
            [everything(layer.input_size)],
            shards,
        )
    if isinstance(layer, ColumnParallelLinear):
        sizes = layer.output_sizes if isinstance(layer, MergedColumnParallelLinear) else [layer.output_size]
        return [(size, _part(rank, size // shards)) for size in sizes], [everything(layer.input_size)], shards
    if isinstance(layer, RowParallelLinear):
        segments = getattr(layer, "input_sizes", None) or [layer.input_size]  # sglang 0.5.23 brought segments
        return [everything(layer.output_size)], [(size, _part(rank, size // shards)) for size in segments], shards
    if isinstance(layer, MergedReplicatedLinear):
        return [everything(size) for size in layer.output_sizes], [everything(layer.input_size)], 1
    if isinstance(layer, ReplicatedLinear):
        return [everything(layer.output_size)], [everything(layer.input_size)], 1
    return [everything(layer.out_features)], [everything(layer.in_features)], 1


def _part(index: int, size: int) -> Span:
    return Span(index * size, (index + 1) * size)


def _offsets(cols: list[tuple[int, Span]]) -> list[int]:
    return [0, *accumulate(size for size, _ in cols)][:-1]


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, (LinearBase, nn.Linear))


def _refuse_unmergeable(layer: Any) -> None:
    method = getattr(layer, "quant_method", None)
    if isinstance(layer, LinearBase) and not isinstance(method, UnquantizedLinearMethod):
        raise CannotLand(f"its weight is quantized ({type(method).__name__}); merging into it is not defined")
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise CannotLand("it has no plain weight (packed quantization?)")
    if isinstance(weight, DTensor) or isinstance(weight.data, DTensor):
        raise CannotLand("its weight is sharded by --use-fsdp-inference, which is not built yet")


def _section_index(section: int | str, count: int) -> int:
    index = _QKV.get(section, -1) if isinstance(section, str) else section
    if not 0 <= index < count:
        raise CannotLand(f"the name maps to section {section!r} of a layer of {count} sections")
    return index


def _swaps_halves(source: str, target: str) -> bool:
    """Whether sglang swaps the halves of this B when it loads an adapter; asked of its own function."""
    probe = torch.tensor([[0.0], [1.0]])
    return not torch.equal(_swap_peft_swiglu_fc1_lora_b(f"{source}.lora_B", f"{target}.lora_B", probe), probe)


def _swap_halves(spans: tuple[Span, ...], total: int) -> tuple[Span, ...]:
    """The rows of ``[second half, first half]`` that stand at these rows of the whole."""
    half = total // 2
    swapped = []
    for span in spans:
        for lower, upper, shift in ((0, half, half), (half, total, -half)):
            start, stop = max(span.start, lower), min(span.stop, upper)
            if start < stop:
                swapped.append(Span(start, stop).shifted(shift))
    return tuple(swapped)
