"""What the HTTP process sends to the workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import UpdateWeightFromTensorReqInput

from sgld_lora_merge.protocol import LORA_MERGE


@dataclass
class MergeReq(UpdateWeightFromTensorReqInput):  # type: ignore[misc]  # sglang is untyped
    """One operation of ours on every rank.

    A subclass of sglang's request, whose payload fields it has; a class of its own, because sglang's scheduler looks
    handlers up by exact type. Pickled on its way, so it holds plain data only.
    """

    operation: Literal["update", "commit", "abort", "reset", "rollback", "status", "verify", "resolve", "undo"] = (
        "update"
    )
    allow_partial: bool = False
    layer_scaling: dict[str, dict[str, float]] | None = None
    weight_version: str | None = None
    update_id: str | None = None
    adapter: str | None = None  # of a reset: null for all
    expected: dict[str, dict[str, dict[str, Any]]] | None = None  # module -> layer -> {"sha256" or "samples": ...}
    layers: dict[str, list[str]] | None = None  # of a resolve: module -> layer prefixes
    weights: Literal["live", "base"] = "live"  # which ones a verify looks at
    upload_path: str | None = None  # a file of this server's own, in place of payloads
    continues: bool = False  # buckets of this update were accepted before
    goes_live: bool = True  # false: this bucket is staged, and the update waits for others or for its commit
    step: Literal["prepare", "finish"] | None = None  # where replicas agree between the plan and the change

    @property
    def is_full_update(self) -> bool:
        """Whether it is sglang's own update, of whole weights."""
        return self.operation == "update" and self.weight_update_mode != LORA_MERGE

    @property
    def is_whole_adapter(self) -> bool:
        """Whether layers that it does not name go back to their base weights."""
        return self.update_id is not None or self.upload_path is not None

    def finish(self) -> MergeReq:
        """The second step of this request, for workers that have its payload already."""
        return replace(self, step="finish", serialized_named_tensors=[], payload_gpu_uuids=None)  # type: ignore[call-arg]
