"""The private file of an upload: made in shared memory, locked while it is in use, removed afterwards.

Every process that writes such a file holds its lock. A file without a lock was left by a crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sgld_lora_merge.errors import LoraMergeError

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "sgld_lora_upload_"


def folder() -> Path:
    """Return the folder of uploads: shared memory where there is some, else the folder for temporary files."""
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def remove_leftovers() -> None:
    """Remove the files that a crash has left; no process holds their lock.

    Another user may put anything there under such a name; only regular files of our own user are touched.
    """
    for path in folder().glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, or gone
            # a FIFO would wait for its writer without O_NONBLOCK
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                found = os.fstat(descriptor)
                if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def private_file() -> Iterator[tuple[int, str]]:
    """Make a locked file of mode 0600, yield its descriptor and path, and remove it at the end.

    Raises:
        LoraMergeError: the file cannot be made.
    """
    try:
        descriptor, path = _locked_file()
    except OSError as error:
        raise LoraMergeError(f"{folder()} takes no file for the upload: {error}") from error
    try:
        yield descriptor, path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.close(descriptor)


def _locked_file() -> tuple[int, str]:
    """Make a file and lock it. An engine that starts in between may remove it, so check that it still has a name.

    Once it is locked and has a name, nobody removes it: `remove_leftovers` locks before it removes.
    """
    while True:
        descriptor, path = tempfile.mkstemp(prefix=_PREFIX, dir=folder())
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor, path
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def write_all(descriptor: int, chunk: bytes, so_far: int) -> None:
    left = memoryview(chunk)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except OSError as error:
            raise LoraMergeError(f"{folder()} has no room for the upload, {so_far} bytes so far: {error}") from error
