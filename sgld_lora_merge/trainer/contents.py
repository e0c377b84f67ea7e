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
from sgld_lora_merge.trainer.answers import Merged
from sgld_lora_merge.trainer.engines import Engines
from sgld_lora_merge.trainer.expected import DTYPES, Expectation, expected_base, expected_merged
from sgld_lora_merge.trainer.gather import Gather, whole
from sgld_lora_merge.trainer.model import (
    TrainedAdapter,
    TrainedLayer,
    read_adapter,
    read_layers,
    scales_of_their_own,
)
from sgld_lora_merge.trainer.names import LayerPair, PeftLoRAKeyMapper
from sgld_lora_merge.trainer.sync_update import Expectations, SyncUpdate
from sgld_lora_merge.trainer.transport import Answer, SyncError, accepted
from sgld_lora_merge.wire.schema import LORA_MERGE

logger = logging.getLogger(__name__)


class Pairs:
    """A and B of one adapter of each module; the engine merges. Verifying, the first sync compares the base too."""

    noun = "lora tensors"
    transactional = True

    def __init__(self, args: Namespace, mapper: PeftLoRAKeyMapper) -> None:
        self._args, self._mapper = args, mapper

    def read(self, model: nn.Module) -> TrainedAdapter:
        return read_adapter(model, self._mapper)

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

    def check_first(self, update: SyncUpdate, engines: Engines, gather: Gather | None) -> None:
        """Check that the engine serves the changed base, where the pairs are of an init that changed it."""
        moved = {module: adapter for module, adapter in update.modules.items() if adapter.moved_by is not None}
        if not moved:
            return
        base: dict[str, dict[str, Expectation]] = {}
        for module, adapter in moved.items():
            for layer in adapter.pairs:
                weight = whole(adapter.base[layer], gather)
                if engines.mine:
                    base.setdefault(module, {})[layer] = expected_base(weight, self._dtype)
        try:
            engines.verify({"base": base})
        except SyncError as error:
            which = "; ".join(f"{module}: {_moved(adapter)}" for module, adapter in moved.items())
            raise SyncError(
                f"{which}, and the engine does not serve those. Nothing was sent. Let the trainer merge (--use-lora "
                f"alone), use another init, or load the trainer's base weights into the engine first. {error}"
            ) from error

    def expectations(self, update: SyncUpdate, answer: Answer, engines: Engines, gather: Gather | None) -> Expectations:
        merged_as = accepted("an engine answered the update", answer, Merged)
        live = {name for name, each in merged_as["modules"].items() if each["merge_mode"] == "merge"}
        if unmerged := sorted(update.modules.keys() - live):
            logger.warning("the engine adds %s at run time: only base weights are verified there", unmerged)
        precision = Precision(merged_as["merge_precision"])
        merged: dict[str, dict[str, Expectation]] = {}
        base: dict[str, dict[str, Expectation]] = {}
        for module, adapter in update.modules.items():
            for layer, pair in adapter.pairs.items():
                if layer not in adapter.base:
                    raise RequestError(f"{module}: {layer!r} cannot be verified: the model has no base weight for it")
                weight = whole(adapter.base[layer], gather)
                sides = LayerPair(*(whole(side, gather) for side in pair))
                if not engines.mine:
                    continue
                if update.version == 1 or module not in live:
                    base.setdefault(module, {})[layer] = expected_base(weight, self._dtype)
                if module in live:
                    scale = self._scale(adapter, layer)
                    each = expected_merged(weight, sides, scale, self._dtype, precision, update.version)
                    merged.setdefault(module, {})[layer] = each
        return {"base": base, "live": merged}

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

    def __init__(self, args: Namespace, mapper: PeftLoRAKeyMapper) -> None:
        self._args, self._mapper = args, mapper

    def read(self, model: nn.Module) -> dict[str, TrainedLayer]:
        return read_layers(model)

    def layers(self, module: dict[str, TrainedLayer]) -> Mapping[str, TrainedLayer]:
        return module

    def fields(self, update: SyncUpdate, module: str, layers: Sequence[str], *, stock: bool) -> dict[str, Any]:
        return {"weight_version": str(update.version)}

    def faults_on_stock(self, update: SyncUpdate) -> list[str]:
        return []

    def check_first(self, update: SyncUpdate, engines: Engines, gather: Gather | None) -> None:
        pass

    def expectations(self, update: SyncUpdate, answer: Answer, engines: Engines, gather: Gather | None) -> Expectations:
        dtype = DTYPES[self._args.diffusion_forward_dtype]
        live: dict[str, dict[str, Expectation]] = {}
        for module, layers in update.modules.items():
            for layer, each in layers.items():
                if not each.linear:
                    continue
                tensors = {name: whole(tensor, gather) for name, tensor in each.needed.items() if name != "bias"}
                if engines.mine:
                    weight = each.to_send("weight", tensors)
                    live.setdefault(module, {})[layer] = expected_base(weight, dtype)
        return {"live": live}


class MergedWeights(FullWeights):
    """Every weight with the adapter merged by the trainer, one layer at a time, in the weight's own dtype."""

    def read(self, model: nn.Module) -> dict[str, TrainedLayer]:
        return read_layers(model, read_adapter(model, self._mapper))


def _moved(adapter: TrainedAdapter) -> str:
    return f"init_lora_weights={adapter.moved_by!r} changed the base weights that the pairs are added to"
