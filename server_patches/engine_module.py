"""sglang's layers as targets: fused sections, shards of every kind, and the model's own names for them.

Shapes come from the attributes that sglang's own weight loaders use, names from the tables it loads checkpoints and
adapters with, so that a pair lands where loading it from disk would have put it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import torch
from sglang.multimodal_gen.runtime.distributed import tensor_model_parallel_all_reduce
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
from sglang.multimodal_gen.runtime.layers.lora.linear import BaseLayerWithLoRA
from sglang.multimodal_gen.runtime.loader.utils import get_param_names_mapping
from sglang.multimodal_gen.runtime.models.dits.base import BaseDiT
from sglang.multimodal_gen.runtime.pipelines_core.lora.pipeline import _swap_peft_swiglu_fc1_lora_b
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from server_patches.derived import multiplies_with_a_copy
from server_patches.offload import HostWeights, host_weight
from sgld_lora_merge.adapter.kohya import segments_of
from sgld_lora_merge.adapter.pairs import Pair, layers_of
from sgld_lora_merge.merge.branches import Branches
from sgld_lora_merge.merge.targets import (
    CONVOLUTIONS,
    CannotLand,
    Landing,
    Span,
    Target,
    as_rows,
    dotted_name,
    features,
    kernel_of,
    not_mergeable,
)

Mode = Literal["merge", "dynamic", "auto"]
Section = int | str | None
_QKV = {"q": 0, "k": 1, "v": 2}


class EngineModule:
    """`ModuleView` of one module of an sglang pipeline, on one rank.

    Args:
        module: a transformer, or any other module with linear layers or convolutions.
        replica_size: ranks of the replica; shards that several of them hold are counted once.
        mode: of the server. ``merge`` merges or refuses, ``dynamic`` adds low-rank branches to the layers, ``auto``
            merges where a merge is defined and adds a branch elsewhere.
        device: where the module computes.
        compiled: torch.compile has been told to compile the module; it would not see branches that come later.
    """

    def __init__(
        self,
        module: nn.Module,
        replica_size: int,
        mode: Mode = "merge",
        device: torch.device = torch.device("cpu"),  # noqa: B008  # immutable
        compiled: bool = False,
    ) -> None:
        self._module = module
        self._mode = mode
        self._device = device
        self._compiled = compiled
        self.branches: Branches | None = Branches(self._owner, device, _sum_over_ranks)
        self._model: Any = module  # with the attributes that its class adds
        self._replica_size = replica_size
        self._layers = {name: _unwrapped(layer) for name, layer in module.named_modules()}
        self._landings: dict[str, Landing | None] = {}
        self._dotted_names: dict[str, str] = {}
        mappings = (getattr(module, "lora_param_names_mapping", None), getattr(module, "param_names_mapping", None))
        tables = [mapping for mapping in mappings if mapping]
        self._mappings = [get_param_names_mapping(table) for table in tables]
        self._segments = segments_of(self._layers) | _words(pattern for table in tables for pattern in table)

    def land(self, layer: str) -> Landing | None:
        if layer not in self._landings:
            self._landings[layer] = self._find(self._dotted(layer))
        return self._landings[layer]

    def weight(self, name: str) -> torch.Tensor:
        host = host_weight(self._module, name)
        weight: torch.Tensor = self._owner(name).weight
        return as_rows(_local(weight) if host is None else host)

    def offloaded(self, names: Collection[str]) -> HostWeights | None:
        if all(self.weight(name).device.type == self._device.type for name in names):
            return None
        return HostWeights(self._module, self.weight, names, self._device)

    def layers(self) -> Sequence[str]:
        return sorted(
            name for name, layer in self._layers.items() if _takes_pairs(layer) and not name.endswith(".base_layer")
        )

    def objections(self, pairs: Sequence[Pair]) -> list[str]:
        """What the model class itself has against these pairs; sentences."""
        if not isinstance(self._model, BaseDiT):
            return []
        try:
            self._model.validate_lora_layers([self._dotted(layer) for layer in layers_of(pairs)])
            self._model.validate_weight_update_source(weights_path=None)
            if type(self._model).prepare_lora_adapter is not BaseDiT.prepare_lora_adapter:
                return self._rewritten(pairs)
        except (ValueError, CannotLand) as error:
            return [str(error)]
        return []

    def _rewritten(self, pairs: Sequence[Pair]) -> list[str]:
        """Pairs that this model class computes anew when it loads an adapter from disk."""
        adapter: dict[str, torch.Tensor] = {}
        for pair in pairs:
            name = self._from_disk(self._dotted(pair.layer))[0]
            adapter |= {f"{name}.lora_A": pair.a, f"{name}.lora_B": pair.b}
        prepared = self._model.prepare_lora_adapter(dict(adapter))
        changed = sorted(key for key, tensor in adapter.items() if prepared.get(key) is not tensor)
        return [f"{type(self._module).__name__} rewrites {key!r} from disk, which is not built yet" for key in changed]

    def _dotted(self, layer: str) -> str:
        if layer not in self._dotted_names:
            self._dotted_names[layer] = dotted_name(layer, self._segments, self._find)
        return self._dotted_names[layer]

    def _find(self, layer: str) -> Landing | None:
        for name, section in self._candidates(layer):
            found = self._layers.get(name)
            if found is not None and _takes_pairs(found):
                self._refuse_permuted(layer, name)
                self._refuse_copied(name)
                return self._landing(name, found, section, _swaps_halves(layer, name))
        if layer in self._layers:
            raise not_mergeable(self._layers[layer])
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

    def _refuse_permuted(self, layer: str, name: str) -> None:
        if layer.endswith("adaLN_modulation.1") and name.endswith("norm_out.linear"):
            raise CannotLand(
                f"its scale and shift stand the other way round in {name!r}; send it as that, halves of lora_B swapped"
            )
        permuted = getattr(self._module, "scale_shift_swap_params", ())
        if f"{name}.weight" in permuted and getattr(self._module, "quant_config", None) is not None:
            raise CannotLand("the engine permutes the rows of this layer when it loads a quantized checkpoint")

    def _refuse_copied(self, name: str) -> None:
        """Fast paths of sglang's VAE decoders keep products of their weights, and change the layout of them."""
        while name:
            name = name.rpartition(".")[0]
            if hasattr(self._layers[name], "_sgl_gate"):
                raise CannotLand(f"a fast path of {type(self._layers[name]).__name__} keeps copies of its weights")

    def _owner(self, weight: str) -> Any:
        return self._layers[weight.removesuffix(".weight")]

    def _landing(self, name: str, layer: Any, section: Section, swapped: bool) -> Landing:
        weight = f"{name}.weight"
        dynamic = self._is_dynamic(name, layer)
        kernel = kernel_of(layer)
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
                    weight=weight,
                    section=i,
                    rows=Span(local[i], local[i] + sections[i].source.size),
                    b_rows=_swap_halves(b_rows, whole) if swapped else b_rows,
                    a_cols=a_cols,
                    copies=self._replica_size // distinct,
                    dynamic=dynamic,
                )
            )
        if not dynamic and isinstance(layer.weight, DTensor):
            targets = _own_rows(targets, layer.weight)
        return Landing(tuple(targets), whole, in_features, kernel)

    def _is_dynamic(self, name: str, layer: Any) -> bool:
        """Whether the layer gets a branch.

        Raises:
            CannotLand: neither that nor a merge is defined for it.
        """
        obstacle = _obstacle(layer)
        if self._mode == "merge" or (self._mode == "auto" and obstacle is None):
            if obstacle is not None:
                raise CannotLand(f"{obstacle}; merging into it is not defined (--lora-merge-mode auto would not merge)")
            return False
        if self._compiled:
            raise CannotLand("a low-rank branch does not reach a compiled layer: start without --enable-torch-compile")
        if multiplies_with_a_copy(self._layers[name.rpartition(".")[0]]):
            raise CannotLand("its block computes with a copy of its weight, which a low-rank branch does not reach")
        if isinstance(layer, CONVOLUTIONS):
            raise CannotLand(f"it is a {type(layer).__name__}; a low-rank branch is not defined for it")
        if isinstance(layer, ColumnParallelLinear) and layer.gather_output and layer.tp_size > 1:
            raise CannotLand("it gathers its output over the ranks; a low-rank branch is not defined for it")
        if isinstance(layer, RowParallelLinear) and not layer.input_is_parallel and layer.tp_size > 1:
            raise CannotLand("it splits its input over the ranks; a low-rank branch is not defined for it")
        return True


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
    rows, columns = features(layer)
    return [everything(rows)], [everything(columns)], 1


