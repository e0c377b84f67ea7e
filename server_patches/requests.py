"""What the HTTP process sends to the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import UpdateWeightFromTensorReqInput


@dataclass
class MergeReq(UpdateWeightFromTensorReqInput):  # type: ignore[misc]  # sglang is untyped
    """One operation of ours on every rank.

    A subclass of sglang's request, because its client fans out to every replica by ``isinstance``; a class of its own,
    because its scheduler looks handlers up by exact type. Pickled on its way, so it holds plain data only.
    """

    operation: Literal["update", "commit", "abort", "reset", "rollback", "status", "verify"] = "update"
    allow_partial: bool = False
    layer_scaling: dict[str, dict[str, float]] | None = None
    weight_version: str | None = None
    update_id: str | None = None
    adapter: str | None = None  # of a reset: null for all
    expected: dict[str, dict[str, dict[str, Any]]] | None = None  # module -> layer -> {"sha256" or "samples": ...}
    weights: Literal["live", "base"] = "live"  # which ones a verify looks at
    upload_path: str | None = None  # a file of this server's own, in place of payloads
    continues: bool = False  # buckets of this update were accepted before
    goes_live: bool = True  # false: this bucket is staged, and the update waits for others or for its commit
