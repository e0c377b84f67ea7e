"""The strategies: what a sync sends, and how it travels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from sgld_lora_merge.adapter.families import load_families
from sgld_lora_merge.adapter.file import adapter_bytes
from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.trainer.expected import Expectation, expected_base, merged_weight
from sgld_lora_merge.trainer.gather import GatherAhead, whole
from sgld_lora_merge.trainer.handles import HandleSync
from sgld_lora_merge.trainer.lora import LoRASync
from sgld_lora_merge.trainer.model import TrainedAdapter, TrainedLayer, read_adapter, read_layers
from sgld_lora_merge.trainer.names import LayerPair
from sgld_lora_merge.trainer.ranks import Ranks
from sgld_lora_merge.trainer.sync import DTYPES, Update
from sgld_lora_merge.trainer.transport import Answer, SyncError, Transport
from sgld_lora_merge.wire.schema import LORA_MERGE

LORA_IPC_WEIGHT_UPDATE_MODE = LORA_MERGE

logger = logging.getLogger(__name__)


class DiffusionUpdateWeightFromTensorLoRAIPC(HandleSync[TrainedAdapter], LoRASync):
    """Sends A and B as handles, CUDA IPC or shared memory; the engines, on this machine's GPUs, merge.

    Several engines stage the update and go live when all of them have all of it.
    """

    log_name = "LoRA IPC"

    def _send(self, update: Update[TrainedAdapter], step: Callable[[], None]) -> list[Answer]:
        answers: list[Answer] = []
        whole_buckets = self._whole_buckets(update)
        try:
            for index, ((module, layers), named) in enumerate(zip(update.buckets, whole_buckets, strict=True)):
                fields = self._fields(update, index, module, layers)
                with self._in_parts(index, update) if self._stock else nullcontext():
                    answers = self._push(module, named, fields, whole_buckets.begin, compact=not self._stock)
                step()
        except Exception:
            if not self._stock and (answers or self._hold):
                self._abort(update.update_id)
            raise
        if self._hold:
            commit = {"update_id": update.update_id}
            try:
                answers = self._everyones(lambda transport: transport.ask("/lora_merge/commit", commit))
            except SyncError as error:
                told = "the other engines may be live with it: see their status, and sync again"
                raise SyncError(f"an engine did not commit update {update.update_id!r}; {told}. {error}") from error
        return answers

    @property
    def _hold(self) -> bool:
        """Whether a complete update waits for the commit that lets all engines go live."""
        return len(self._transports) > 1 and not self._stock

    def _fields(
        self,
        update: Update[TrainedAdapter],
        index: int,
        module: str,
        layers: list[str],
    ) -> dict[str, Any]:
        stock = {
            "weight_update_mode": LORA_IPC_WEIGHT_UPDATE_MODE,
            "lora_alpha": self.args.lora_alpha,
            "lora_rank": self.args.lora_rank,
        }
        if self._stock:
            return stock
        scales = self._own_scales(update.modules[module])
        scaling = {layer: scales[layer] for layer in layers if layer in scales}
        return stock | {
            "weight_version": str(update.version),
            "update_id": update.update_id,
            "bucket_index": index,
            "num_buckets": len(update.buckets),
            "commit": not self._hold,
            "layer_scaling": {module: scaling} if scaling else None,
        }

    def _abort(self, update_id: str) -> None:
        """Free what engines have staged; one that has nothing of it says so, which is no fault."""
        for transport in self._called():
            try:
                transport.ask("/lora_merge/abort", {"update_id": update_id})
            except SyncError as error:
                logger.debug("update %s was not aborted: %s", update_id, error)


class DiffusionUpdateWeightLoRAUpload(LoRASync):
    """Sends A and B as one safetensors file over HTTP, from the first rank to every engine, one after the other."""

    log_name = "LoRA upload"

    def _make_ranks(self, gpus_per_engine: int) -> Ranks:
        return Ranks(1, 1)

    def _called(self) -> list[Transport]:
        return self._transports if self._ranks.rank == 0 else []

    def _beyond_stock(self, update: Update[TrainedAdapter]) -> list[str]:
        return ["uploads are a route of its own; use --lora-ipc-weight-sync", *super()._beyond_stock(update)]

    def _steps(self, update: Update[TrainedAdapter]) -> int:
        return len(update.buckets) + len(self._transports)

    def _send(self, update: Update[TrainedAdapter], step: Callable[[], None]) -> list[Answer]:
        prefixes = self._prefixes(update.modules)
        tensors: dict[str, torch.Tensor] = {}
        whole_buckets = self._whole_buckets(update)
        for (module, _), named in zip(update.buckets, whole_buckets, strict=True):
            whole_buckets.begin()
            if self._called():
                tensors |= {prefixes[module] + name: tensor.cpu().contiguous() for name, tensor in named}
            step()
        scaling = {
            prefixes[module] + layer: scale
            for module, adapter in update.modules.items()
            for layer, scale in self._own_scales(adapter).items()
        }
        fields = {
            "target_module": next(iter(update.modules)) if len(update.modules) == 1 else None,
            "lora_alpha": self.args.lora_alpha,
            "lora_rank": self.args.lora_rank,
            "weight_version": str(update.version),
            "update_id": update.update_id,
        }

        def upload() -> list[Answer]:
            file = adapter_bytes(tensors, scaling) if tensors else None
            answers = []
            for transport in self._called():
                answers.append(transport.update(fields, file))
                step()
            return answers

        return self._ranks.everyone(self._together(upload))[0]

    def _prefixes(self, modules: Mapping[str, TrainedAdapter]) -> dict[str, str]:
        """What tells a file's modules apart: the prefixes of the model family's routes, where there are several."""
        if len(modules) == 1:
            return dict.fromkeys(modules, "")
        family = load_families().get(self.args.model_family)
        prefixes = {module: prefix for prefix, module in family.routes.items()} if family else {}
        if missing := sorted(modules.keys() - prefixes.keys()):
            raise RequestError(f"one file cannot carry {missing}: model family {self.args.model_family!r} has no route")
        return prefixes


class DiffusionUpdateWeightFromTensor(HandleSync[dict[str, TrainedLayer]]):
    """Sends every weight as handles, into the engine's own route for full weights.

    That route has no transactions: a sync that fails may have changed a part, and the message says so.
    """

    log_name = "Full"
    what = "tensors"

    def _read(self, model: nn.Module) -> dict[str, TrainedLayer]:
        return read_layers(model)

    def _tensors(self, content: dict[str, TrainedLayer]) -> Mapping[str, Sequence[torch.Tensor]]:
        return {layer: list(each.parameters.values()) for layer, each in content.items()}

    def _send(self, update: Update[dict[str, TrainedLayer]], step: Callable[[], None]) -> list[Answer]:
        answers: list[Answer] = []
        sharded = (
            [
                ((layer, name), tensor)
                for layer in layers
                for name, tensor in _with_pair(update.modules[module][layer]).items()
            ]
            for module, layers in update.buckets
        )
        gathered = GatherAhead(sharded, self._gather)
        for sent, ((module, layers), keyed) in enumerate(zip(update.buckets, gathered, strict=True)):
            tensors = dict(keyed)
            keyed.clear()
            named = [
                (f"{layer}.{name}" if layer else name, _to_send(update.modules[module][layer], layer, name, tensors))
                for layer in layers
                for name in update.modules[module][layer].parameters
            ]
            del tensors
            with self._in_parts(sent, update):
                answers = self._push(module, named, {"weight_version": str(update.version)}, gathered.begin)
            step()
        return answers

    def _check(self, update: Update[dict[str, TrainedLayer]], answer: Answer) -> None:
        dtype = DTYPES[self.args.diffusion_forward_dtype]
        live: dict[str, dict[str, Expectation]] = {}
        for module, layers in update.modules.items():
            for layer, each in layers.items():
                if not each.linear:
                    continue
                tensors = {
                    (layer, name): whole(tensor, self._gather)
                    for name, tensor in _with_pair(each).items()
                    if name != "bias"
                }
                if self._called():
                    weight = _to_send(each, layer, "weight", tensors)
                    live.setdefault(module, {})[layer] = expected_base(weight, dtype)
        self._ask_to_verify({"live": live})


class DiffusionUpdateWeightFromTensorLoRA(DiffusionUpdateWeightFromTensor):
    """Sends every weight with the adapter merged by the trainer, one layer at a time, in the weight's own dtype."""

    log_name = "Merged"

    def _read(self, model: nn.Module) -> dict[str, TrainedLayer]:
        return read_layers(model, read_adapter(model, self._mapper))


def _with_pair(layer: TrainedLayer) -> dict[str, torch.Tensor]:
    """All that a layer's weights are made of."""
    return {**layer.parameters, **(layer.pair._asdict() if layer.pair else {})}


def _to_send(
    layer: TrainedLayer, prefix: str, name: str, tensors: Mapping[tuple[str, str], torch.Tensor]
) -> torch.Tensor:
    """A parameter as it travels: a weight that has a pair is merged with it."""
    tensor = tensors[prefix, name]
    if layer.pair is None or name != "weight":
        return tensor
    return merged_weight(tensor, LayerPair(*(tensors[prefix, side] for side in LayerPair._fields)), layer.scale)
