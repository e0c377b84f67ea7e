"""One HTTP request to an engine, and one check of what it answers. An engine, or a gateway, may send anything.

    connect   a connection for this request alone, never through a proxy of the environment
    send      each piece of the body must be taken within the time limit
    read      the whole answer must be here within the time limit, trickled or not, and has a largest size
    check     JSON, of the form that the route has

Nothing is decompressed: a small answer could then be of any size.
"""

from __future__ import annotations

import base64
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.request import getproxies_environment

import httpcore
import httpx
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from sgld_lora_merge.errors import SHOWN_FAULTS, printable

MAX_ANSWER_NBYTES = 4 * 2**20  # where 10,000 layers land takes 3 MiB; as Python's objects it is 20 times as much
PIECE_NBYTES = 2**20  # of a body
_FAILURES = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol)

Model = TypeVar("Model", bound=BaseModel)


class Unanswered(Exception):
    """No answer came, or none within the limits; the message says why."""


@dataclass(frozen=True)
class Reply:
    """What came back.

    Attributes:
        url: that was asked, without its query.
        body: at most `MAX_ANSWER_NBYTES`, as it came.
        encoding: of the body; "" for none.
        complete: false where there was more of it.
    """

    url: str
    status: int
    body: bytes
    encoding: str
    complete: bool = True

    def content(self) -> Any:
        """Return the body as JSON.

        Raises:
            ValueError: it is not JSON, is nested too deeply, is compressed, or is too large.
        """
        if not self.complete:
            raise ValueError(f"the answer has more than {MAX_ANSWER_NBYTES} bytes")
        if self.encoding not in ("", "identity"):
            raise ValueError(f"the answer has the content-encoding {self.encoding[:80]!r}, which was not asked for")
        return from_json(self.body)


class EngineClient:
    """Requests to one URL.

    Args:
        url: of the engine; requests go to it and what follows it.
        headers: of every request.

    Raises:
        httpx.InvalidURL: it is no URL.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self._base = httpx.URL(url)
        self._headers = {"accept-encoding": "identity", "accept": "application/json", **(headers or {})}
        if self._base.userinfo and "Authorization" not in self._headers:
            self._headers["Authorization"] = f"Basic {base64.b64encode(self._base.userinfo).decode()}"
        self._tls: ssl.SSLContext | None = httpx.create_ssl_context() if self._base.scheme == "https" else None

    def send(
        self,
        method: str,
        route: str,
        timeout: float,
        content: bytes | Iterable[bytes] | None = None,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send one request and read its whole answer.

        Args:
            timeout: seconds for each piece of the body, and then for the whole answer.

        Raises:
            Unanswered: there is none.
        """
        if self._base.scheme not in ("http", "https"):
            raise Unanswered(f"UnsupportedProtocol: the URL begins with {self._base.scheme[:80]!r}, not http or https")
        url = self._base.copy_with(raw_path=self._base.raw_path.partition(b"?")[0].rstrip(b"/") + route.encode())
        asked = str(url.copy_with(userinfo=b""))
        url = url.copy_merge_params(query) if query else url
        target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        sent = {"host": url.netloc.decode("ascii"), **self._headers, **(headers or {})}
        if isinstance(content, bytes):
            sent["content-length"] = str(len(content))
        clock = _Clock(timeout)
        body = None if content is None else _pieces(content, clock.restart)
        try:
            connection = httpcore.HTTPConnection(
                target.origin, self._tls, network_backend=_TimedBackend(clock), keepalive_expiry=0.0
            )
            try:
                request = connection.stream(
                    method, target, headers=list(sent.items()), content=body, extensions=clock.limits()
                )
                with request as answer:
                    body_of, complete = _read(answer)
                    return Reply(asked, answer.status, body_of, _header(answer, b"content-encoding"), complete)
            finally:
                connection.close()
        except _FAILURES as error:
            hint = ""
            if isinstance(error, (httpcore.ConnectError, httpcore.ConnectTimeout)) and getproxies_environment():
                hint = " (a proxy is set in the environment, and is not used for engines)"
            raise Unanswered(f"{type(error).__name__}: {error}{hint}") from error


def fits(answer: object, form: type[Model]) -> Model:
    """Check that an answer has the form of its route, and return it in that form.

    Raises:
        ValueError: it has another form; the message says where, and has little of what was sent.
    """
    try:
        return form.model_validate(answer)
    except ValidationError as error:
        if error.error_count() > SHOWN_FAULTS:  # to spell all of them out would take memory
            raise ValueError(f"it has {error.error_count()} fields of a wrong type") from None
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        problems_shown = (f"{'.'.join(map(str, each['loc'])) or 'the answer'}: {each['msg']}" for each in problems)
        raise ValueError("; ".join(printable(each, 200) for each in problems_shown)) from None


class _Clock:
    """The moment until which the other side must have done what is waited for."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        self._until = time.monotonic() + self._seconds

    def limits(self) -> dict[str, Any]:
        return {"timeout": dict.fromkeys(("connect", "read", "write"), self._seconds)}

    def left(self, late: type[Exception]) -> float:
        """Return seconds that are left; ``late`` is raised where there are none."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise late(f"not done after {self._seconds:g} s")
        return left


class _TimedStream(httpcore.NetworkStream):
    """A connection on which each operation has what is left of one time limit, instead of a limit of its own."""

    def __init__(self, stream: httpcore.NetworkStream, clock: _Clock) -> None:
        self._stream, self._clock = stream, clock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._clock.left(httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._clock.left(httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = self._clock.left(httpcore.ConnectTimeout)
        return _TimedStream(self._stream.start_tls(ssl_context, server_hostname, left), self._clock)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _TimedBackend(httpcore.SyncBackend):
    """Opens connections that share one clock."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *args: Any, **kwargs: Any
    ) -> _TimedStream:
        stream = super().connect_tcp(host, port, self._clock.left(httpcore.ConnectTimeout), *args, **kwargs)
        return _TimedStream(stream, self._clock)


def _pieces(content: bytes | Iterable[bytes], restart: Callable[[], None]) -> Iterator[bytes]:
    """Return the body in pieces, each of which has the whole time limit, and so has the answer after the last one."""
    if isinstance(content, bytes):
        whole = content
        content = (whole[at : at + PIECE_NBYTES] for at in range(0, len(whole), PIECE_NBYTES))
    for piece in content:
        restart()
        yield piece
    restart()


def _read(answer: httpcore.Response) -> tuple[bytes, bool]:
    """Return the body, and whether that is all of it."""
    body = bytearray()
    for piece in answer.iter_stream():
        body += piece
        if len(body) > MAX_ANSWER_NBYTES:
            return bytes(body[:MAX_ANSWER_NBYTES]), False
    return bytes(body), True


def _header(answer: httpcore.Response, name: bytes) -> str:
    return next((value.decode("latin-1").lower() for key, value in answer.headers if key.lower() == name), "")
