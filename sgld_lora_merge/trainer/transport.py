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
from sgld_lora_merge.wire.schema import RESOLVE_ROUTE, STATUS_ROUTE, UPDATE_ROUTE, UPLOAD_ROUTE, VERIFY_ROUTE

Answer = dict[str, Any]

TRIES = 4
SHOWN_CHARACTERS = 2000  # of an engine's message
PAUSE_S = 0.5  # before the second try; twice as long before each one after it
SETTLE_S = 10.0  # for each question by which a lost answer is settled
# of an answer that no engine gave: sending again may help
_TRY_AGAIN = (200, 408, 425, 429)
_GATEWAY = (502, 503, 504)
_HARMLESS = (RESOLVE_ROUTE, VERIFY_ROUTE)  # may be sent twice
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

    A question that changes nothing is asked again where its answer is lost. What became of an update is settled by the
    status of its ``update_id``, and the same bytes are sent again, which the engine does not apply twice. An answer
    that no engine gave, a gateway's 502 or its page of HTML, is a lost one. What has neither is not sent twice.

    Args:
        url: of the engine, ``http://127.0.0.1:30000``. A proxy of the environment is not used.
        timeout: seconds for one answer, all tries together; settling a lost one may take some more.

    Raises:
        httpx.InvalidURL: it is no URL.
        LoraMergeError: a variable of the environment has a value that means nothing.
    """

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        key = settings_from().api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url = url
        self._timeout = timeout
        self._client = EngineClient(url, headers)

    def __str__(self) -> str:
        return self.url

    def update(self, fields: Mapping[str, Any], file: bytes | Iterable[bytes] | None = None) -> Answer:
        return self._post(UPDATE_ROUTE, fields, Answered)

    def ask(self, route: str, fields: Mapping[str, Any] | None = None) -> Answer:
        form = FORMS.get(route, Answered)
        if fields is not None:
            return self._post(route, fields, form)
        return self._send_until_answered(lambda seconds: self._client.send("GET", route, seconds), None, form)

    def _post(self, route: str, fields: Mapping[str, Any], form: type[Answered]) -> Answer:
        body = json.dumps(dict(fields)).encode()

        def send(seconds: float) -> Reply:
            return self._client.send("POST", route, seconds, body, headers=_JSON)

        return self._send_until_answered(send, fields.get("update_id"), form, harmless=route in _HARMLESS)

    def _send_until_answered(
        self, send: Callable[[float], Reply], update_id: str | None, form: type[Answered], *, harmless: bool = False
    ) -> Answer:
        """Send until an engine has answered, or the time is over.

        Args:
            send: sends the request, which has as many seconds.
            update_id: that the engine knows the request by.
            harmless: it may be sent twice without one.
        """
        once = update_id is None and not harmless
        until = time.monotonic() + self._timeout
        seconds, pause, known = self._timeout, PAUSE_S, None
        for attempt in range(1, TRIES + 1):
            try:
                reply = send(seconds)
                if once or is_of_engine(reply):
                    return checked(reply, form)
                lost, again = foreign(reply), reply.status >= 500 or reply.status in _TRY_AGAIN
            except Unanswered as error:
                if once:
                    raise SyncError(f"{self.url} did not answer: {error}") from error
                lost, again = f"{self.url} did not answer: {error}", True
            known = None if update_id is None else self._state_of(update_id)
            seconds = until - time.monotonic()
            if known in _ACCEPTED:  # its answer is on record
                seconds = max(seconds, SETTLE_S)
            elif known is not None or not again or seconds <= pause:
                break
            elif attempt < TRIES:
                time.sleep(pause)
                seconds, pause = seconds - pause, 2 * pause
        raise SyncError(f"{lost}. What became of the update is not known; its status is {known!r}; see {STATUS_ROUTE}")

    def _state_of(self, update_id: str) -> str | None:
        """Return what the engine says became of an update; None where it does not know it, or does not answer."""
        try:
            reply = self._client.send("GET", STATUS_ROUTE, min(self._timeout, SETTLE_S))
            updates = checked(reply, FORMS[STATUS_ROUTE])["updates"]
        except (SyncError, Unanswered):
            return None
        return next((str(each["state"]) for each in updates if each["update_id"] == update_id), None)


class UploadTransport(HttpTransport):
    """Updates as a safetensors file in the body: the engine may be anywhere."""

    def update(self, fields: Mapping[str, Any], file: bytes | Iterable[bytes] | None = None) -> Answer:
        query = {name: value for name, value in fields.items() if value is not None}

        def send(seconds: float) -> Reply:
            return self._client.send("POST", UPLOAD_ROUTE, seconds, b"" if file is None else file, query=query)

        return self._send_until_answered(send, fields.get("update_id"), Answered)


def is_of_engine(reply: Reply) -> bool:
    """Return whether an engine gave this answer: a gateway has a page of its own, or JSON of another form."""
    try:
        content = reply.content()
    except ValueError:
        return False
    return isinstance(content, dict) and ("success" in content or reply.status not in _GATEWAY)


def foreign(reply: Reply) -> str:
    """Return an answer that cannot be read, for a message."""
    body = reply.body[: SHOWN_CHARACTERS // 4].decode(errors="replace") or "nothing"
    return f"{reply.url} answered {reply.status}: {printable(body, SHOWN_CHARACTERS)}"


def checked(reply: Reply, form: type[Answered]) -> Answer:
    """Return the content of an answer that says success and has the form of its route.

    Raises:
        SyncError: it is another one; the message has the URL and what was said.
    """
    try:
        content = reply.content()
    except ValueError as error:
        raise SyncError(f"{foreign(reply)} ({error})", (), reply.status) from error
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
