"""Buckets as handles: CUDA IPC, or shared memory on a CPU. Every rank exports for the worker on its GPU."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from sgld_lora_merge.merge.fingerprint import payload_fingerprint
from sgld_lora_merge.trainer.engines import Engines
from sgld_lora_merge.trainer.memory import exportable_memory
from sgld_lora_merge.trainer.ranks import Ranks
from sgld_lora_merge.trainer.sync_update import (
    Contents,
    GatheredBucket,
    NamedTensors,
    SyncUpdate,
    parts_are_live,
)
from sgld_lora_merge.trainer.transport import Answer, SyncError, Transport
from sgld_lora_merge.wire.payload import FLATTENED_BUCKET, pack, withdraw


class Exported(NamedTuple):
    """A payload of one rank.

    Attributes:
        uuid: of the GPU; None for a CPU's memory.
        fingerprint: of the bytes, which the engine compares with those that it opens.
    """

    payload: str
    uuid: str | None
    fingerprint: str
    memory: list[torch.Tensor]


# Who holds which memory, until when:
#
#   gathered tensors   of one bucket, in ``named``; dropped as soon as the export, a copy, is made
#   next bucket        allocated then, and gathered beside the export as soon as every rank has got that far
#   export             one flat buffer, held by this frame until every engine has answered: workers read it until then
#   engine             opens the handle once, copies what it keeps, and closes it before it answers
#
# and where it fails:
#
#   before the request         nobody has heard of the export: `withdraw` frees it
#   an engine has refused      its answer says by rank what was opened; what was not is withdrawn, the rest is closed
#   no answer                  what was opened is not known: the export is dropped; torch frees it when a worker that
#                              has opened it closes it, and one that nobody has opened stays
#
# After the answers `ipc_collect` gives the memory of closed exports back to the allocator.


class ByHandles:
    """Sends each bucket's handles, of all ranks of an engine, from the engine's first rank.

    In a transaction several engines stage the update and go live when all of them have all of it.
    """

    extra_steps = 0
    faults_on_stock: Sequence[str] = ()

    def __init__(self, _: Namespace, contents: Contents, transports: Sequence[Transport], gpus_per_engine: int) -> None:
        ranks = Ranks(len(transports), gpus_per_engine)
        self.engines = Engines(transports, ranks, [] if ranks.engine is None else [transports[ranks.engine]])
        self._contents = contents
        self._answers: list[Answer] = []

    @property
    def _in_transaction(self) -> bool:
        return self._contents.transactional and not self.engines.detect_stock_engines()

    @property
    def _waits_for_commit(self) -> bool:
        """Whether a complete update waits for the commit that lets all engines go live."""
        return self._in_transaction and len(self.engines.transports) > 1

    def send(self, update: SyncUpdate, index: int, bucket: GatheredBucket) -> None:
        module, layers = update.buckets[index]
        fields = self._contents.fields(update, module, layers, stock=self.engines.detect_stock_engines())
        if self._in_transaction:
            fields |= {
                "update_id": update.update_id,
                "bucket_index": index,
                "num_buckets": len(update.buckets),
                "commit": not self._waits_for_commit,
            }
        with nullcontext() if self._in_transaction else parts_are_live(index, update):
            self._answers = self._push(module, bucket, fields)

    def finish(self, update: SyncUpdate, step: Callable[[], None]) -> list[Answer]:
        answers, self._answers = self._answers, []
        if not self._waits_for_commit:
            return answers
        return self.engines.commit(update.update_id)

    def abort(self, update: SyncUpdate) -> None:
        answers, self._answers = self._answers, []
        if not self._in_transaction or not (answers or self._waits_for_commit):
            return
        self.engines.abort(update.update_id)

    def _push(self, module: str, bucket: GatheredBucket, fields: dict[str, Any]) -> list[Answer]:
        """Send one bucket to every engine; return the answers of all, on every rank."""
        exported: Exported | None = None

        def export() -> None:
            nonlocal exported
            named = bucket.take()
            exported = self._export(module, named)
            named.clear()  # the export is a copy
            bucket.prepare_next()

        try:
            self.engines.run_on_all_ranks(export)
        except Exception:
            if exported is not None:
                withdraw(exported.payload, exported.memory)  # no engine has heard of it
                exported = None  # the traceback keeps this frame
            raise
        bucket.start_next()
        payloads = self.engines.ranks.gather_of_engine(exported[:3]) if exported else []
        uuids = [uuid for _, uuid, _ in payloads]
        request = {
            "serialized_named_tensors": [payload for payload, _, _ in payloads],
            "payload_gpu_uuids": uuids if any(uuids) else None,
            "load_format": FLATTENED_BUCKET,
            "target_modules": [module],
            **fields,
        }
        if not self.engines.detect_stock_engines():
            request["payload_fingerprint"] = [fingerprint for _, _, fingerprint in payloads]
        opened: list[bool] = []

        def send(transport: Transport) -> Answer:
            try:
                return transport.update(request)
            except SyncError as error:
                opened.extend(error.payload_opened)
                raise

        try:
            return self.engines.call(send)
        except Exception:  # whatever it is on this rank, it is a collective
            self._withdraw_unopened(exported, opened)
            raise
        finally:
            del exported  # every engine has answered, so that nobody reads the memory any more
            if torch.cuda.is_initialized():
                torch.cuda.ipc_collect()

    def _withdraw_unopened(self, exported: Exported | None, opened: list[bool]) -> None:
        """Free an export that the engine said it has not opened."""
        ranks = self.engines.ranks
        by_place = ranks.of_engine_from_first(opened)
        if exported is not None and by_place[ranks.place : ranks.place + 1] == [False]:
            withdraw(exported.payload, exported.memory)

    def _export(self, module: str, named: NamedTensors) -> Exported | None:
        """Return this rank's payload; None on a rank whose payload nobody reads."""
        if not self.engines.ranks.serves:
            return None
        device = named[0][1].device
        uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
        with exportable_memory(device):
            # the layout as text is read by our own route only
            payload, buffers = pack({module: named}, compact=self._in_transaction)
        return Exported(payload, uuid, payload_fingerprint({module: buffers[0]}), buffers)
