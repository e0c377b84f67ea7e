"""Answer requests in a worker: turn each one into an operation, run it, and answer whatever happens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.multimodal_gen.runtime.distributed.parallel_state import get_replica_group
from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import UpdateWeightFromTensorReqInput
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch
from torch import nn

from server_patches.engine_states import EngineStates
from server_patches.operations import operation_of
from server_patches.rank import Rank
from server_patches.rank_group import RankGroup
from server_patches.rank_result import RanksDiverged
from server_patches.request_reader import RequestReader
from server_patches.two_phase import TwoPhaseCommit
from server_patches.version_stamp import label_of
from server_patches.worker_request import MergeReq, from_stock
from server_patches.worker_status import failure_message
from sgld_lora_merge.adapter.families import load_families
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.errors import ConflictError, LoraMergeError
from sgld_lora_merge.merge.base_store import policy_from
from sgld_lora_merge.merge.engine import MergeEngine
from sgld_lora_merge.settings import settings_from
from sgld_lora_merge.wire.schema import UpdateAnswer

logger = logging.getLogger(__name__)


class MergeWorker:
    """Handles this rank's part of every request, and surrounds what sglang does to the weights itself.

    Attributes:
        rank: the parts of this rank, and its state between requests.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._driver = TwoPhaseCommit(rank)

    @property
    def engine(self) -> MergeEngine:
        return self.rank.engine

    @property
    def states(self) -> EngineStates:
        return self.rank.states

    def handle(self, reqs: list[MergeReq]) -> OutputBatch:
        """Answer a `MergeReq`: the scheduler's handler for it."""
        req = reqs[0]
        context = self._driver.context_of(req)
        try:
            answer = self._driver.run(operation_of(req, self.rank, self._driver), context)
            output = {"status": 200, "success": True, **answer}
        except LoraMergeError as error:
            if isinstance(error, RanksDiverged):
                self.rank.failed = str(error)
            output = _failure(error.status, error.reason, failure_message(error, self.engine))
        except Exception as error:  # the loop must answer: a request that dies here would leave the client waiting
            logger.exception("%s failed", req.operation)
            output = _failure(500, "engine", f"{type(error).__name__}: {error}")
        staged = self.rank.staged
        output |= {
            "payload_opened": context.opened_by_rank,
            "digest": context.digest,
            "snapshot": self.rank.snapshot(),
            "failed": self.rank.failed,
            "staged_update": staged.update_id if staged is not None else None,
            "staged_bytes": staged.nbytes if staged is not None else 0,
            "sleeping": self.states.sleeping,
        }
        return OutputBatch(output=output, error=None if output["status"] == 200 else output["message"])

    def handle_stock(self, reqs: list[UpdateWeightFromTensorReqInput]) -> OutputBatch:
        """Answer sglang's own request, which comes by the scheduler's socket: the scheduler's handler for it."""
        try:
            req = self._adopt(reqs[0])
        except LoraMergeError as error:  # its fields are the same on every rank, so every rank is refused here
            output = {"success": False, "message": failure_message(error, self.engine)}
            return OutputBatch(output=output, error=output["message"])
        answered = self.handle([req])
        shown = (*UpdateAnswer.model_fields, "success", "message")
        answered.output = {name: answered.output[name] for name in shown if name in answered.output}
        return answered

    def _adopt(self, stock: UpdateWeightFromTensorReqInput) -> MergeReq:
        """Return sglang's request as one of ours.

        Raises:
            LoraMergeError: a field is wrong, or there are several replicas, of which the socket reaches only one.
        """
        req = from_stock(stock)
        replicas = self.rank.gpu_worker.server_args.dp_size
        if replicas > 1 and not req.is_full_update:
            raise ConflictError(
                f"this engine has {replicas} replicas, and the scheduler's socket reaches only one of them: "
                "POST the update to /update_weights_from_tensor, which changes all of them or none"
            )
        return req

    # around what sglang does

    def sleep(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Let sglang go to sleep; what is staged is dropped."""
        self.rank.staged = None
        self._driver.forget()
        return self.states.release(original)

    def wake(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Let sglang wake up; a rank whose adapters do not come back has failed, since it serves other weights."""
        try:
            return self.states.resume(original)
        except Exception as error:
            if not self.states.sleeping:
                self.rank.failed = (
                    f"the engine is awake, but without the adapters that were live: {error}. Restart the engine"
                )
            raise

    @contextmanager
    def base_weights_change(self, module: nn.Module) -> Iterator[None]:
        """Surround sglang's code that loads a module; drop what was planned for the old base weights."""
        self._driver.forget()
        with self.states.base_weights_change(module):
            yield

    def generated(self) -> None:
        """Warn, after a generation, of low-rank branches that it did not use."""
        views = self.states.views().items()
        self.rank.warnings.after_generation(
            {name: view.branches.idle for name, view in views if view.branches is not None}
        )

    def versions(self) -> dict[str, str]:
        """Return the version label of every module that has a version or a mixture of versions."""
        states = self.engine.states.items()
        labels = {name: label_of(state.weight_version, state.versions.named_counts) for name, state in states}
        return {name: label for name, label in labels.items() if label is not None}


def _failure(status: int, reason: str, message: str) -> dict[str, Any]:
    return {"status": status, "reason": reason, "success": False, "message": message}


def make_merge_worker(gpu_worker: Any) -> MergeWorker:
    """Make this process's worker from the settings in the environment.

    Raises:
        LoraMergeError: a variable of the environment has an invalid value.
    """
    settings = settings_from()
    replica = get_replica_group()
    states = EngineStates(gpu_worker, replica.world_size, Precision(settings.precision), policy_from(settings))
    group = RankGroup(replica, settings.agreement_timeout_s)
    reader = RequestReader(states, load_families())
    return MergeWorker(Rank(gpu_worker, states, reader, group, settings.max_staged_bytes))
