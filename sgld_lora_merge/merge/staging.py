"""An update that arrives in buckets: which ones are there, what was answered, and what becomes of the update.

    staging     some buckets have arrived
    staged      all have, and the sender wants to commit by itself
    live        the last bucket, or the commit, has been merged
    abandoned   another update was begun, the sender aborted it, or its time ran out
    replaced    it was live, until another update replaced all of it
    reset       it was live, until a reset, after which a rollback makes it live again, or until sglang loaded weights
    rolled back it was live, until a rollback

`Ledger` is the bookkeeping by names and digests, `StagedPairs` what a rank keeps of an open update.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.errors import ConflictError, LoraMergeError
from sgld_lora_merge.merge.engine import ModuleUpdate
from sgld_lora_merge.merge.resident import DEFAULT_ADAPTER, own_copy
from sgld_lora_merge.printable import printable
from sgld_lora_merge.settings import MAX_STAGED_VARIABLE

KEPT_UPDATES = 1024  # a trainer retries the last update, not one a thousand updates ago
KEPT_NBYTES = 16 * 2**20  # of all updates, as JSON
KEPT_ANSWER_NBYTES = 2**14  # of one answer; a larger one is kept without most of its names
KEPT_NAMES, KEPT_CHARACTERS = 10, 80
COMMIT = -1  # place of a commit among the requests of an update


@dataclass(frozen=True)
class Bucket:
    """One request of an update.

    Attributes:
        update_id: the update it belongs to.
        index, count: its place among the update's buckets.
        digest: of the whole request body; the same bytes are the same request.
        terms: what must be the same in all buckets, by field name.
        hold: the sender will commit the complete update by itself.
    """

    update_id: str
    index: int
    count: int
    digest: str
    terms: Mapping[str, Any]
    hold: bool = False


@dataclass
class NamedUpdate:
    """What is known of one ``update_id``."""

    count: int
    terms: Mapping[str, Any]
    hold: bool = False
    state: str = "staging"
    reason: str = ""
    answers: dict[int, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    nbytes: int = 0

    def keep(self, index: int, digest: str, answer: dict[str, Any]) -> None:
        """Keep what one request of it was answered; of a large answer, what a repeated request needs."""
        kept, nbytes = _to_keep(answer)
        self.answers[index] = (digest, kept)
        self.nbytes += nbytes + len(digest) + len(str(self.terms))

    @property
    def buckets(self) -> list[int]:
        return sorted(index for index in self.answers if index != COMMIT)

    @property
    def adapter(self) -> str:
        return str(self.terms.get("adapter") or DEFAULT_ADAPTER)

    @property
    def modules(self) -> set[str]:
        """Where it is live, or was."""
        return {module for _, answer in self.answers.values() for module in answer.get("modules", ())}

    @property
    def is_open(self) -> bool:
        return self.state in ("staging", "staged")

    @property
    def told(self) -> str:
        """Its state, and why where that is known."""
        return f"{self.state}: {self.reason}" if self.reason else self.state

    def is_live_within(self, modules: Collection[str]) -> bool:
        """Whether it is live, and in none but these modules."""
        return self.state == "live" and self.modules <= set(modules)

    @property
    def is_taken_back(self) -> bool:
        return self.state in ("reset", "rolled back")


class Ledger:
    """Every update of one engine by its id, the oldest forgotten first. At most one is open."""

    def __init__(self) -> None:
        self.updates: OrderedDict[str, NamedUpdate] = OrderedDict()
        self._after_rollback: list[tuple[NamedUpdate, str]] = []  # what a rollback of the last step makes of updates
        self._begun: str | None = None  # the update that was accepted last
        self._nbytes = 0  # of all answers that are kept

    @property
    def open_id(self) -> str | None:
        """The update that has begun and is neither live nor abandoned: the last one that was accepted, or none."""
        update = None if self._begun is None else self.updates.get(self._begun)
        return self._begun if update is not None and update.is_open else None

    def is_live(self, update_id: str) -> bool:
        return update_id in self.updates and self.updates[update_id].state == "live"

    def admit(self, bucket: Bucket) -> dict[str, Any] | None:
        """The answer that this very request got before, or None for one to be worked on.

        Raises:
            ConflictError: the bucket has no place in its update.
        """
        update = self.updates.get(bucket.update_id)
        if update is None:
            return None
        name = f"update_id {bucket.update_id!r}"
        if update.state == "abandoned":
            raise ConflictError(f"{name} was abandoned: {update.reason}. Send the update again under another id")
        if update.is_taken_back:
            raise ConflictError(f"{name} was live and is {update.told}. Send the update again under another id")
        digest, answer = update.answers.get(bucket.index, (None, None))
        if digest == bucket.digest:
            return answer
        if not update.is_open:
            raise ConflictError(f"{name} is {update.state}, and this is another request than it was made of")
        if digest is not None:
            raise ConflictError(f"bucket {bucket.index} of {name} has arrived with other bytes")
        mine = {"num_buckets": bucket.count, **bucket.terms}
        first = {"num_buckets": update.count, **update.terms}
        if differing := [field for field, value in mine.items() if value != first.get(field)]:
            told = "; ".join(f"{field} is {mine[field]!r} here, {first.get(field)!r} before" for field in differing)
            raise ConflictError(f"the buckets of {name} differ: {told}")
        return None

    def next_state(self, bucket: Bucket) -> str:
        """What an admitted bucket makes of its update: "staging", "staged", or "live"."""
        update = self.updates.get(bucket.update_id)
        if len(update.buckets if update else []) + 1 < bucket.count:
            return "staging"
        return "staged" if bucket.hold or (update is not None and update.hold) else "live"

    def abandons(self, bucket: Bucket) -> str | None:
        """The open update that an admitted bucket of another one puts an end to."""
        return self.open_id if self.open_id != bucket.update_id else None

    def accept(self, bucket: Bucket, answer: dict[str, Any]) -> None:
        """Record what an admitted bucket was answered; its update is now in `next_state`."""
        state = self.next_state(bucket)
        if (other := self.abandons(bucket)) is not None:
            self.abandon(other, f"update {bucket.update_id!r} was begun before it was complete")
        update = self.updates.setdefault(bucket.update_id, NamedUpdate(bucket.count, bucket.terms))
        self._keep(update, bucket.index, bucket.digest, answer)
        update.state, update.hold, self._begun = state, update.hold or bucket.hold, bucket.update_id
        while len(self.updates) > KEPT_UPDATES or (self._nbytes > KEPT_NBYTES and len(self.updates) > 1):
            self._nbytes -= self.updates.popitem(last=False)[1].nbytes

    def _keep(self, update: NamedUpdate, index: int, digest: str, answer: dict[str, Any]) -> None:
        before = update.nbytes
        update.keep(index, digest, answer)
        self._nbytes += update.nbytes - before

    def to_commit(self, update_id: str) -> dict[str, Any] | None:
        """The answer that the commit of this update got before, or None for a complete one that waits for it.

        Raises:
            ConflictError: the update is unknown, incomplete, abandoned, or went live without a commit.
        """
        update = self.updates.get(update_id)
        if update is not None and update.state == "staged":
            return None
        if update is not None and COMMIT in update.answers and not update.is_taken_back:
            return update.answers[COMMIT][1]
        raise ConflictError(f"update_id {update_id!r} cannot be committed: {self._told(update)}")

    def committed(self, update_id: str, answer: dict[str, Any]) -> None:
        update = self.updates[update_id]
        update.state = "live"
        self._keep(update, COMMIT, "", answer)

    def step(
        self, modules: Collection[str], ended: str | None, update_id: str | None = None, adapter: str | None = None
    ) -> None:
        """A change has gone live, by which the updates that lie within its modules have ended.

        Args:
            modules: that it has changed.
            ended: what those updates are now, "replaced" or "reset"; None where it has left some of their layers.
            update_id: the change is this update.
            adapter: that it has changed; None is every one.
        """
        self._after_rollback = []
        for name, update in self.updates.items():
            if name == update_id:
                self._after_rollback.append((update, "rolled back"))
            elif ended is not None and update.is_live_within(modules) and adapter in (None, update.adapter):
                update.state = ended
                self._after_rollback.append((update, "live"))

    def rolled_back(self) -> None:
        """The last step was taken back."""
        for update, state in self._after_rollback:
            update.state = state
        self._after_rollback = []

    def base_is_live(self, modules: Collection[str]) -> None:
        """Nothing is merged into these modules, whoever has seen to that: no update of them is live."""
        for update in self.updates.values():
            if update.is_live_within(modules):
                update.state, update.reason = "reset", "sglang has put other weights into its modules"
                self._after_rollback = []

    def check_abort(self, update_id: str) -> None:
        """
        Raises:
            ConflictError: the update is not open.
        """
        update = self.updates.get(update_id)
        if update is None or not update.is_open:
            raise ConflictError(f"update_id {update_id!r} cannot be aborted: {self._told(update)}")

    def abandon(self, update_id: str, reason: str) -> None:
        update = self.updates[update_id]
        update.state, update.reason = "abandoned", reason

    def _told(self, update: NamedUpdate | None) -> str:
        if update is None:
            return "no bucket of it has arrived"
        if update.state == "staging":
            return f"buckets {update.buckets} of {update.count} have arrived"
        return f"it is {update.told}"


def _to_keep(answer: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """An answer for a repeated request, and its size as JSON. Of a large one, ten of each list's names, cut short."""
    nbytes = len(json.dumps(answer))
    if nbytes <= KEPT_ANSWER_NBYTES:
        return answer, nbytes
    kept = {name: _cut(value) for name, value in answer.items()}
    return kept, len(json.dumps(kept))


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value, KEPT_ANSWER_NBYTES // 8)
    if isinstance(value, list):
        return [printable(each, KEPT_CHARACTERS) if isinstance(each, str) else each for each in value[:KEPT_NAMES]]
    return value


