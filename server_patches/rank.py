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
from server_patches.worker_status import how_it_is_held, snapshot
from sgld_lora_merge.errors import ConflictError
from sgld_lora_merge.merge.engine import MergeEngine, ModuleState, ModuleUpdate, Plan
from sgld_lora_merge.merge.staging import StagedPairs
from sgld_lora_merge.wire.schema import DEFAULT_ADAPTER


@dataclass(frozen=True)
class Before:
    """What a change can be taken back to, until the next change.

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
        max_staged_bytes: of one update's buckets.
        warnings: what was said once about this run.
        staged: an update of which buckets have come.
        timings: of the last update of each module, milliseconds by stage.
        failed: why the engine must be restarted; None where it need not.
        before: what an undo goes back to.
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
    before: Before | None = None

    @property
    def engine(self) -> MergeEngine:
        return self.states.engine

    def check_alive(self) -> None:
        """
        Raises:
            RanksDiverged: this rank has failed before. It says so in every agreement, or the others would wait for it.
        """
        if self.failed is not None:
            raise RanksDiverged(self.failed)

    def check_plan(self, plan: Plan) -> None:
        """Check that a plan of an earlier request can be written now, and bring its weights to where it writes.

        Raises:
            ConflictError: the engine is asleep, or an adapter of sglang's own is in force.
        """
        self.states.prepare([part.module for part in plan.modules])

    def read_updates(self, context: RequestContext) -> list[ModuleUpdate]:
        """Read this rank's payload, or the uploaded file, to pairs by module."""
        staged = self.staged_for(context.req).pairs if context.req.update_id is not None else {}
        self.states.prepare([*self.reader.modules(context.req), *staged])
        return self.reader.updates(context)

    def staged_for(self, req: MergeReq) -> StagedPairs:
        """Return what is staged of a request's update; another update's buckets are abandoned by it.

        Raises:
            ConflictError: buckets of it were accepted, and are gone.
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

    def remember(self, context: RequestContext, plan: Plan | None = None) -> None:
        """Keep the present state for an undo, just before one replica of several changes it."""
        if context.req.step == "finish":
            states = {name: replace(state) for name, state in self.engine.states.items()}
            self.before = Before(states, self.staged, dict(self.timings), plan)

    def restore(self, before: Before) -> None:
        """Make a remembered state the present one; its weights are written already."""
        if before.plan is not None:
            self.engine.states = dict(before.states)
        self.staged, self.timings = before.staged, dict(before.timings)

    def snapshot(self) -> dict[str, Any]:
        """Return every module as the status route shows it."""
        return snapshot(self.engine, {name: self._word_of(name) for name in self.states.modules()}, self.timings)

    def _word_of(self, module: str) -> str:
        if self.failed is not None:
            return "failed"
        if self.staged is not None and module in self.staged.pairs:
            return "staging"
        return how_it_is_held(self.engine, module)
