"""The body of an upload, streamed into a private file that the workers of this machine can map."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
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
    with tempfile.NamedTemporaryFile(prefix=f"{_PREFIX}{os.getpid()}_", dir=folder()) as file:
        async for chunk in chunks:
            hasher.update(chunk)
            nbytes += len(chunk)
            try:
                file.write(chunk)
            except OSError as error:
                raise LoraMergeError(
                    f"{folder()} has no room for the upload, {nbytes} bytes so far: {error}"
                ) from error
        file.flush()
        yield Upload(file.name, nbytes, hasher.hexdigest())


def remove_leftovers() -> None:
    """Files of processes that are gone, which a crash has left."""
    for path, process in _uploads():
        if not Path(f"/proc/{process}").exists():
            with contextlib.suppress(OSError):
                path.unlink()


def _uploads() -> Iterator[tuple[Path, int]]:
    for path in folder().glob(f"{_PREFIX}*"):
        if match := re.match(rf"{_PREFIX}(\d+)_", path.name):
            yield path, int(match[1])
