"""What a sync sends of a model: its pairs, or all its weights, merged with the pairs or as they are."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.errors import RequestError, name_some
from sgld_lora_merge.trainer.account import Survey, survey
from sgld_lora_merge.trainer.answers import Merged
from sgld_lora_merge.trainer.base import BaseWeights, Key
from sgld_lora_merge.trainer.engines import Engines
from sgld_lora_merge.trainer.expected import DTYPES, Expectation, expected_base, expected_hash
from sgld_lora_merge.trainer.gather import Gather, each_whole
from sgld_lora_merge.trainer.model import (
    TrainedAdapter,
    TrainedLayer,
    read_adapter,
    read_layers,
    scales_of_their_own,
)
from sgld_lora_merge.trainer.names import LayerPair, PeftLoRAKeyMapper
from sgld_lora_merge.trainer.samples import MergedLayer, sample_merged
from sgld_lora_merge.trainer.sync_update import Expectations, SyncUpdate
from sgld_lora_merge.trainer.transport import Answer, accepted
from sgld_lora_merge.wire.schema import LORA_MERGE

logger = logging.getLogger(__name__)


class Pairs:
    """A and B of one adapter of each module; the engine merges."""

    noun = "lora tensors"
    transactional = True

    def __init__(self, args: Namespace, mapper: PeftLoRAKeyMapper, allow_unsynced: Sequence[str]) -> None:
        self._args, self._mapper, self._allow_unsynced = args, mapper, allow_unsynced
        self._surveys: dict[int, Survey] = {}  # by the model's identity

    def read(self, model: nn.Module, values: Mapping[str, torch.Tensor] | None) -> TrainedAdapter:
        surveyed = self._surveys.get(id(model))
        if surveyed is None or not surveyed.fits(model):
            surveyed = self._surveys[id(model)] = survey(model)
        return read_adapter(model, self._mapper, values, self._allow_unsynced, surveyed)

    def layers(self, module: TrainedAdapter) -> Mapping[str, TrainedLayer]:
        return module.layers

    def fields(self, update: SyncUpdate, module: str, layers: Sequence[str], *, stock: bool) -> dict[str, Any]:
        fields = {
            "weight_update_mode": LORA_MERGE,
            "lora_alpha": self._args.lora_alpha,
            "lora_rank": self._args.lora_rank,
        }
        if stock:
            return fields
        scales = self._own_scales(update.modules[module])
        scaling = {layer: scales[layer] for layer in layers if layer in scales}
        return fields | {
            "weight_version": str(update.version),
            "layer_scaling": {module: scaling} if scaling else None,
        }

    def faults_on_stock(self, update: SyncUpdate) -> list[str]:
        faults = []
        for module, adapter in update.modules.items():
            if scales := self._own_scales(adapter):
                scale = f"{self._args.lora_alpha} / {self._args.lora_rank}"
                faults.append(f"{module}: layers whose scale is not {scale} cannot be sent: {name_some(list(scales))}")
            if adapter.moved_by is not None:
                faults.append(f"{module}: {_moved(adapter)}, and it cannot say whether it serves those")
        return faults

    def base(self, module: TrainedAdapter) -> BaseWeights:
        return module.trained_on

    def base_fault(self, update: SyncUpdate) -> str:
        causes = [f"{module}: {_moved(adapter)}; " for module, adapter in update.modules.items() if adapter.moved_by]
        for module, adapter in update.modules.items():
            if merged := adapter.trained_on.merged - {self._mapper.adapter}:
                causes.append(f"{module}: adapters that are merged into the trainer's: {name_some(sorted(merged))}; ")
        return (
            f"{''.join(causes)}the engine's base weights are not those that the adapter was trained on. Load the "
            "trainer's into the engine first, let the trainer merge and send every weight (--use-lora alone), or name "
            "those that may differ in allow_unsynced="
        )

    def expectations(self, update: SyncUpdate, answer: Answer, engines: Engines, gather: Gather | None) -> Expectations:
        merged_as = accepted("an engine answered the update", answer, Merged)
        live = {name for name, each in merged_as["modules"].items() if each["merge_mode"] == "merge"}
        if unmerged := sorted(update.modules.keys() - live):
            logger.warning("the engine adds %s at run time: only base weights are verified there", unmerged)
        precision = Precision(merged_as["merge_precision"])
        layers: dict[Key, MergedLayer] = {}
        for module, adapter in update.modules.items():
            for layer, pair in adapter.pairs.items():
                if layer not in adapter.base:
                    raise RequestError(f"{module}: {layer!r} cannot be verified: the model has no base weight for it")
                layers[module, layer] = MergedLayer(adapter.base[layer], pair, self._scale(adapter, layer))
        merged = {key: each for key, each in layers.items() if key[0] in live}
        if precision is Precision.FP32:
            expected = sample_merged(merged, self._dtype, update.version, engines, gather)
        else:
            expected = self._hashes(merged, engines, gather)
        unmerged_layers = {key: each.base for key, each in layers.items() if key[0] not in live}
        return {"base": base_hashes(unmerged_layers, self._dtype, engines, gather), "live": by_module(expected)}

    def _hashes(
        self, layers: Mapping[Key, MergedLayer], engines: Engines, gather: Gather | None
    ) -> dict[Key, Expectation]:
        expected: dict[Key, Expectation] = {}

        def add(whole: dict[tuple[Key, str], torch.Tensor]) -> None:
            if engines.mine:
                key = next(iter(whole))[0]
                base, *sides = whole.values()
                expected[key] = expected_hash(base, LayerPair(*sides), layers[key].scale, self._dtype)

        buckets = [
            [((key, "base"), each.base), ((key, "a"), each.pair.a), ((key, "b"), each.pair.b)]
            for key, each in layers.items()
        ]
        each_whole(buckets, add, engines.run_on_all_ranks, gather)
        return expected

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self._args.diffusion_forward_dtype]

    def _own_scales(self, adapter: TrainedAdapter) -> dict[str, float]:
        return scales_of_their_own(adapter, self._args.lora_alpha, self._args.lora_rank)

    def _scale(self, adapter: TrainedAdapter, layer: str) -> float:
        rank = adapter.pairs[layer].a.shape[0]
        alpha = rank if self._args.lora_alpha is None else self._args.lora_alpha
        return adapter.scales.get(layer, alpha / rank)


class FullWeights:
    """Every weight, into the engine's own route for full weights, which has no transactions."""

    noun = "tensors"
    transactional = False

    def __init__(self, args: Namespace, mapper: PeftLoRAKeyMapper, _: Sequence[str]) -> None:
        self._args, self._mapper = args, mapper

    def read(self, model: nn.Module, values: Mapping[str, torch.Tensor] | None) -> dict[str, TrainedLayer]:
        return read_layers(model, values=values)

    def layers(self, module: dict[str, TrainedLayer]) -> Mapping[str, TrainedLayer]:
        return module

    def fields(self, update: SyncUpdate, module: str, layers: Sequence[str], *, stock: bool) -> dict[str, Any]:
        return {"weight_version": str(update.version)}

    def faults_on_stock(self, update: SyncUpdate) -> list[str]:
        return []

    def base(self, module: dict[str, TrainedLayer]) -> None:
        return None

    def base_fault(self, update: SyncUpdate) -> str:
        return "every weight is sent"

    def expectations(self, update: SyncUpdate, answer: Answer, engines: Engines, gather: Gather | None) -> Expectations:
        dtype = DTYPES[self._args.diffusion_forward_dtype]
        expected: dict[Key, Expectation] = {}

        def add(whole: dict[tuple[Key, str], torch.Tensor]) -> None:
            if engines.mine:
                module, layer = key = next(iter(whole))[0]
                tensors = {name: tensor for (_, name), tensor in whole.items()}
                expected[key] = expected_base(update.modules[module][layer].to_send("weight", tensors), dtype)

        buckets = [
            [(((module, layer), name), tensor) for name, tensor in each.needed.items() if name != "bias"]
            for module, layers in update.modules.items()
            for layer, each in layers.items()
            if each.linear
        ]
        each_whole(buckets, add, engines.run_on_all_ranks, gather)
        return {"live": by_module(expected)}


