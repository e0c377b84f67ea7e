"""Buckets as handles: CUDA IPC, or shared memory on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from sgld_lora_merge.trainer.memory import exportable_memory
from sgld_lora_merge.trainer.sync import Content, NamedTensors, Update, WeightSync
from sgld_lora_merge.trainer.transport import Answer, SyncError, Transport
from sgld_lora_merge.wire.payload import FLATTENED_BUCKET, pack, withdraw

Exported = tuple[str, str | None, list[torch.Tensor]]  # a payload, the UUID of its GPU, its memory


class HandleSync(WeightSync[Content]):
    """Every rank exports for the worker on its GPU; the first rank of an engine sends the payloads of all."""

    def _push(
        self,
        module: str,
        named: NamedTensors,
        fields: Mapping[str, Any],
        meanwhile: Callable[[], None],
        *,
        compact: bool = False,
    ) -> list[Answer]:
        """One bucket to every engine; the answers of all, on every rank.

        Args:
            named: whole tensors; they are gone when ``meanwhile`` is called, between the export and the request.
            compact: the layout as text, which our own route reads.
        """
        exported: Exported | None = None

        def export() -> None:
            nonlocal exported
            exported = self._export(module, named, compact)
            named.clear()  # the export is a copy
            meanwhile()

        try:
            self._together(export)
        except Exception:
            if exported is not None:
                withdraw(exported[0], exported[2])  # no engine has heard of it
                exported = None  # the traceback keeps this frame
            raise
        payloads = self._ranks.of_engine(exported[:2]) if exported else []
        uuids = [uuid_of_gpu for _, uuid_of_gpu in payloads]
        request = {
            "serialized_named_tensors": [payload for payload, _ in payloads],
            "payload_gpu_uuids": uuids if any(uuids) else None,
            "load_format": FLATTENED_BUCKET,
            "target_modules": [module],
            **fields,
        }
        opened: list[bool] = []

        def send(transport: Transport) -> Answer:
            try:
                return transport.update(request)
            except SyncError as error:
                opened.extend(error.payload_opened)
                raise

        try:
            return self._everyones(send)
        except Exception:  # whatever it is on this rank, it is a collective
            self._take_back(exported, opened)
            raise
        finally:
            del exported  # every engine has answered, so that nobody reads the memory any more
            if torch.cuda.is_initialized():
                torch.cuda.ipc_collect()

    @contextmanager
    def _in_parts(self, sent: int, update: Update[Content]) -> Iterator[None]:
        """A bucket of a sync that has no transaction: what fails says how much of it is live."""
        try:
            yield
        except SyncError as error:
            told = f"{sent} of {len(update.buckets)} buckets are live on the engines before this one failed"
            raise SyncError(f"{told}: {error}") from error

    def _take_back(self, exported: Exported | None, opened: list[bool]) -> None:
        """Free an export that the engine said it has not opened."""
        by_engine = self._ranks.of_engine_from_first(opened)
        if exported is not None and by_engine[self._ranks.place : self._ranks.place + 1] == [False]:
            withdraw(exported[0], exported[2])

    def _export(self, module: str, named: NamedTensors, compact: bool) -> Exported | None:
        """A payload, the UUID of its GPU, and its memory; None on a rank whose payload nobody reads."""
        if not self._ranks.serves:
            return None
        device = named[0][1].device
        uuid_of_gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
        with exportable_memory(device):
            payload, buffers = pack({module: named}, compact=compact)
        return payload, uuid_of_gpu, buffers
