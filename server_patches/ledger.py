"""The ledger of updates: which buckets of each have arrived, what was answered, and what became of it.

    staging     some buckets have arrived
    staged      all have, and the sender wants to commit by itself
    live        the last bucket, or the commit, has been merged
    abandoned   another update was begun, the sender aborted it, or its time ran out
    replaced    it was live, until another update replaced all of it
    reset       it was live, until a reset, after which a rollback makes it live again, or until sglang loaded weights
    rolled back it was live, until a rollback

The HTTP process keeps this ledger by names and digests. What a rank keeps of an open update is
`merge.staging.StagedPairs`.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from sgld_lora_merge.errors import ConflictError, printable
from sgld_lora_merge.wire.schema import DEFAULT_ADAPTER, UpdateRequest, UploadQuery

KEPT_UPDATES = 1024  # a trainer retries the last update, not one a thousand updates ago
KEPT_NBYTES = 16 * 2**20  # of all updates, as JSON
KEPT_ANSWER_NBYTES = 2**14  # of one answer; a larger one is kept without most of its names
KEPT_NAMES, KEPT_CHARACTERS = 10, 80
SAME_IN_ALL_BUCKETS = ("lora_alpha", "lora_rank", "weight_version", "weight_update_mode", "adapter")
COMMIT = -1  # place of a commit among the requests of an update


@dataclass(frozen=True)
class NamedBucket:
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

    @classmethod
    def of_update(cls, update: UpdateRequest, body: bytes) -> NamedBucket | None:
        """Return the place of a request in its update; None for a request without an ``update_id``."""
        if update.update_id is None:
            return None
        return cls(
            update_id=update.update_id,
            index=update.bucket_index or 0,
            count=update.num_buckets or 1,
            digest=hashlib.sha256(body).hexdigest(),
            terms={name: getattr(update, name) for name in SAME_IN_ALL_BUCKETS},
            hold=update.commit is False,
        )

    @classmethod
    def of_upload(cls, query: UploadQuery, digest: str) -> NamedBucket | None:
        """Return an upload as the only bucket of its update; None for one without an ``update_id``.

        Args:
            digest: of the file.
        """
        if query.update_id is None:
            return None
        terms = query.model_dump()
        return cls(query.update_id, 0, 1, f"{digest} {terms}", terms, query.commit is False)


@dataclass
class NamedUpdate:
    """The history of one ``update_id``."""

    count: int
    terms: Mapping[str, Any]
    hold: bool = False
    state: str = "staging"
    reason: str = ""
    answers: dict[int, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    nbytes: int = 0

    def keep(self, index: int, digest: str, answer: dict[str, Any]) -> None:
        """Keep the answer to one of its requests; of a large answer, what a repeated request needs."""
        kept, nbytes = _shortened_answer(answer)
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
        """The modules in which it is live, or was."""
        return {module for _, answer in self.answers.values() for module in answer.get("modules", ())}

    @property
    def is_open(self) -> bool:
        return self.state in ("staging", "staged")

    @property
    def state_and_reason(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state

    def is_live_within(self, modules: Collection[str]) -> bool:
        """Return whether it is live, and in no modules other than these."""
        return self.state == "live" and self.modules <= set(modules)

    @property
    def is_taken_back(self) -> bool:
        return self.state in ("reset", "rolled back")


class Ledger:
    """Keeps every update of one engine by its id, and forgets the oldest first. At most one is open."""

    def __init__(self) -> None:
        self.updates: OrderedDict[str, NamedUpdate] = OrderedDict()
        self._after_rollback: list[tuple[NamedUpdate, str]] = []  # what a rollback of the last step makes of updates
        self._begun: str | None = None  # the update that was accepted last
        self._nbytes = 0  # of all answers that are kept

    @property
    def open_id(self) -> str | None:
        """The update that is neither live nor abandoned: the last one that was accepted, or none."""
        update = None if self._begun is None else self.updates.get(self._begun)
        return self._begun if update is not None and update.is_open else None

    def is_live(self, update_id: str) -> bool:
        return update_id in self.updates and self.updates[update_id].state == "live"

    def admit(self, bucket: NamedBucket) -> dict[str, Any] | None:
        """Return the answer that this very request got before, or None for a request to be worked on.

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
            now = update.state_and_reason
            raise ConflictError(f"{name} was live and is {now}. Send the update again under another id")
        digest, answer = update.answers.get(bucket.index, (None, None))
        if digest == bucket.digest:
            return answer
        if not update.is_open:
            raise ConflictError(f"{name} is {update.state}, and this request is none of those that it was made of")
        if digest is not None:
            raise ConflictError(f"bucket {bucket.index} of {name} has arrived with other bytes")
        mine = {"num_buckets": bucket.count, **bucket.terms}
        first = {"num_buckets": update.count, **update.terms}
        if differing := [field for field, value in mine.items() if value != first.get(field)]:
            fields = "; ".join(f"{field} is {mine[field]!r} here, {first.get(field)!r} before" for field in differing)
            raise ConflictError(f"the buckets of {name} differ: {fields}")
        return None

    def next_state(self, bucket: NamedBucket) -> str:
        """Return what an admitted bucket makes of its update: "staging", "staged", or "live"."""
        update = self.updates.get(bucket.update_id)
        if len(update.buckets if update else []) + 1 < bucket.count:
            return "staging"
        return "staged" if bucket.hold or (update is not None and update.hold) else "live"

    def abandons(self, bucket: NamedBucket) -> str | None:
        """Return the open update that an admitted bucket of another update ends."""
        return self.open_id if self.open_id != bucket.update_id else None

    def accept(self, bucket: NamedBucket, answer: dict[str, Any]) -> None:
        """Record the answer to an admitted bucket; its update is now in `next_state`."""
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
        """Return the answer that this update's commit got before, or None for a complete update that waits for it.

        Raises:
            ConflictError: the update is unknown, incomplete, abandoned, or went live without a commit.
        """
        update = self.updates.get(update_id)
        if update is not None and update.state == "staged":
            return None
        if update is not None and COMMIT in update.answers and not update.is_taken_back:
            return update.answers[COMMIT][1]
        raise ConflictError(f"update_id {update_id!r} cannot be committed: {_obstacle(update)}")

    def committed(self, update_id: str, answer: dict[str, Any]) -> None:
        update = self.updates[update_id]
        update.state = "live"
        self._keep(update, COMMIT, "", answer)

    def step(
        self, modules: Collection[str], ended: str | None, update_id: str | None = None, adapter: str | None = None
    ) -> None:
        """Record that a change has gone live; updates that lie within its modules have ended.

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
        """Record that the last step was taken back."""
        for update, state in self._after_rollback:
            update.state = state
        self._after_rollback = []

    def base_is_live(self, modules: Collection[str]) -> None:
        """Record that nothing is merged into these modules any more: no update of them is live."""
        for update in self.updates.values():
            if update.is_live_within(modules):
                update.state, update.reason = "reset", "sglang has put other weights into its modules"
                self._after_rollback = []

    def check_abort(self, update_id: str) -> None:
        """Check that an update can be aborted.

        Raises:
            ConflictError: the update is not open.
        """
        update = self.updates.get(update_id)
        if update is None or not update.is_open:
            raise ConflictError(f"update_id {update_id!r} cannot be aborted: {_obstacle(update)}")

    def abandon(self, update_id: str, reason: str) -> None:
        update = self.updates[update_id]
        update.state, update.reason = "abandoned", reason


def _shortened_answer(answer: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return an answer to keep, and its size as JSON; of a large answer, ten of each list's names, cut short."""
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


def _obstacle(update: NamedUpdate | None) -> str:
    """Return why an update cannot be committed or aborted, in words."""
    if update is None:
        return "no bucket of it has arrived"
    if update.state == "staging":
        return f"buckets {update.buckets} of {update.count} have arrived"
    return f"it is {update.state_and_reason}"
