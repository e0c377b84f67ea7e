"""The message from the HTTP process to the workers."""

from __future__ import annotations

import base64
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import UpdateWeightFromTensorReqInput

from sgld_lora_merge.wire.schema import (
    DEFAULT_ADAPTER,
    LORA_MERGE,
    UpdateRequest,
    UploadQuery,
    check_update,
    parse_fields,
)


@dataclass
class MergeReq(UpdateWeightFromTensorReqInput):  # type: ignore[misc]  # sglang is untyped
    """One operation of the plugin on every rank.

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
    upload_path: str | None = None  # the file of an upload, in place of payloads
    payload_fingerprint: list[str] | None = None  # of each payload's bytes, by its sender
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
        """Return the second step of this request, for workers that have its payload already."""
        return replace(self, step="finish", serialized_named_tensors=[], payload_gpu_uuids=None)  # type: ignore[call-arg]


def to_workers(update: UpdateRequest) -> MergeReq:
    """Return the message of a checked update."""
    return MergeReq(
        serialized_named_tensors=list(update.serialized_named_tensors),
        payload_gpu_uuids=update.payload_gpu_uuids,
        payload_fingerprint=update.payload_fingerprint,
        load_format=update.load_format,
        target_modules=update.modules,
        weight_update_mode=update.weight_update_mode,
        lora_alpha=update.lora_alpha,
        lora_rank=update.lora_rank,
        update_id=update.update_id,
        allow_partial=bool(update.allow_partial),
        layer_scaling=update.layer_scaling,
        weight_version=update.weight_version,
        adapter=update.adapter or DEFAULT_ADAPTER,
    )


def from_upload(query: UploadQuery, path: str) -> MergeReq:
    """Return the message of a checked upload, which lies in a file of this machine."""
    return MergeReq(
        serialized_named_tensors=[],
        target_modules=None if query.target_module is None else [query.target_module],
        weight_update_mode=LORA_MERGE,
        lora_alpha=query.lora_alpha,
        lora_rank=query.lora_rank,
        weight_version=query.weight_version,
        update_id=query.update_id,
        upload_path=path,
        adapter=query.adapter,
    )


def from_stock(stock: UpdateWeightFromTensorReqInput) -> MergeReq:
    """Return sglang's own request as one of ours, its fields checked as those of a request by HTTP.

    Raises:
        LoraMergeError: with all that is wrong with the fields.
    """
    sent = {field.name: getattr(stock, field.name) for field in fields(UpdateWeightFromTensorReqInput)}
    payloads = sent["serialized_named_tensors"]
    if isinstance(payloads, list):  # bytes are the pickle itself
        sent["serialized_named_tensors"] = [
            base64.b64encode(each).decode() if isinstance(each, bytes) else each for each in payloads
        ]
    update, _ = parse_fields(UpdateRequest, sent)
    check_update(update)
    return to_workers(update)
