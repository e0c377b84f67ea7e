"""Requests to an engine through a Ray actor that owns it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray

from sgld_lora_merge.trainer.answers import FORMS, Answered
from sgld_lora_merge.trainer.transport import Answer, SyncError, accepted


class RayTransport:
    """Updates by ``actor.update_weights_from_tensor.remote(**fields)``, whose answer is the engine's.

    What comes as a file goes to ``actor.upload.remote(file, **fields)``, and any other route to
    ``actor.ask.remote(route, fields)``. Asking again after a lost answer is the actor's: it is beside the engine.

    Args:
        actor: a handle.
        timeout: seconds for one answer.
    """

    def __init__(self, actor: Any, timeout: float = 600.0) -> None:
        self._actor, self._timeout = actor, timeout

    def update(self, fields: Mapping[str, Any], file: bytes | None = None) -> Answer:
        if file is None:
            return self._answer(lambda: self._actor.update_weights_from_tensor.remote(**fields), Answered)
        return self._answer(lambda: self._actor.upload.remote(file, **fields), Answered)

    def ask(self, route: str, fields: Mapping[str, Any] | None = None) -> Answer:
        return self._answer(lambda: self._actor.ask.remote(route, fields), FORMS.get(route, Answered))

    def _answer(self, call: Callable[[], Any], form: type[Answered]) -> Answer:
        return accepted(f"{self._actor} answered", result(call, self._timeout), form, 200)


def result(call: Callable[[], Any], timeout: float | None) -> Any:
    """Return what a remote call returns.

    Raises:
        SyncError: it raised; the actor has no such method, is gone, or did not answer in time.
    """
    try:
        return ray.get(call(), timeout=timeout)
    except AttributeError as error:
        raise SyncError(f"the actor cannot do this: {error}") from error
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SyncError):
            raise SyncError(str(cause), cause.payload_opened, cause.answered) from error
        raise SyncError(f"the actor failed: {type(cause).__name__}: {cause}") from error
    except ray.exceptions.GetTimeoutError as error:
        raise SyncError(f"the actor did not answer within {timeout:g} s") from error
    except ray.exceptions.RayError as error:
        raise SyncError(f"the actor did not answer: {type(error).__name__}: {error}") from error
