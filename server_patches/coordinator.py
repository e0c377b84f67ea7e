"""Send one change at a time to the workers, and record every change. No tensor is handled here."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from sglang.multimodal_gen.runtime.scheduler_client import async_scheduler_client

from server_patches.answers import Answer, error_answer, error_from, merge_answer, update_answer
from server_patches.engine_record import EngineRecord
from server_patches.ledger import NamedBucket
from server_patches.replicas import Replicas
from server_patches.request_log import LogEntry
from server_patches.worker_request import MergeReq
from sgld_lora_merge.errors import RequestError, printable

logger = logging.getLogger(__name__)

PATIENCE_S = 0.1  # how long a status waits for the workers; an idle worker answers in 1 to 5 ms


class Coordinator:
    """Runs every change of one server process.

    Attributes:
        record: the state of the workers, and of every update.
        one_at_a_time: lock that is held during every change.

    Args:
        replicas: the workers.
        staging_timeout_s: an update that waits longer for its next bucket or its commit is abandoned.
        refusal: why this engine takes no updates at all; None where it takes them.
    """

    def __init__(self, replicas: Replicas, staging_timeout_s: float, refusal: str | None = None) -> None:
        self.record = EngineRecord()
        self.one_at_a_time = asyncio.Lock()
        self._replicas = replicas
        self._staging_timeout_s = staging_timeout_s
        self._refusal = refusal
        self._timer: asyncio.TimerHandle | None = None
        self._refreshing: asyncio.Future[None] | None = None

    # the state of the workers

    async def refresh(self) -> None:
        """Ask the workers for their state, which other code than this process may have changed.

        The request waits until a running generation ends.
        """
        async with self.one_at_a_time:  # between the two steps of an update the replicas differ, which is no fault
            await self._refresh()

    async def refresh_if_idle(self) -> None:
        """Refresh the record if the workers answer at once, which they do unless they generate or are gone."""
        if self.record.failed is not None:
            return
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.ensure_future(self.refresh())
        await asyncio.wait({self._refreshing}, timeout=PATIENCE_S)

    async def _refresh(self) -> None:
        ledger = self.record.ledger
        try:
            output = await self._ask_and_record(MergeReq([], operation="status"))
            open_id = ledger.open_id
            if open_id is not None and open_id != output["staged_update"]:
                ledger.abandon(open_id, "the engine went to sleep")
            self._follow_base(output)
        except Exception as error:
            logger.warning("the workers' LoRA merge state is not known: %s", printable(str(error), 2000))

    def _follow_base(self, output: dict[str, Any]) -> None:
        """End the live updates of modules that hold no adapter any more, whatever removed it."""
        self.record.ledger.base_is_live([name for name, each in output["snapshot"].items() if not each["adapters"]])

    # changes

    async def update(self, req: MergeReq, bucket: NamedBucket | None, entry: LogEntry, ignored: list[str]) -> Answer:
        """Send an update, or a bucket of one, to the workers, and record it.

        Raises:
            LoraMergeError: the bucket has no place in its update, or the workers were not reached.
        """
        ledger = self.record.ledger
        async with self.one_at_a_time:
            if bucket is not None and ledger.is_live(bucket.update_id):
                await self._refresh()  # other code may have replaced it since, which a repeated answer would hide
            if bucket is not None and (answered := ledger.admit(bucket)) is not None:
                entry.repeated = True
                return 200, answered
            state = "live" if bucket is None else ledger.next_state(bucket)
            req.goes_live = state == "live"
            req.continues = bucket is not None and ledger.open_id == bucket.update_id
            output = await self._ask_and_record(req)
            if output["status"] != 200:
                entry.reason = output["reason"]
                return error_answer(output["status"], output["message"], output["payload_opened"])
            answer = update_answer(req, output, ignored)
            if bucket is not None:
                self._accept(bucket, answer)
            if state == "live":
                ended = "replaced" if req.is_whole_adapter or req.is_full_update else None
                adapter = None if req.is_full_update else req.adapter
                ledger.step(answer.get("modules") or req.target_modules, ended, req.update_id, adapter)
            self.record.received(entry.nbytes, live=state == "live", timings_ms=answer.get("timings_ms"))
            return 200, answer

    async def reset(self, target_modules: list[str] | None, adapter: str | None) -> dict[str, Any]:
        """Restore the base weights, or remove one adapter.

        Raises:
            LoraMergeError: the workers refused; the methods below raise it too.
        """
        req = MergeReq([], operation="reset", target_modules=target_modules, adapter=adapter)
        answer = merge_answer(await self.ask(req))
        if answer["modules"]:
            self.record.ledger.step(answer["modules"], "reset", adapter=adapter)
        return answer

    async def rollback(self) -> dict[str, Any]:
        """Restore what was live one step before."""
        answer = merge_answer(await self.ask(MergeReq([], operation="rollback")))
        self.record.ledger.rolled_back()
        return answer

    async def commit(self, update_id: str, entry: LogEntry) -> dict[str, Any]:
        """Make a staged update live; a repeated commit gets the answer of the first one."""
        ledger = self.record.ledger
        if (answered := ledger.to_commit(update_id)) is not None:
            entry.repeated = True
            return answered
        entry.weight_version = ledger.updates[update_id].terms["weight_version"]
        req = MergeReq([], operation="commit", update_id=update_id, weight_version=entry.weight_version)
        answer = merge_answer(await self.ask(req))
        ledger.committed(update_id, answer)
        ledger.step(answer["modules"], "replaced", update_id, ledger.updates[update_id].adapter)
        self.record.received(0, live=True, timings_ms=answer["timings_ms"])
        self._start_timer()
        return answer

    async def abort(self, update_id: str) -> dict[str, Any]:
        """Drop an update that is not live yet."""
        self.record.ledger.check_abort(update_id)
        output = await self.ask(MergeReq([], operation="abort", update_id=update_id))
        self.record.ledger.abandon(update_id, "its sender aborted it")
        self._start_timer()
        return {"success": True, "message": output["message"]}

    async def ask(self, req: MergeReq) -> dict[str, Any]:
        """Ask the workers; return their output if it is a success.

        Raises:
            LoraMergeError: it is not; with their status and message.
        """
        output = await self._ask_and_record(req)
        if output["status"] != 200:
            raise error_from(output)
        return output

    async def _ask_and_record(self, req: MergeReq) -> dict[str, Any]:
        if self._refusal is not None:
            raise RequestError(self._refusal)
        output = await self._replicas.ask(req)
        self.record.take_in(output)
        if output["status"] != 200:  # a full update that failed has ended what was live
            self._follow_base(output)
        if output["failed"] is not None:
            # sglang's own way of saying so: /health and every POST answer 503 from now on
            async_scheduler_client.mark_failed(output["failed"])
        return output

    # updates in buckets

    def _accept(self, bucket: NamedBucket, answer: dict[str, Any]) -> None:
        """Record an accepted bucket, add to the answer which update it ends, and start the next bucket's timer."""
        ledger = self.record.ledger
        if (other := ledger.abandons(bucket)) is not None:
            there = ledger.updates[other]
            answer["message"] += f"; update {other!r} is abandoned with {len(there.buckets)} of {there.count} buckets"
        ledger.accept(bucket, answer)
        self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if (open_id := self.record.ledger.open_id) is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._staging_timeout_s, lambda: loop.create_task(self._time_out(open_id)))

    async def _time_out(self, update_id: str) -> None:
        async with self.one_at_a_time:
            if self.record.ledger.open_id == update_id:
                name = printable(repr(update_id), 200)
                logger.warning("update %s is abandoned: nothing came for %g s", name, self._staging_timeout_s)
                await self._ask_and_record(MergeReq([], operation="abort", update_id=update_id))
                self.record.ledger.abandon(update_id, f"nothing came for {self._staging_timeout_s:g} s")
