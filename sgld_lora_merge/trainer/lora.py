"""What the LoRA strategies share: A and B are what travels, and the engine merges."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.errors import RequestError, name_some
from sgld_lora_merge.trainer.answers import Merged
from sgld_lora_merge.trainer.expected import Expectation, expected_base, expected_merged
from sgld_lora_merge.trainer.gather import GatherAhead, whole
from sgld_lora_merge.trainer.model import TrainedAdapter, read_adapter, scales_of_their_own
from sgld_lora_merge.trainer.names import LayerPair
from sgld_lora_merge.trainer.sync import DTYPES, Update, WeightSync
from sgld_lora_merge.trainer.transport import Answer, SyncError, accepted

logger = logging.getLogger(__name__)


class LoRASync(WeightSync[TrainedAdapter]):
    """Sends one adapter of each module. Verifying, the first sync compares the base weights too."""

    what = "lora tensors"

    def _read(self, model: nn.Module) -> TrainedAdapter:
        return read_adapter(model, self._mapper)

    def _tensors(self, content: TrainedAdapter) -> Mapping[str, Sequence[torch.Tensor]]:
        return content.pairs

    def _own_scales(self, adapter: TrainedAdapter) -> dict[str, float]:
        return scales_of_their_own(adapter, self.args.lora_alpha, self.args.lora_rank)

    def _beyond_stock(self, update: Update[TrainedAdapter]) -> list[str]:
        faults = super()._beyond_stock(update)
        for module, adapter in update.modules.items():
            if scales := self._own_scales(adapter):
                told = f"{self.args.lora_alpha} / {self.args.lora_rank}"
                faults.append(f"{module}: layers whose scale is not {told} cannot be sent: {name_some(list(scales))}")
            if adapter.moved_by is not None:
                faults.append(f"{module}: {self._moved(adapter)}, and it cannot say whether it serves those")
        return faults

    def _before_the_first(self, update: Update[TrainedAdapter]) -> None:
        """Pairs of an init that changed the base are for an engine that serves the changed one."""
        moved = {module: adapter for module, adapter in update.modules.items() if adapter.moved_by is not None}
        if not moved:
            return
        base = {module: self._expected_base(adapter) for module, adapter in moved.items()}
        try:
            self._ask_to_verify({"base": base})
        except SyncError as error:
            told = "; ".join(f"{module}: {self._moved(adapter)}" for module, adapter in moved.items())
            raise SyncError(
                f"{told}, and the engine does not serve those. Nothing was sent. Let the trainer merge (--use-lora "
                f"alone), use another init, or load the trainer's base weights into the engine first. {error}"
            ) from error

    def _moved(self, adapter: TrainedAdapter) -> str:
        return f"init_lora_weights={adapter.moved_by!r} changed the base weights that the pairs are added to"

    def _expected_base(self, adapter: TrainedAdapter) -> dict[str, Expectation]:
        """By layer, on a rank that calls an engine. A collective."""
        expected: dict[str, Expectation] = {}
        for layer in adapter.pairs:
            weight = whole(adapter.base[layer], self._gather)
            if self._called():
                expected[layer] = expected_base(weight, DTYPES[self.args.diffusion_forward_dtype])
        return expected

    def _whole_buckets(self, update: Update[TrainedAdapter]) -> GatherAhead[str]:
        """Whole tensors under the names of the wire, for each of the update's buckets."""
        sharded = (
            [
                (f"{layer}.lora_{side}", tensor)
                for layer in layers
                for side, tensor in zip("AB", update.modules[module].pairs[layer], strict=True)
            ]
            for module, layers in update.buckets
        )
        return GatherAhead(sharded, self._gather)

    def _check(self, update: Update[TrainedAdapter], answer: Answer) -> None:
        """Ask the engines whether their weights are what they must be."""
        merged_as = accepted("an engine answered the update", answer, Merged)
        live = {name for name, each in merged_as["modules"].items() if each["merge_mode"] == "merge"}
        if unmerged := sorted(update.modules.keys() - live):
            logger.warning("the engine adds %s at run time: only base weights are verified there", unmerged)
        precision, dtype = Precision(merged_as["merge_precision"]), DTYPES[self.args.diffusion_forward_dtype]
        merged: dict[str, dict[str, Expectation]] = {}
        base: dict[str, dict[str, Expectation]] = {}
        for module, adapter in update.modules.items():
            for layer, pair in adapter.pairs.items():
                if layer not in adapter.base:
                    raise RequestError(f"{module}: {layer!r} cannot be verified: the model has no base weight for it")
                weight = whole(adapter.base[layer], self._gather)
                sides = LayerPair(*(whole(side, self._gather) for side in pair))
                if not self._called():
                    continue
                if update.version == 1 or module not in live:
                    base.setdefault(module, {})[layer] = expected_base(weight, dtype)
                if module in live:
                    scale = self._scale(adapter, layer)
                    each = expected_merged(weight, sides, scale, dtype, precision, update.version)
                    merged.setdefault(module, {})[layer] = each

        self._ask_to_verify({"base": base, "live": merged})

    def _scale(self, adapter: TrainedAdapter, layer: str) -> float:
        rank = adapter.pairs[layer].a.shape[0]
        alpha = rank if self.args.lora_alpha is None else self.args.lora_alpha
        return adapter.scales.get(layer, alpha / rank)
