"""The engines of a sync, and the trainer's ranks that call them: a failure on one rank is raised on all ranks."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from sgld_lora_merge.trainer.expected import Expectation
from sgld_lora_merge.trainer.ranks import Ranks
from sgld_lora_merge.trainer.transport import Answer, SyncError, Transport
from sgld_lora_merge.wire.schema import ABORT_ROUTE, COMMIT_ROUTE, ROLLBACK_ROUTE, STATUS_ROUTE, VERIFY_ROUTE

STOCK = (
    f"an engine has no sgld-lora-merge: it answers {STATUS_ROUTE} with 404. It cannot be promised then that an answer "
    "of 200 means that every name was known and every rank has it; that a sync which fails changed nothing; that "
    "buckets and engines go live together; that full weights reach layers which have had LoRA. Nothing is verified, "
    "no weight_version is kept, and a lost answer is not asked for again"
)

_NUMBER = re.compile("[0-9]{1,18}")  # a version of ours; those of other trainers may be words

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Engines:
    """All engines of a sync. Every method but `abort` is a collective.

    Args:
        transports: one an engine.
        ranks: the trainer's.
        mine: the engines that this rank calls.
    """

    def __init__(self, transports: Sequence[Transport], ranks: Ranks, mine: Sequence[Transport]) -> None:
        self.transports, self.ranks, self.mine = list(transports), ranks, list(mine)
        self._stock: bool | None = None

    def detect_stock_engines(self) -> bool:
        """Return whether some engine has no plugin; it gets none of the fields that it would ignore. Asked once."""
        if self._stock is None:
            self.highest_version()
        return bool(self._stock)

    def highest_version(self) -> int:
        """Return the largest number that any engine has had as a version; 0 where there is none."""
        mine = self.run_on_all_ranks(lambda: [_status_of(transport) for transport in self.mine])
        statuses = [status for rank in self.ranks.gather(mine) for status in rank]
        if self._stock is None:
            self._stock = None in statuses
            if self._stock and self.ranks.rank == 0:
                logger.warning(STOCK)
        return max((number for status in statuses if status for number in _numbers(status)), default=0)

    def run_on_all_ranks(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` on every rank; return its result only if all ranks succeeded.

        Raises:
            SyncError: it failed on another rank; on the rank where it failed its own exception is raised.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as raised:  # whatever it is, the other ranks wait
            error = raised
        faults = self.ranks.gather(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, fault in enumerate(faults):
            if fault is not None:
                raise SyncError(f"rank {rank}: {fault}")
        return result  # type: ignore[return-value]  # there was no error

    def call(self, call: Callable[[Transport], Answer]) -> list[Answer]:
        """Call every engine, each from the rank that calls it; return all answers on every rank."""
        mine = self.run_on_all_ranks(lambda: [call(transport) for transport in self.mine])
        return [answer for answers in self.ranks.gather(mine) for answer in answers]

    def verify(self, expected: Mapping[str, Mapping[str, Mapping[str, Expectation]]]) -> None:
        """Ask all engines whether their weights are what they must be.

        Args:
            expected: "live" or "base" -> module -> layer -> what the weight must be; of ranks that call an engine.

        Raises:
            SyncError: they are not.
        """

        def ask() -> None:
            for transport in self.mine:
                for weights, modules in expected.items():
                    if modules:
                        transport.ask(VERIFY_ROUTE, {"modules": modules, "weights": weights})

        self.run_on_all_ranks(ask)

    def commit(self, update_id: str) -> list[Answer]:
        """Make an update live that every engine has staged; return the answers of all engines on every rank.

        Raises:
            SyncError: an engine did not. The others are brought back, and the message says which engine has what.
        """
        mine = self.run_on_all_ranks(lambda: [_commit(transport, update_id) for transport in self.mine])
        results = [result for rank in self.ranks.gather(mine) for result in rank]
        if not any(isinstance(result, str) for result in results):
            return [result for result in results if not isinstance(result, str)]
        mine_now = self.run_on_all_ranks(lambda: [_bring_back(transport, update_id) for transport in self.mine])
        now = [each for rank in self.ranks.gather(mine_now) for each in rank]
        each_has = "; ".join(f"engine {index} {has}" for index, has in enumerate(now))
        failed = "; ".join(f"engine {i}: {result}" for i, result in enumerate(results) if isinstance(result, str))
        raise SyncError(f"update {update_id!r} did not become live everywhere. {failed}. Now {each_has}")

    def abort(self, update_id: str) -> None:
        """Let the engines of this rank drop what they have staged of an update."""
        for transport in self.mine:
            try:
                transport.ask(ABORT_ROUTE, {"update_id": update_id})
            except SyncError as error:  # an engine that has nothing of it says so, which is no fault
                logger.debug("update %s was not aborted: %s", update_id, error)


def _status_of(transport: Transport) -> Answer | None:
    """Return an engine's status; None of an engine without the plugin."""
    try:
        return transport.ask(STATUS_ROUTE)
    except SyncError as error:
        if error.answered == 404:
            return None
        raise SyncError(f"is the engine well? {error}") from error


def _numbers(status: Answer) -> Iterator[int]:
    """Return the numbers among all versions that an engine tells of."""
    modules = status["modules"].values()
    named = {each.get("weight_version") for each in (*modules, *status["updates"])}
    named.update(*(each.get("versions") or () for each in modules))
    return (int(name) for name in named if name is not None and _NUMBER.fullmatch(name))


def _commit(transport: Transport, update_id: str) -> Answer | str:
    """Return the answer, or why there is none."""
    try:
        return transport.ask(COMMIT_ROUTE, {"update_id": update_id})
    except SyncError as error:
        return str(error)


def _bring_back(transport: Transport, update_id: str) -> str:
    """Take an update back from an engine, where it is live; return what the engine has then."""
    try:
        states = {each["update_id"]: each["state"] for each in transport.ask(STATUS_ROUTE)["updates"]}
        if states.get(update_id) == "live":
            transport.ask(ROLLBACK_ROUTE, {})
        elif states.get(update_id) in ("staging", "staged"):
            transport.ask(ABORT_ROUTE, {"update_id": update_id})
        modules = transport.ask(STATUS_ROUTE)["modules"]
        versions = {name: each["weight_version"] for name, each in modules.items() if each["weight_version"]}
        return f"has {versions or 'its base weights'}"
    except SyncError as error:
        return f"could not be brought back, and what it has is not known: {error}"
