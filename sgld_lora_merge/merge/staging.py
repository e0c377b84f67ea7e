"""What a rank keeps of an update that arrives in buckets, until the update goes live or is abandoned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.merge.engine import ModuleUpdate
from sgld_lora_merge.merge.resident import own_copy
from sgld_lora_merge.settings import MAX_STAGED_VARIABLE


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
        """Return these buckets and one more.

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
        """Return the whole update, as the engine plans it."""
        return [ModuleUpdate(module, pairs, whole=True, adapter=self.adapter) for module, pairs in self.pairs.items()]
