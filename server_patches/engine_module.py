"""sglang's layers as targets: fused sections, shards of every kind, and the model's own names for them.

Shapes come from the attributes that sglang's own weight loaders use, names from the tables it loads checkpoints and
adapters with, so that a pair lands where loading it from disk would have put it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from sglang.multimodal_gen.runtime.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
)
from sglang.multimodal_gen.runtime.loader.utils import get_param_names_mapping
from sglang.multimodal_gen.runtime.models.dits.base import BaseDiT
from sglang.multimodal_gen.runtime.pipelines_core.lora.pipeline import _swap_peft_swiglu_fc1_lora_b
from torch import nn
from torch.distributed.tensor import DTensor

from server_patches.derived import multiplies_with_a_copy
from server_patches.layers import (
    LayerSection,
    local_rows,
    obstacle_to_merging,
    offsets_of,
    own_rows,
    partition,
    sum_over_ranks,
    takes_pairs,
    unwrapped,
)
from server_patches.load_order import checkpoint_columns, checkpoint_rows, reorder
from server_patches.offload import HostWeights, host_weight
from server_patches.stacked import stacked_projections, unstacked
from sgld_lora_merge.adapter.known_pairs import layers_of
from sgld_lora_merge.adapter.names import is_flattened, segments_of
from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.merge.branches import Branches
from sgld_lora_merge.merge.spans import Span, swap_halves
from sgld_lora_merge.merge.targets import (
    CONVOLUTIONS,
    CannotLand,
    Landing,
    Target,
    as_rows,
    dotted_name,
    kernel_of,
    not_mergeable,
)

Mode = Literal["merge", "dynamic", "auto"]
Section = int | str | None
_NAMED_SECTIONS = {"q": 0, "k": 1, "v": 2, "0": 0, "1": 1}  # Gemma's tables have numbers as text


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
        self.branches: Branches | None = Branches(self._owner, device, sum_over_ranks)
        self._model: Any = module  # with the attributes that its class adds
        self._replica_size = replica_size
        self._layers = {name: unwrapped(layer) for name, layer in module.named_modules()}
        self._landings: dict[str, Landing | None] = {}
        self._dotted_names: dict[str, str] = {}
        mappings = (getattr(module, "lora_param_names_mapping", None), getattr(module, "param_names_mapping", None))
        tables = [mapping for mapping in mappings if mapping]
        self._stacked = stacked_projections(module)
        self._mappings = [get_param_names_mapping(table) for table in tables]
        self._segments = segments_of(self._layers) | _words(pattern for table in tables for pattern in table)

    def land(self, layer: str) -> Landing | None:
        if layer not in self._landings:
            # sglang loads adapters in kohya format without a change of their rows, which are in its own order
            self._landings[layer] = self._find(self._dotted(layer), in_checkpoint_order=not is_flattened(layer))
        return self._landings[layer]

    def weight(self, name: str) -> torch.Tensor:
        host = host_weight(self._module, name)
        weight: torch.Tensor = self._owner(name).weight
        return as_rows(local_rows(weight) if host is None else host)

    def offloaded(self, names: Collection[str]) -> HostWeights | None:
        if all(self.weight(name).device.type == self._device.type for name in names):
            return None
        return HostWeights(self._module, self.weight, names, self._device)

    def layers(self) -> Sequence[str]:
        return sorted(
            name for name, layer in self._layers.items() if takes_pairs(layer) and not name.endswith(".base_layer")
        )

    def objections(self, pairs: Sequence[Pair]) -> list[str]:
        """Return why the model class itself refuses these pairs, as sentences."""
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
        """Return, as sentences, the pairs that this model class changes when it loads an adapter from disk."""
        adapter: dict[str, torch.Tensor] = {}
        for pair in pairs:
            name = self._from_disk(self._dotted(pair.layer))[0]
            adapter |= {f"{name}.lora_A": pair.a, f"{name}.lora_B": pair.b}
        prepared = self._model.prepare_lora_adapter(dict(adapter))
        changed = sorted(key for key, tensor in adapter.items() if prepared.get(key) is not tensor)
        return [
            f"{type(self._module).__name__} changes {key!r} at a load from disk, which updates do not do yet"
            for key in changed
        ]

    def _dotted(self, layer: str) -> str:
        if layer not in self._dotted_names:
            self._dotted_names[layer] = dotted_name(layer, self._segments, self._find)
        return self._dotted_names[layer]

    def _find(self, layer: str, in_checkpoint_order: bool = True) -> Landing | None:
        for name, section in self._candidates(layer):
            found = self._layers.get(name)
            if found is not None and takes_pairs(found):
                self._refuse_permuted(layer, name)
                self._refuse_copied(name)
                reordered = in_checkpoint_order and section is None
                return self._landing(name, found, section, reordered, _swaps_halves(layer, name))
        if layer in self._layers:
            raise not_mergeable(self._layers[layer])
        return None

    def _candidates(self, layer: str) -> Iterator[tuple[str, Section]]:
        """Yield the engine's names for a layer: unchanged, mapped as in an adapter file, mapped as in a checkpoint."""
        yield layer, None
        yield self._from_disk(layer)
        yield self._mapped(layer, ".weight")
        yield from unstacked(layer, self._stacked, self._module)

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
                f"its scale and shift are swapped in {name!r}: send it by that name, halves of lora_B swapped"
            )
        permuted = getattr(self._module, "scale_shift_swap_params", ())
        if f"{name}.weight" in permuted and getattr(self._module, "quant_config", None) is not None:
            raise CannotLand("the engine permutes the rows of this layer when it loads a quantized checkpoint")

    def _refuse_copied(self, name: str) -> None:
        """Refuse layers whose weights a fast path of sglang's VAE decoders has copied and laid out anew."""
        while name:
            name = name.rpartition(".")[0]
            if hasattr(self._layers[name], "_sgl_gate"):
                raise CannotLand(f"a fast path of {type(self._layers[name]).__name__} keeps copies of its weights")

    def _owner(self, weight: str) -> Any:
        return self._layers[weight.removesuffix(".weight")]

    def _landing(self, name: str, layer: Any, section: Section, reordered: bool, swapped: bool) -> Landing:
        weight = f"{name}.weight"
        dynamic = self._is_dynamic(name, layer)
        kernel = kernel_of(layer)
        rows, cols, shards = partition(layer)
        sections = [LayerSection(*row) for row in rows]
        in_features = sum(size for size, _ in cols)
        a_cols = checkpoint_columns(layer, in_features) or tuple(
            span.shifted(offset) for (_, span), offset in zip(cols, offsets_of(cols), strict=True)
        )
        chosen = range(len(sections)) if section is None else [_section_index(section, len(sections))]
        whole = sum(sections[i].out_features for i in chosen)
        order = checkpoint_rows(self._module, name, layer, whole) if reordered else (Span(0, whole),)
        targets, b_offset = [], 0
        local = [0, *accumulate(s.source.size for s in sections)]
        for i in chosen:
            b_rows = reorder([sections[i].source.shifted(b_offset)], order)
            b_offset += sections[i].out_features
            distinct = shards // sections[i].replicas
            targets.append(
                Target(
                    weight=weight,
                    section=i,
                    rows=Span(local[i], local[i] + sections[i].source.size),
                    b_rows=swap_halves(b_rows, whole) if swapped else b_rows,
                    a_cols=a_cols,
                    copies=self._replica_size // distinct,
                    dynamic=dynamic,
                )
            )
        if not dynamic and isinstance(layer.weight, DTensor):
            targets = own_rows(targets, layer.weight)
        return Landing(tuple(targets), whole, in_features, kernel)

    def _is_dynamic(self, name: str, layer: Any) -> bool:
        """Return whether the layer gets a low-rank branch.

        Raises:
            CannotLand: neither a branch nor a merge is defined for it.
        """
        obstacle = obstacle_to_merging(layer)
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


def _words(patterns: Iterable[str]) -> set[str]:
    """Return the literal words between the dots of the names that these regular expressions match."""
    return {word for pattern in patterns for word in re.findall(r"\w+", re.sub(r"\\.", " ", pattern))}


def _section_index(section: int | str, count: int) -> int:
    index = _NAMED_SECTIONS.get(section, -1) if isinstance(section, str) else section
    if not 0 <= index < count:
        raise CannotLand(f"the name maps to section {section!r} of a layer of {count} sections")
    return index


def _swaps_halves(source: str, target: str) -> bool:
    """Return whether sglang swaps the halves of this B when it loads an adapter; its own function decides."""
    probe = torch.tensor([[0.0], [1.0]])
    return not torch.equal(_swap_peft_swiglu_fc1_lora_b(f"{source}.lora_B", f"{target}.lora_B", probe), probe)