def _part(index: int, size: int) -> Span:
    return Span(index * size, (index + 1) * size)


def _offsets(cols: list[tuple[int, Span]]) -> list[int]:
    return [0, *accumulate(size for size, _ in cols)][:-1]


def _words(patterns: Iterable[str]) -> set[str]:
    """What stands literally between the dots of the names that these regular expressions match."""
    return {word for pattern in patterns for word in re.findall(r"\w+", re.sub(r"\\.", " ", pattern))}


def _takes_pairs(layer: nn.Module) -> bool:
    return isinstance(layer, (LinearBase, nn.Linear, *CONVOLUTIONS))


def _obstacle(layer: Any) -> str | None:
    """Why nothing can be merged into a layer's weight; None where it can."""
    method = getattr(layer, "quant_method", None)
    if isinstance(layer, LinearBase) and not isinstance(method, UnquantizedLinearMethod):
        return f"its weight is quantized ({type(method).__name__})"
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return "it has no plain weight (packed quantization?)"
    if isinstance(weight, DTensor) and any(isinstance(each, Shard) and each.dim != 0 for each in weight.placements):
        return "its weight is sharded by columns"
    return None


def _unwrapped(layer: nn.Module) -> nn.Module:
    """The layer itself where sglang has wrapped it for an adapter of its own."""
    return layer.base_layer if isinstance(layer, BaseLayerWithLoRA) else layer


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows; FSDP keeps them as the local part of a distributed tensor."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data


