"""Make the answer that a client gets from a worker's output or an error."""

from __future__ import annotations

from typing import Any

from server_patches.replicas import NoAnswer
from server_patches.request_log import LogEntry
from server_patches.worker_request import MergeReq
from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.wire.schema import LORA_MERGE, ErrorAnswer, UpdateAnswer

Answer = tuple[int, dict[str, Any]]  # HTTP status and JSON body


def update_answer(req: MergeReq, output: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """Return the answer to an update that succeeded."""
    if req.weight_update_mode == LORA_MERGE:
        return {**merge_answer(output), "ignored_fields": ignored}
    full = ("message", "weight_version", "payload_opened")
    return {"success": True, **{name: output[name] for name in full}, "ignored_fields": ignored}


def merge_answer(output: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a change of adapters that succeeded."""
    return UpdateAnswer(**{name: output[name] for name in UpdateAnswer.model_fields if name in output}).model_dump()


def error_answer(status: int, message: str, payload_opened: list[bool] | None = None) -> Answer:
    """Return an answer other than 200."""
    return status, ErrorAnswer(message=message, payload_opened=payload_opened or []).model_dump()


def refused_answer(error: LoraMergeError, entry: LogEntry, payloads: int) -> Answer:
    """Return the answer to an update that did not reach the workers, or that they did not answer."""
    entry.reason = error.reason
    if isinstance(error, NoAnswer):
        return error_answer(error.status, str(error))
    return error_answer(error.status, f"{error}. Nothing was changed", [False] * payloads)


def error_from(output: dict[str, Any]) -> LoraMergeError:
    """Return the error that a worker's output reports."""
    error = LoraMergeError(output["message"])
    error.status, error.reason = output["status"], output.get("reason", "engine")
    return error
