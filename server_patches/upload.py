"""Stream the body of an upload into a private file that the workers of this machine can map.

    place     at most so many uploads at once; another one waits its turn, without a file
    receive   the body goes to the file as it comes; one that is too slow or too much is cut
    yield     the caller has the file until its context ends

While others wait for a place, an upload that is silent for a twelfth of the time limit is cut. An honest upload that
comes after many idle ones therefore does not wait long.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.requests import ClientDisconnect

from server_patches.upload_file import private_file, write_all
from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.settings import (
    MAX_UPLOADS_MB_VARIABLE,
    MAX_UPLOADS_VARIABLE,
    UPLOAD_IDLE_VARIABLE,
    Settings,
)

PROGRESS_NBYTES = 2**16  # that an upload must send in each time limit, so that a trickle holds no place
_PATIENCE = 1 / 12  # of the time limit: how long an upload may be silent while others wait


@dataclass(frozen=True)
class ReceivedUpload:
    """A received body.

    Attributes:
        path: the file, readable by this user alone, gone when its context ends.
        nbytes: its size.
        digest: sha256 of its bytes.
    """

    path: str
    nbytes: int
    digest: str


class UploadCut(LoraMergeError):
    """The client did not send the whole body."""

    status = 400
    reason = "upload"


class UploadTooSlow(UploadCut):
    """Too little of the body came in time."""

    status = 408


class TooManyUploads(LoraMergeError):
    """Other uploads have all places, or all bytes."""

    status = 429
    reason = "busy"


class UploadTooLarge(LoraMergeError):
    """This body alone is over the limit for all uploads together."""

    status = 413
    reason = "too_large"


class Uploads:
    """Receives all uploads of this process within their limits.

    Args:
        count: how many have a place at once.
        max_bytes: of the bodies of all that have a place.
        idle_s: in which each must send 64 KiB, and for which one waits for a place.
    """

    def __init__(
        self,
        count: int = Settings.max_uploads,
        max_bytes: int = Settings.max_uploads_bytes,
        idle_s: float = Settings.upload_idle_s,
    ) -> None:
        self._count, self._max_bytes, self._idle_s = count, max_bytes, idle_s
        self._places = asyncio.Semaphore(count)
        self._waiting = 0
        self._nbytes = 0  # in files
        self._arriving: set[_Deadline] = set()

    @asynccontextmanager
    async def received(
        self, chunks: AsyncIterator[bytes], count: Callable[[int], None] = lambda _: None
    ) -> AsyncIterator[ReceivedUpload]:
        """Write the chunks to a file as they come; the whole body is never in this process's memory.

        Args:
            count: called with the bytes so far, after each chunk.

        Raises:
            TooManyUploads: no place became free in time, or all bodies together are too large.
            UploadTooLarge: this body alone is too large.
            UploadTooSlow: too little of it came in time.
            UploadCut: the client went away.
            LoraMergeError: there is no room for it.
        """
        await self._take_place()
        deadline = _Deadline(self._idle_s, lambda: self._waiting > 0)
        try:
            with private_file() as (descriptor, path):
                digest = await self._receive(chunks, deadline, descriptor, count)
                yield ReceivedUpload(path, deadline.nbytes, digest)
        finally:
            self._nbytes -= deadline.nbytes
            self._places.release()

    async def _take_place(self) -> None:
        """Wait for one of the places, in the order of arrival."""
        self._waiting += 1
        try:
            if self._places.locked():
                for deadline in self._arriving:
                    deadline.reschedule()
            async with asyncio.timeout(self._idle_s):
                await self._places.acquire()
        except TimeoutError as error:
            raise TooManyUploads(
                f"{self._count} uploads are open, which is the limit ({MAX_UPLOADS_VARIABLE}), and none ended in "
                f"{self._idle_s:g} s: send it again later"
            ) from error
        finally:
            self._waiting -= 1

    async def _receive(
        self, chunks: AsyncIterator[bytes], deadline: _Deadline, descriptor: int, count: Callable[[int], None]
    ) -> str:
        """Write a whole body to a file; return its sha256."""
        hasher = hashlib.sha256()
        self._arriving.add(deadline)
        try:
            async with deadline.limit:
                deadline.reschedule()
                async for chunk in chunks:
                    self._nbytes += len(chunk)
                    deadline.add_bytes(len(chunk))
                    count(deadline.nbytes)
                    self._check_bytes(deadline.nbytes)
                    hasher.update(chunk)
                    write_all(descriptor, chunk, deadline.nbytes)
        except TimeoutError as error:
            raise UploadTooSlow(
                f"the upload is cut after {deadline.nbytes} bytes: {deadline.why}. An upload must send "
                f"{PROGRESS_NBYTES // 1024} KiB in {self._idle_s:g} s ({UPLOAD_IDLE_VARIABLE})"
            ) from error
        except ClientDisconnect as error:
            raise UploadCut(f"the client went away after {deadline.nbytes} bytes of the upload") from error
        finally:
            self._arriving.discard(deadline)
        return hasher.hexdigest()

    def _check_bytes(self, nbytes: int) -> None:
        if nbytes > self._max_bytes:
            raise UploadTooLarge(
                f"the upload has {nbytes} bytes or more, all uploads together may have {self._max_bytes} "
                f"({MAX_UPLOADS_MB_VARIABLE})"
            )
        if self._nbytes > self._max_bytes:
            raise TooManyUploads(
                f"all open uploads together have {self._nbytes} bytes or more, the limit is {self._max_bytes} "
                f"({MAX_UPLOADS_MB_VARIABLE}): send it again later"
            )


class _Deadline:
    """The time at which one arriving body is cut.

    Attributes:
        limit: the timeout around the code that receives the body.
        nbytes: bytes that have come.
        why: why the time is over, for the message.
    """

    def __init__(self, idle_s: float, others_wait: Callable[[], bool]) -> None:
        self.limit = asyncio.timeout(None)
        self.nbytes, self.why = 0, ""
        self._idle_s, self._others_wait = idle_s, others_wait
        self._clock = asyncio.get_running_loop().time
        self._last = self._progress = self._clock()  # when a byte came, and when another 64 KiB were complete
        self._counted = 0

    def add_bytes(self, nbytes: int) -> None:
        """Count bytes that have come, and move the deadline."""
        if not nbytes:
            return
        self.nbytes += nbytes
        self._last = self._clock()
        if self.nbytes - self._counted >= PROGRESS_NBYTES:
            self._counted, self._progress = self.nbytes, self._last
        self.reschedule()

    def reschedule(self) -> None:
        """Compute the deadline again, since bytes have come or another upload has begun to wait."""
        if self.limit.expired():
            return
        slow, silent = self._progress + self._idle_s, self._last + self._idle_s * _PATIENCE
        when, self.why = slow, f"too little came in {self._idle_s:g} s"
        if self._others_wait() and silent < slow:
            when, self.why = silent, f"nothing came for {self._idle_s * _PATIENCE:g} s while others wait for a place"
        self.limit.reschedule(when)
