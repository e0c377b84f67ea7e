"""One rank of the engine: its parts, and what it keeps from one request to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from server_patches.engine_states import EngineStates
from server_patches.rank_group import RankGroup
from server_patches.rank_result import RanksDiverged
from server_patches.request_context import RequestContext
from server_patches.request_reader import RequestReader
from server_patches.run_warnings import RunWarnings
from server_patches.worker_request import MergeReq
from server_patches.worker_status import merge_state_of, snapshot
from sgld_lora_merge.errors import ConflictError
from sgld_lora_merge.merge.engine import MergeEngine, ModuleState, ModuleUpdate, Plan
from sgld_lora_merge.merge.staging import StagedPairs
from sgld_lora_merge.wire.schema import DEFAULT_ADAPTER


@dataclass(frozen=True)
class UndoPoint:
    """The state that an undo restores, until the next change.

    Attributes:
        plan: what was written; None where no weights were.
    """

    states: Mapping[str, ModuleState]
    staged: StagedPairs | None
    timings: Mapping[str, Mapping[str, float]]
    plan: Plan | None


@dataclass(eq=False)
class Rank:
    """The parts of one rank, and its state between requests.

    Attributes:
        gpu_worker: sglang's worker; its pipeline holds the modules.
        states: the modules, and what sglang is doing with them.
        reader: makes pairs of requests.
        group: the ranks that serve one request together.
        max_staged_bytes: limit for the buckets of one update.
        warnings: the warnings that this run has had already.
        staged: the open update, of which buckets have come; None where there is none.
        timings: of the last update of each module, milliseconds by stage.
        failed: why the engine must be restarted; None where it need not.
        undo_point: the state that an undo restores; None where nothing can be undone.
    """

    gpu_worker: Any
    states: EngineStates
    reader: RequestReader
    group: RankGroup
    max_staged_bytes: int
    warnings: RunWarnings = field(default_factory=RunWarnings)
    staged: StagedPairs | None = None
    timings: dict[str, Mapping[str, float]] = field(default_factory=dict)
    failed: str | None = None
    undo_point: UndoPoint | None = None

    @property
    def engine(self) -> MergeEngine:
        return self.states.engine

    def check_alive(self) -> None:
        """
        Raises:
            RanksDiverged: this rank has failed before. Every agreement reports it, so that no rank waits for this one.
        """
        if self.failed is not None:
            raise RanksDiverged(self.failed)

    def check_plan(self, plan: Plan) -> None:
        """Check that a plan of an earlier request can be written now, and restore the parameters that it writes.

        Raises:
            ConflictError: the engine is asleep, or an adapter of sglang's own is in force.
        """
        self.states.prepare([part.module for part in plan.modules])

    def read_updates(self, context: RequestContext) -> list[ModuleUpdate]:
        """Read this rank's payload, or the uploaded file, into pairs by module."""
        staged = self.staged_for(context.req).pairs if context.req.update_id is not None else {}
        self.states.prepare([*self.reader.modules(context.req), *staged])
        return self.reader.updates(context)

    def staged_for(self, req: MergeReq) -> StagedPairs:
        """Return the staged buckets of a request's update: none where another update or no update is staged.

        Raises:
            ConflictError: buckets of the update were accepted before, and are gone.
        """
        if self.staged is not None and self.staged.update_id == req.update_id:
            return self.staged
        if req.continues:
            raise ConflictError(f"the buckets of update {req.update_id!r} that were staged are gone; send it again")
        return StagedPairs(req.update_id or "", req.adapter or DEFAULT_ADAPTER, {}, 0)

    def with_staged(self, req: MergeReq, updates: list[ModuleUpdate]) -> list[ModuleUpdate]:
        """Join a request's pairs with those of the buckets before it."""
        if req.update_id is None:
            return updates
        staged = self.staged_for(req).pairs
        if not staged:
            return updates
        joined = [replace(update, pairs=[*staged.get(update.module, ()), *update.pairs]) for update in updates]
        named = {update.module for update in updates}
        return joined + [
            ModuleUpdate(module, pairs, whole=True, adapter=req.adapter or DEFAULT_ADAPTER)
            for module, pairs in staged.items()
            if module not in named
        ]

    def save_undo_point(self, context: RequestContext, plan: Plan | None = None) -> None:
        """Keep the present state for an undo, just before one replica of several changes it."""
        if context.req.step == "finish":
            states = {name: replace(state) for name, state in self.engine.states.items()}
            self.undo_point = UndoPoint(states, self.staged, dict(self.timings), plan)

    def restore(self, undo_point: UndoPoint) -> None:
        """Restore the state of an undo point, after its weights have been written back."""
        if undo_point.plan is not None:
            self.engine.states = dict(undo_point.states)
        self.staged, self.timings = undo_point.staged, dict(undo_point.timings)

    def snapshot(self) -> dict[str, Any]:
        """Return every module as the status route shows it."""
        return snapshot(self.engine, {name: self._state_word(name) for name in self.states.modules()}, self.timings)

    def _state_word(self, module: str) -> str:
        if self.failed is not None:
            return "failed"
        if self.staged is not None and module in self.staged.pairs:
            return "staging"
        return merge_state_of(self.engine, module)