class TooMuchStaged(LoraMergeError):
    """Staged bytes over their limit."""

    status = 413
    reason = "too_large"


@dataclass(frozen=True, eq=False)
class StagedPairs:
    """Buckets of one update, in this rank's own memory.

    Attributes:
        pairs: by module; copies.
        nbytes: of all pairs.
    """

    update_id: str
    adapter: str
    pairs: Mapping[str, Sequence[Pair]]
    nbytes: int

    def with_bucket(self, added: Mapping[str, Sequence[Pair]], limit: int) -> StagedPairs:
        """One bucket more.

        Raises:
            TooMuchStaged: over ``limit`` bytes.
        """
        nbytes = self.nbytes + sum(pair.nbytes for pairs in added.values() for pair in pairs)
        if nbytes > limit:
            raise TooMuchStaged(
                f"update {self.update_id!r} would stage {nbytes} bytes, the limit is {limit} ({MAX_STAGED_VARIABLE})"
            )
        copies = {module: [own_copy(pair) for pair in pairs] for module, pairs in added.items()}
        modules = {**self.pairs, **copies}
        return StagedPairs(
            self.update_id, self.adapter, {m: [*self.pairs.get(m, ()), *copies.get(m, ())] for m in modules}, nbytes
        )

    def updates(self) -> list[ModuleUpdate]:
        return [ModuleUpdate(module, pairs, whole=True, adapter=self.adapter) for module, pairs in self.pairs.items()]
