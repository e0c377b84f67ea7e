"""Shared memory that torch has exported: what is there is checked first, then it is mapped, once a segment."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import sys

import torch

from sgld_lora_merge.errors import RequestError

FOLDER = "/dev/shm/"
COUNT_NBYTES = 64  # in front of the content, with the count of those that have it open


def segment_status(handle: bytes) -> os.stat_result | None:
    """Return the status of the file behind a name of shared memory; None where there is no such regular file."""
    try:
        status = os.stat(path_of(handle), follow_symlinks=False)
    except (OSError, ValueError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def path_of(handle: bytes) -> str:
    return FOLDER + os.fsdecode(handle).removeprefix("/")


class SegmentOpener:
    """Opens the segments of one payload; a segment that is named again is not mapped again.

    Segments are mapped without torch. What torch has opened it reports to the sender's manager of shared memory when it
    is freed, and where that one was killed meanwhile the report ends this process ("terminate called ... Broken pipe").

    Args:
        releases: this worker takes over the reference that the sender has counted for a reader, one each time that it
            has named the segment.
    """

    def __init__(self, *, releases: bool) -> None:
        self._releases = releases
        self._opened: dict[bytes, mmap.mmap] = {}

    def check(self, handle: bytes, nbytes: int) -> None:
        """Check that all bytes are really there: reading a sparse file allocates its pages. A file that is not there is
        left to `open`.

        Raises:
            RequestError: they are not.
        """
        status = segment_status(handle)
        if status is None:
            return
        needed = nbytes + COUNT_NBYTES
        name = os.fsdecode(handle)
        if status.st_size < needed:
            raise RequestError(
                f"shared memory {name!r} has {status.st_size} bytes, the payload claims {nbytes} and {COUNT_NBYTES} in "
                "front of them"
            )
        if (there := status.st_blocks * 512) < needed:
            raise RequestError(
                f"shared memory {name!r} is sparse: the payload claims {nbytes} bytes, {there} are in memory; write "
                "all of them before they are sent"
            )

    def open(self, handle: bytes, nbytes: int) -> torch.UntypedStorage:
        """Map a segment that has been checked.

        Raises:
            RequestError: it is gone, or its sender is on another machine.
        """
        if handle not in self._opened:
            try:
                self._opened[handle] = _mapped(path_of(handle), nbytes + COUNT_NBYTES)
            except (OSError, ValueError) as error:
                raise RequestError(
                    f"shared memory {os.fsdecode(handle)!r} cannot be opened; it is gone, or its sender is on another "
                    f"machine: {error}"
                ) from error
        memory = self._opened[handle]
        if self._releases:
            _release(path_of(handle), memory)
        return torch.frombuffer(memory, dtype=torch.uint8, offset=COUNT_NBYTES, count=nbytes).untyped_storage()


def _mapped(path: str, nbytes: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return mmap.mmap(file, nbytes)
    finally:
        os.close(file)


def _release(path: str, memory: mmap.mmap) -> None:
    """Give back one reference, as torch's RefcountedMapAllocator does; the last one takes the name away.

    The count is the first 32-bit integer. torch changes it atomically, Python cannot; but the sender changes its own
    reference after the answer only, and if both ever met, the segment would stay until the sender ends.
    """
    count = int.from_bytes(memory[:4], sys.byteorder, signed=True) - 1
    memory[:4] = count.to_bytes(4, sys.byteorder, signed=True)
    if count == 0:
        with contextlib.suppress(OSError):
            os.unlink(path)
