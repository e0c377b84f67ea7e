"""Ask all replicas of an engine as one: each plans a change before any of them writes.

    prepare   every replica plans, and keeps the plan; nothing that is live changes
    finish    every replica writes its plan
    undo      after a failure: plans are dropped, and what was written is undone, history included

With a single replica each change is one request, as its ranks agree among themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from server_patches.rank_result import RanksDiverged
from server_patches.worker_request import MergeReq
from sgld_lora_merge.errors import LoraMergeError

Output = dict[str, Any]

# they write no weights, so the replicas need not agree on them
_ONE_STEP = ("status", "verify", "resolve", "abort")
_DIFFERENT = {
    "status": 400,
    "reason": "request",
    "success": False,
    "message": "the replicas were sent different updates: their payloads' layers, scales, dtypes or values differ. "
    "Nothing was changed",
}
_COMPARED = ("state", "weight_version", "versions", "layers", "rank", "scale", "merge_precision")


class NoAnswer(LoraMergeError):
    """The workers did not answer; whether they did what was asked is not known."""

    reason = "no_answer"


class WorkersGone(NoAnswer):
    """A worker process has ended: only a restart brings the engine back."""

    status = RanksDiverged.status
    reason = RanksDiverged.reason


class Replicas:
    """Asks every replica, and joins their outputs into one.

    Args:
        ask_one: sends a request to one replica and returns its rank 0's output; raises `NoAnswer`.
        count: of replicas.
    """

    def __init__(self, ask_one: Callable[[int, MergeReq], Awaitable[Output]], count: int) -> None:
        self._ask_one = ask_one
        self._count = count

    async def ask(self, req: MergeReq) -> Output:
        """Return one output for all replicas: a success is one everywhere, and anything else has changed none.

        ``failed`` in it says that a replica could not undo what another one refused.

        Raises:
            NoAnswer: from one of them; nothing has changed.
        """
        if self._count == 1 or req.operation in _ONE_STEP:
            return join_outputs(await self._ask_all(req))
        prepared = await self._ask_all(replace(req, step="prepare"))
        if _all_succeeded(prepared) and len({output["digest"] for output in prepared}) > 1:
            prepared = [{**output, **_DIFFERENT} for output in prepared]
        if not _all_succeeded(prepared):
            return join_outputs(prepared) | _joined_state(await self._ask_all(MergeReq([], operation="undo")))
        try:
            finished = await self._ask_all(req.finish())
        except NoAnswer as error:
            failure = join_outputs(prepared) | {"status": error.status, "reason": error.reason, "message": str(error)}
        else:
            if _all_succeeded(finished):
                return join_outputs(finished)
            failure = join_outputs(finished)
            if req.is_full_update:  # sglang's own, which cannot be taken back
                written = [number for number, output in enumerate(finished) if output["status"] == 200]
                return failure | {"message": f"{failure['message']}; the new weights are on the replicas {written}"}
        return failure | await self._undo(failure["message"])

    async def _ask_all(self, req: MergeReq) -> list[Output]:
        """Ask every replica, also where another one does not answer."""
        outputs = await asyncio.gather(*(self._ask_one(n, req) for n in range(self._count)), return_exceptions=True)
        for output in outputs:
            if isinstance(output, BaseException):
                raise output
        return [output for output in outputs if not isinstance(output, BaseException)]

    async def _undo(self, why: str) -> Output:
        """Undo what any replica has written; return the fields that the answer gets by that."""
        state: Output = {}
        try:
            undone = await self._ask_all(MergeReq([], operation="undo"))
            state = _joined_state(undone)
            if _all_succeeded(undone):
                return state
            problem = _failures(undone)
        except NoAnswer as error:
            problem = str(error)
        failed = f"{why}; then a replica could not go back: {problem}. Restart the engine"
        failure = {"status": RanksDiverged.status, "reason": RanksDiverged.reason}
        return state | failure | {"message": failed, "failed": failed}


def join_outputs(outputs: Sequence[Output]) -> Output:
    """Join the outputs of all replicas: the worst status, all messages, every rank's payload, the slowest times."""
    worst = max(outputs, key=lambda output: output["status"])
    answer = {**worst, "payload_opened": [opened for output in outputs for opened in output["payload_opened"]]}
    if not _all_succeeded(outputs):
        answer["message"] = _failures(outputs)
    if "timings_ms" in worst:
        answer["timings_ms"] = {
            stage: max(output["timings_ms"][stage] for output in outputs) for stage in worst["timings_ms"]
        }
    if "mismatched" in worst:
        answer |= _join_verified(outputs)
    return answer | _joined_state(outputs)


def differing(snapshots: Sequence[Mapping[str, Any]]) -> str | None:
    """Return where the replicas' modules are not in the same state, as a sentence; None where they are."""
    wrong = []
    for module, first in snapshots[0].items():
        for number, snapshot in enumerate(snapshots):
            other = snapshot.get(module, {})
            if fields := [name for name in _COMPARED if first[name] != other.get(name)]:
                has = ", ".join(f"{name} {other.get(name)!r} instead of {first[name]!r}" for name in fields)
                wrong.append(f"{module} on replica {number} has {has}")
    if not wrong:
        return None
    return f"the replicas differ: {'; '.join(wrong)}. POST /lora_merge/reset brings them together"


def _joined_state(outputs: Sequence[Output]) -> Output:
    """Return the state for the record: replica 0's modules, and whether the others have the same."""
    return {
        "snapshot": outputs[0]["snapshot"],
        "failed": next((output["failed"] for output in outputs if output["failed"] is not None), None),
        "staged_update": outputs[0]["staged_update"],
        "sleeping": any(output["sleeping"] for output in outputs),
        "staged_bytes": max(output["staged_bytes"] for output in outputs),
        "differing": differing([output["snapshot"] for output in outputs]),
    }


def _join_verified(outputs: Sequence[Output]) -> Output:
    """Join answers to a verify: a layer is right if it is right on every replica."""
    mismatched = list(dict.fromkeys(layer for output in outputs for layer in output["mismatched"]))
    messages = {output["message"] for output in outputs}
    by_replica = "; ".join(f"replica {number}: {output['message']}" for number, output in enumerate(outputs))
    return {
        "success": not mismatched,
        "mismatched": mismatched,
        "message": messages.pop() if len(messages) == 1 else by_replica,
    }


def _all_succeeded(outputs: Sequence[Output]) -> bool:
    return all(output["status"] == 200 for output in outputs)


def _failures(outputs: Sequence[Output]) -> str:
    """Return what failed: once where every replica says the same, else by replica."""
    messages = {number: output["message"] for number, output in enumerate(outputs) if output["status"] != 200}
    if len(messages) == len(outputs) and len(set(messages.values())) == 1:
        return str(outputs[0]["message"])
    return "; ".join(f"replica {number}: {message}" for number, message in messages.items())
