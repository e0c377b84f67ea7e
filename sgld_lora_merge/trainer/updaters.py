"""The strategies: what a sync sends, and how it travels."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from safetensors.torch import save

from sgld_lora_merge.adapter_file import LAYER_SCALING
from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.families import load_families
from sgld_lora_merge.payload import FLATTENED_BUCKET, pack, withdraw
from sgld_lora_merge.protocol import LORA_MERGE
from sgld_lora_merge.trainer.lora import LoRASync
from sgld_lora_merge.trainer.memory import exportable_memory
from sgld_lora_merge.trainer.model import TrainedAdapter
from sgld_lora_merge.trainer.ranks import Ranks
from sgld_lora_merge.trainer.sync import NamedTensors, Update
from sgld_lora_merge.trainer.transport import Answer, SyncError, Transport

LORA_IPC_WEIGHT_UPDATE_MODE = LORA_MERGE

logger = logging.getLogger(__name__)

Exported = tuple[str, str | None, list[torch.Tensor]]  # a payload, the UUID of its GPU, its memory


class DiffusionUpdateWeightFromTensorLoRAIPC(LoRASync):
    """Sends A and B as handles, CUDA IPC or shared memory; the engines, on this machine's GPUs, merge.

    Several engines stage the update and go live when all of them have all of it.
    """

    log_name = "LoRA IPC"

    def _send(self, update: Update[TrainedAdapter]) -> list[Answer]:
        answers: list[Answer] = []
        try:
            for index, (module, layers, named) in enumerate(self._whole_buckets(update)):
                answers = self._push(update, index, module, layers, named)
        except SyncError:
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
        return len(self._transports) > 1

    def _push(
        self, update: Update[TrainedAdapter], index: int, module: str, layers: list[str], named: NamedTensors
    ) -> list[Answer]:
        """One bucket to every engine; the answers of all, on every rank."""
        exported = self._together(partial(self._export, module, named))
        named.clear()  # the export is a copy
        payloads = self._ranks.of_engine(exported[:2]) if exported else []
        fields = self._fields(update, index, module, layers, payloads)
        opened: list[bool] = []

        def send(transport: Transport) -> Answer:
            try:
                return transport.update(fields)
            except SyncError as error:
                opened.extend(error.payload_opened)
                raise

        try:
            return self._everyones(send)
        except SyncError:
            self._take_back(exported, opened)
            raise
        finally:
            del exported  # every engine has answered, so that nobody reads the memory any more
            if torch.cuda.is_initialized():
                torch.cuda.ipc_collect()

    def _take_back(self, exported: Exported | None, opened: list[bool]) -> None:
        """Free an export that the engine said it has not opened."""
        by_engine = self._ranks.of_engine_from_first(opened)
        if exported is not None and by_engine[self._ranks.place : self._ranks.place + 1] == [False]:
            withdraw(exported[0], exported[2])

    def _export(self, module: str, named: NamedTensors) -> Exported | None:
        """A payload, the UUID of its GPU, and its memory; None on a rank whose payload nobody reads."""
        if not self._ranks.serves:
            return None
        device = named[0][1].device
        uuid_of_gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
        with exportable_memory(device):
            payload, buffers = pack({module: named})
        return payload, uuid_of_gpu, buffers

    def _fields(
        self,
        update: Update[TrainedAdapter],
        index: int,
        module: str,
        layers: list[str],
        payloads: Sequence[tuple[Any, ...]],
    ) -> dict[str, Any]:
        scales = self._own_scales(update.modules[module])
        scaling = {layer: scales[layer] for layer in layers if layer in scales}
        uuids = [uuid_of_gpu for _, uuid_of_gpu in payloads]
        return {
            "serialized_named_tensors": [payload for payload, _ in payloads],
            "payload_gpu_uuids": uuids if any(uuids) else None,
            "load_format": FLATTENED_BUCKET,
            "target_modules": [module],
            "weight_update_mode": LORA_IPC_WEIGHT_UPDATE_MODE,
            "lora_alpha": self.args.lora_alpha,
            "lora_rank": self.args.lora_rank,
            "weight_version": str(update.version),
            "update_id": update.update_id,
            "bucket_index": index,
            "num_buckets": len(update.buckets),
            "commit": not self._hold,
            "layer_scaling": {module: scaling} if scaling else None,
        }

    def _abort(self, update_id: str) -> None:
        """Free what engines have staged; one that has nothing of it says so, which is no further fault."""
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

    def _send(self, update: Update[TrainedAdapter]) -> list[Answer]:
        prefixes = self._prefixes(update.modules)
        tensors: dict[str, torch.Tensor] = {}
        for module, _, named in self._whole_buckets(update):
            if self._called():
                tensors |= {prefixes[module] + name: tensor.cpu().contiguous() for name, tensor in named}
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
            file = save(tensors, {LAYER_SCALING: json.dumps(scaling)}) if tensors else None
            return [transport.update(fields, file) for transport in self._called()]

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
