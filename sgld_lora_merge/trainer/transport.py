"""How requests reach an engine, and what happens to an answer that does not come."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import httpx

from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.settings import settings_from

Answer = dict[str, Any]

UPDATE_ROUTE = "/update_weights_from_tensor"
UPLOAD_ROUTE = "/lora_merge/upload"
STATUS_ROUTE = "/lora_merge/status"
TRIES = 4
PIECE_NBYTES = 2**20  # of an upload
PAUSE_S = 0.5  # before the second try; twice as long before each one after it
_ACCEPTED = ("staging", "staged", "live")


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
        """One request of an update: the fields of the wire, and the safetensors file where that is what travels."""

    def ask(self, route: str, fields: Mapping[str, Any] | None = None) -> Answer:
        """Any other route: POST with fields, GET without."""


class HttpTransport:
    """Updates as JSON, payloads as handles: the engine is on this machine.

    A lost answer is asked for again with the same bytes, which the engine does not apply twice. After a time-out the
    status says whether the update arrived. Without an ``update_id`` nothing is sent twice.

    Args:
        url: of the engine, ``http://127.0.0.1:30000``.
        timeout: seconds for one answer.
    """

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        key = settings_from().api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=timeout, headers=headers)
        weakref.finalize(self, self._client.close)

    def update(self, fields: Mapping[str, Any], file: bytes | Iterable[bytes] | None = None) -> Answer:
        body = json.dumps(fields).encode()
        headers = {"content-type": "application/json"}
        return self._settled(
            lambda: self._client.post(UPDATE_ROUTE, content=body, headers=headers), fields.get("update_id")
        )

    def ask(self, route: str, fields: Mapping[str, Any] | None = None) -> Answer:
        if fields is None:
            return self._settled(lambda: self._client.get(route), None)
        body = dict(fields)
        return self._settled(lambda: self._client.post(route, json=body), body.get("update_id"))

    def _settled(self, send: Callable[[], httpx.Response], update_id: str | None) -> Answer:
        """Send until there is an answer."""
        pause = PAUSE_S
        for attempt in range(1, TRIES + 1):
            try:
                return self._checked(send())
            except httpx.TransportError as error:
                if update_id is None:
                    raise SyncError(f"{self.url} did not answer: {_told(error)}") from error
                known = self._state(update_id)
                if attempt == TRIES or known not in (None, *_ACCEPTED):
                    raise SyncError(
                        f"{self.url} did not answer: {_told(error)}. What became of the update is not known; its "
                        f"status is {known!r}; see {STATUS_ROUTE}"
                    ) from error
                if known is None:
                    time.sleep(pause)
                    pause *= 2
        raise AssertionError("the last try returns or raises")

    def _state(self, update_id: str) -> str | None:
        """What the engine says became of an update; None where it does not know it, or does not answer."""
        try:
            updates = self.ask(STATUS_ROUTE)["updates"]
        except SyncError:
            return None
        return next((str(each["state"]) for each in updates if each["update_id"] == update_id), None)

    def _checked(self, answer: httpx.Response) -> Answer:
        try:
            content = answer.json()
        except ValueError:
            content = {}
        if answer.status_code != 200 or not isinstance(content, dict) or content.get("success") is not True:
            said = content if isinstance(content, dict) else {}
            told = said.get("message") or answer.text[:500] or "nothing"
            opened, url = said.get("payload_opened", ()), answer.url.copy_with(query=None)
            raise SyncError(f"{url} answered {answer.status_code}: {told}", opened, answer.status_code)
        return content


class UploadTransport(HttpTransport):
    """Updates as a safetensors file in the body: the engine may be anywhere."""

    def update(self, fields: Mapping[str, Any], file: bytes | Iterable[bytes] | None = None) -> Answer:
        query = {name: value for name, value in fields.items() if value is not None}

        def send() -> httpx.Response:
            # after each piece that the socket took, httpx copies all that is left of what it was given
            content = _pieces(file) if isinstance(file, bytes) else file
            headers = {"content-length": str(len(file))} if isinstance(file, bytes) else {}
            return self._client.post(UPLOAD_ROUTE, params=query, content=content, headers=headers)

        return self._settled(send, fields.get("update_id"))


def _pieces(file: bytes) -> Iterator[bytes]:
    return (file[start : start + PIECE_NBYTES] for start in range(0, len(file), PIECE_NBYTES))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
