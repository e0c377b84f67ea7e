"""What a CUDA IPC export says of itself, checked before torch's function opens it.

That function trusts its arguments: it subtracts from a counter at whatever offset in whatever file of shared memory the
export names, deletes the file when its count is zero, and reads handles beyond their end. A counter file of torch's is
known by its name and by its length of 10,000 counters.
"""

from __future__ import annotations

import re
import struct

from sgld_lora_merge.errors import RequestError, in_short
from sgld_lora_merge.wire.shared_memory import COUNT_NBYTES, segment_status

HANDLE_NBYTES = 64  # of CUDA's own handles, of memory and of events alike
COUNTERS = 10_000  # in a counter file of torch's, 8 bytes each
MOST_NBYTES = 2**44  # of a GPU's memory
_COUNTER = re.compile(rb"/torch_\d{1,20}_\d{1,20}(_\d{1,20})?")
_MALLOC, _EXPANDABLE = ord("c"), ord("e")  # the second byte of torch's handle, after its version
_KNOWN_VERSION = 2  # whose expandable segments are read here
_SEGMENT = struct.Struct("<i4xQQ")  # process id, bytes of a page, number of pages
_PAGE_NBYTES = (4, HANDLE_NBYTES)  # a file descriptor, or a handle of NVLink's fabric
_MOST_SEGMENT_NBYTES = 2**22


def check_export(
    handle: object, nbytes: int, offset: int, counter: object, counter_offset: object, event: object, wait: object
) -> None:
    """Check the arguments of one export.

    Args:
        handle: torch's handle of the memory; None for a storage of no bytes, which has no counter and no event either.
        nbytes: of the storage.
        offset: of the storage in the memory that the handle is of, in bytes.
        counter: name of the shared memory with the count of readers.
        counter_offset: which of its counters.
        event: CUDA's handle of the event after which the memory holds its content.
        wait: whether there is such an event.

    Raises:
        RequestError: with what is wrong.
    """
    if handle is None:
        if nbytes or (counter, event) != (None, None):
            raise RequestError(f"a CUDA export without a handle has {nbytes} bytes, a counter or an event")
        return
    if nbytes + offset > MOST_NBYTES:
        raise RequestError(f"a CUDA export claims {nbytes} bytes at {offset}, more than any GPU has")
    _check_memory(handle, nbytes + offset)
    _check_counter(counter, counter_offset)
    if type(event) is not bytes or len(event) != HANDLE_NBYTES:
        raise RequestError(f"a CUDA export's event is {in_short(event)}, not a handle of {HANDLE_NBYTES} bytes")
    if type(wait) is not bool:
        raise RequestError(f"a CUDA export's last argument is {in_short(wait)}, not true or false")


def _check_memory(handle: object, needed: int) -> None:
    if type(handle) is not bytes:
        raise RequestError(f"a CUDA export's handle is {in_short(handle)}, not bytes")
    if len(handle) == HANDLE_NBYTES:  # of an old torch
        return
    version, kind = (handle[0], handle[1]) if len(handle) > 2 else (0, 0)
    if kind == _MALLOC and len(handle) == 2 + HANDLE_NBYTES:
        return
    if kind != _EXPANDABLE or not 2 + _SEGMENT.size < len(handle) <= _MOST_SEGMENT_NBYTES:
        raise RequestError(f"a CUDA export's handle is {in_short(handle)}, which torch does not write")
    process, page_nbytes, pages = _SEGMENT.unpack_from(handle, 2)
    if process < 1:
        raise RequestError(f"a CUDA export's expandable segment is of process {process}")
    if version != _KNOWN_VERSION:
        return
    if len(handle) - 2 - _SEGMENT.size not in [pages * each for each in _PAGE_NBYTES]:
        raise RequestError(f"a CUDA export's expandable segment has {len(handle)} bytes for {pages} pages")
    if not needed <= page_nbytes * pages <= MOST_NBYTES:
        raise RequestError(
            f"a CUDA export claims {needed} bytes of an expandable segment of {pages} pages of {page_nbytes} bytes"
        )


def _check_counter(counter: object, offset: object) -> None:
    if type(counter) is not bytes or _COUNTER.fullmatch(counter) is None:
        raise RequestError(f"a CUDA export's counter is {in_short(counter)}, which is no name of torch's")
    if type(offset) is not int or not 0 <= offset < COUNTERS:
        raise RequestError(f"a CUDA export's counter is number {in_short(offset)}, outside 0 to {COUNTERS - 1}")
    status = segment_status(counter)  # without a file torch leaves the counter as it is
    if status is not None and status.st_size != 8 * COUNTERS + COUNT_NBYTES:
        raise RequestError(
            f"a CUDA export's counter is in {in_short(counter)} of {status.st_size} bytes, which is no file of "
            f"counters: those have {8 * COUNTERS + COUNT_NBYTES}"
        )
