"""Send requests to an engine, and settle what became of those whose answer does not come."""

from __future__ import annotations

import json
import reprlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from sgld_lora_merge.errors import LoraMergeError, printable
from sgld_lora_merge.settings import settings_from
from sgld_lora_merge.trainer.answers import FORMS, Answered, Refusal
from sgld_lora_merge.trainer.engine_client import EngineClient, Reply, Unanswered, fits
from sgld_lora_merge.wire.schema import STATUS_ROUTE, UPDATE_ROUTE, UPLOAD_ROUTE

Answer = dict[str, Any]

TRIES = 4
SHOWN_CHARACTERS = 2000  # of an engine's message
PAUSE_S = 0.5  # before the second try; twice as long before each one after it
_ACCEPTED = ("staging", "staged", "live")
_SHORT = reprlib.Repr()
_SHORT.maxstring = 200
_JSON = {"content-type": "application/json"}


class SyncError(LoraMergeError):
    """The engine refused, failed, or could not be reached; the message says what is known of its state.

    Attributes:
        payload_opened: by rank of the engine, where it said so.
        answered: the HTTP status of the engine's answer; None where none came.
    """

    reason = "sync"

    def __init__(self, message: str, payload_opened: Sequence[bool] = (), answered: int | None = None) -> None:
        super().__init__(message)
        self.payload_opened = list(payload_opened)
        self.answered = answered


class Transport(Protocol):
    """What a strategy needs of one engine. Every method raises `SyncError` unless the engine says success."""

    def update(self, fields: Mapping[str, Any], file: bytes | Iterable[bytes] | None = None) -> Answer:
        """Send one request of an update: the fields of the wire, and the safetensors file where one travels."""

    def ask(self, route: str, fields: Mapping[str, Any] | None = None) -> Answer:
        """Ask any other route: POST with fields, GET without."""


class HttpTransport:
    """Updates as JSON, payloads as handles: the engine is on this machine.

    A lost answer is asked for again with the same bytes, which the engine does not apply twice. After a time-out the
    status says whether the update arrived. Without an ``update_id`` nothing is sent twice.

    Args:
        url: of the engine, ``http://127.0.0.1:30000``.
        timeout: seconds for one answer.

    Raises:
        httpx.InvalidURL: it is no URL.
        LoraMergeError: a variable of the environment has a value that means nothing.
    """

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        key = settings_from().api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url = url
        self._client = EngineClient(url, timeout, headers)

    def update(self, fields: Mapping[str, Any], file: bytes | Iterable[bytes] | None = None) -> Answer:
        body = json.dumps(fields).encode()
        return self._send_until_answered(
            lambda: self._client.send("POST", UPDATE_ROUTE, body, headers=_JSON), fields.get("update_id"), Answered
        )

    def ask(self, route: str, fields: Mapping[str, Any] | None = None) -> Answer:
        form = FORMS.get(route, Answered)
        if fields is None:
            return self._send_until_answered(lambda: self._client.send("GET", route), None, form)
        body = json.dumps(dict(fields)).encode()
        return self._send_until_answered(
            lambda: self._client.send("POST", route, body, headers=_JSON), fields.get("update_id"), form
        )

    def _send_until_answered(self, send: Callable[[], Reply], update_id: str | None, form: type[Answered]) -> Answer:
        """Send until there is an answer."""
        pause = PAUSE_S
        for attempt in range(1, TRIES + 1):
            try:
                return checked(send(), form)
            except Unanswered as error:
                if update_id is None:
                    raise SyncError(f"{self.url} did not answer: {error}") from error
                known = self._state_of(update_id)
                if attempt == TRIES or known not in (None, *_ACCEPTED):
                    raise SyncError(
                        f"{self.url} did not answer: {error}. What became of the update is not known; its "
                        f"status is {known!r}; see {STATUS_ROUTE}"
                    ) from error
                if known is None:
                    time.sleep(pause)
                    pause *= 2
        raise AssertionError("the last try returns or raises")

    def _state_of(self, update_id: str) -> str | None:
        """Return what the engine says became of an update; None where it does not know it, or does not answer."""
        try:
            updates = self.ask(STATUS_ROUTE)["updates"]
        except SyncError:
            return None
        return next((str(each["state"]) for each in updates if each["update_id"] == update_id), None)


class UploadTransport(HttpTransport):
    """Updates as a safetensors file in the body: the engine may be anywhere."""

    def update(self, fields: Mapping[str, Any], file: bytes | Iterable[bytes] | None = None) -> Answer:
        query = {name: value for name, value in fields.items() if value is not None}

        def send() -> Reply:
            return self._client.send("POST", UPLOAD_ROUTE, b"" if file is None else file, query=query)

        return self._send_until_answered(send, fields.get("update_id"), Answered)


def checked(reply: Reply, form: type[Answered]) -> Answer:
    """Return the content of an answer that says success and has the form of its route.

    Raises:
        SyncError: it is another one; the message has the URL and what was said.
    """
    try:
        content = reply.content()
    except ValueError as error:
        body = reply.body[: SHOWN_CHARACTERS // 4].decode(errors="replace") or "nothing"
        raise SyncError(
            f"{reply.url} answered {reply.status}: {printable(body, SHOWN_CHARACTERS)} ({error})", (), reply.status
        ) from error
    return accepted(f"{reply.url} answered {reply.status}", content, form, reply.status)


def accepted(who: str, content: object, form: type[Answered], status: int | None = None) -> Answer:
    """Return an answer that says success and has the form of its route.

    Args:
        who: begins the message of the error.
        status: HTTP status, where there is one.

    Raises:
        SyncError: it is another one.
    """
    if status not in (None, 200) or not isinstance(content, dict) or content.get("success") is not True:
        try:
            refusal = fits(content, Refusal)
        except ValueError as error:
            raise SyncError(f"{who}, and its answer cannot be read: {error}", (), status) from error
        message = printable(refusal.message, SHOWN_CHARACTERS) or printable(_SHORT.repr(content), 500)
        raise SyncError(f"{who}: {message}", refusal.payload_opened, status)
    try:
        fits(content, form)
    except ValueError as error:
        raise SyncError(f"{who}, and its answer has not the form of that route: {error}", (), status) from error
    return content
