"""The engines of a sync, and the trainer's ranks that call them: a failure on one rank is raised on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from sgld_lora_merge.trainer.expected import Expectation
from sgld_lora_merge.trainer.ranks import Ranks
from sgld_lora_merge.trainer.transport import Answer, SyncError, Transport
from sgld_lora_merge.wire.schema import STATUS_ROUTE, VERIFY_ROUTE

STOCK = (
    f"an engine has no sgld-lora-merge: it answers {STATUS_ROUTE} with 404. It cannot be promised then that an answer "
    "of 200 means that every name was known and every rank has it; that a sync which fails changed nothing; that "
    "buckets and engines go live together; that full weights reach layers which have had LoRA. Nothing is verified, "
    "no weight_version is kept, and a lost answer is not asked for again"
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Engines:
    """All engines of a sync. Every method but `mine` is a collective.

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
            self._stock = any(self.ranks.gather(self.run_on_all_ranks(self._is_plugin_missing)))
            if self._stock and self.ranks.rank == 0:
                logger.warning(STOCK)
        return self._stock

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

    def _is_plugin_missing(self) -> bool:
        for transport in self.mine:
            try:
                transport.ask(STATUS_ROUTE)
            except SyncError as error:
                if error.answered == 404:
                    return True
                raise SyncError(f"is the engine well? {error}") from error
        return False
