"""The body of an upload, streamed into a private file that the workers of this machine can map."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from sgld_lora_merge.errors import LoraMergeError

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "sgld_lora_upload_"


@dataclass(frozen=True)
class Upload:
    """A received body.

    Attributes:
        path: the file, readable by this user alone, gone when its context ends.
        nbytes: its size.
        digest: sha256 of its bytes.
    """

    path: str
    nbytes: int
    digest: str


def folder() -> Path:
    """Shared memory where there is some, else the folder for temporary files."""
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


@asynccontextmanager
async def received(chunks: AsyncIterator[bytes]) -> AsyncIterator[Upload]:
    """Write the chunks to a file as they come; the whole body is never in this process's memory.

    Raises:
        LoraMergeError: there is no room for it.
    """
    hasher, nbytes = hashlib.sha256(), 0
    with _private_file() as (descriptor, path):
        async for chunk in chunks:
            hasher.update(chunk)
            nbytes += len(chunk)
            _write(descriptor, chunk, nbytes)
        yield Upload(path, nbytes, hasher.hexdigest())


def remove_leftovers() -> None:
    """Files that a crash has left: nobody holds their lock, whichever process wrote them, in whichever container."""
    for path in folder().glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, or another user's
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def _private_file() -> Iterator[tuple[int, str]]:
    """A locked file of mode 0600: its descriptor and path.

    Raises:
        LoraMergeError: none can be made.
    """
    try:
        descriptor, path = tempfile.mkstemp(prefix=_PREFIX, dir=folder())
    except OSError as error:
        raise LoraMergeError(f"{folder()} takes no file for the upload: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor, path
    finally:
        os.unlink(path)
        os.close(descriptor)


def _write(descriptor: int, chunk: bytes, so_far: int) -> None:
    left = memoryview(chunk)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except OSError as error:
            raise LoraMergeError(f"{folder()} has no room for the upload, {so_far} bytes so far: {error}") from error