class MergedWeights(FullWeights):
    """Every weight with the adapter merged by the trainer, one layer at a time, in the weight's own dtype."""

    def read(self, model: nn.Module, values: Mapping[str, torch.Tensor] | None) -> dict[str, TrainedLayer]:
        return read_layers(model, read_adapter(model, self._mapper, values))


def base_hashes(
    weights: Mapping[Key, torch.Tensor], dtype: torch.dtype, engines: Engines, gather: Gather | None
) -> dict[str, dict[str, Expectation]]:
    """Return what base weights must be, by module and layer. A collective."""
    expected: dict[Key, Expectation] = {}

    def add(whole: dict[Key, torch.Tensor]) -> None:
        if engines.mine:
            expected.update({key: expected_base(weight, dtype) for key, weight in whole.items()})

    each_whole([[each] for each in weights.items()], add, engines.run_on_all_ranks, gather)
    return by_module(expected)


def by_module(expected: Mapping[Key, Expectation]) -> dict[str, dict[str, Expectation]]:
    """Return expectations in the form of the verify route."""
    modules: dict[str, dict[str, Expectation]] = {}
    for (module, layer), each in expected.items():
        modules.setdefault(module, {})[layer] = each
    return modules


def _moved(adapter: TrainedAdapter) -> str:
    return f"init_lora_weights={adapter.moved_by!r} changed the base weights that the pairs are added to"