def _own_rows(targets: Sequence[Target], weight: DTensor) -> list[Target]:
    """Targets of a weight, cut to the rows that FSDP has left on this rank; those that are elsewhere keep no row."""
    shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    mine = Span(offset[0], offset[0] + shape[0])
    shards = 1
    for dim, placement in enumerate(weight.placements):
        shards *= weight.device_mesh.size(dim) if isinstance(placement, Shard) else 1
    own = []
    for target in targets:
        rows = target.rows.within(mine)
        cut = Span(rows.start - target.rows.start, rows.stop - target.rows.start)
        b_rows = _take(target.b_rows, cut)
        own.append(replace(target, rows=rows.shifted(-mine.start), b_rows=b_rows, copies=target.copies // shards))
    return own


def _take(spans: Sequence[Span], cut: Span) -> tuple[Span, ...]:
    """A range of the rows that the spans name one after the other."""
    taken, passed = [], 0
    for span in spans:
        here = cut.shifted(span.start - passed).within(span)
        if here.size:
            taken.append(here)
        passed += span.size
    return tuple(taken) or (Span(0, 0),)


def _sum_over_ranks(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """``x @ A.T`` over all columns of a layer whose ranks hold some of them, and whose output is a whole."""
    parallel = isinstance(layer, RowParallelLinear) and layer.tp_size > 1 and layer.reduce_results
    return tensor_model_parallel_all_reduce(hidden, tp_group=layer.tp_group) if parallel else hidden


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
