"""Shared memory that torch has exported: what is there is checked first, then it is mapped, once a segment."""

from __future__ import annotations

import mmap
import os
import stat

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

    Args:
        releases: this worker takes over the reference that the sender has counted for a reader, one each time that it
            has named the segment.
    """

    def __init__(self, *, releases: bool) -> None:
        self._releases = releases
        self._opened: dict[bytes, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # by torch, and without it

    def check(self, manager: bytes, handle: bytes, nbytes: int) -> None:
        """Check that all bytes are really there. torch would enlarge a file that is too short, and reading a sparse
        file allocates its pages. A file that is not there is left to torch's message.

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

    def open(self, manager: bytes, handle: bytes, nbytes: int) -> torch.UntypedStorage:
        """Map a segment that has been checked.

        Raises:
            RequestError: it is gone, or its sender is on another machine.
        """
        if handle not in self._opened:
            try:
                by_torch = torch.UntypedStorage._new_shared_filename_cpu(manager, handle, nbytes)
            except RuntimeError as error:
                raise RequestError(
                    f"shared memory {os.fsdecode(handle)!r} cannot be opened; it is gone, or its sender is on another "
                    f"machine: {error}"
                ) from error
            self._opened[handle] = by_torch, _mapped_apart(path_of(handle), by_torch)
        by_torch, mapped = self._opened[handle]
        if self._releases:
            by_torch._shared_decref()
        return mapped


def _mapped_apart(path: str, opened: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return the same memory, mapped without torch, where that can be done.

    What torch has opened it reports to the sender's manager of shared memory when it is freed, and where that one was
    killed meanwhile the report ends this process ("terminate called ... Broken pipe"). So it is freed as soon as the
    payload has been opened.
    """
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), opened.nbytes() + COUNT_NBYTES)
        same = torch.frombuffer(memory, dtype=torch.uint8, offset=COUNT_NBYTES, count=opened.nbytes())
    except (OSError, ValueError):
        return opened
    start = slice(0, COUNT_NBYTES)
    known = torch.equal(same[start], torch.empty(0, dtype=torch.uint8).set_(opened)[start])
    return same.untyped_storage() if known else opened
