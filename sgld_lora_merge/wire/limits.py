"""How long and how many the parts of a request may be, and how much memory reading it may take.

All limits of what a caller sends are here. Whatever exceeds one is refused before anything is computed from it.
"""

from __future__ import annotations

from sgld_lora_merge.errors import RequestError, in_short

LONGEST_NAME = 512  # characters of a tensor's or a layer's name
LONGEST_LABEL = 128  # characters of update_id, weight_version, adapter, a module's name, a GPU's UUID
MOST_PAYLOADS = 1024  # of one request: one for each worker
MOST_MODULES = 64  # of one request
MOST_LAYERS = 2**14  # of one module, in a JSON body
MOST_SAMPLES = 2**14  # of one layer
MOST_TENSORS = 2**16  # of one payload or file; an adapter of a large model has some thousand
MOST_OPCODES = 2**22  # of one pickle, which take a second; a bucket's entry has 35
# Memory for each byte that was sent, and what a small request may take. SECURITY.md promises 8 and 64 MiB: the
# difference is for what these figures do not count, which are the copies of the body on its way to a worker.
TIMES_SENT = 5
FREE_NBYTES = 40 * 2**20  # what 9000 entries of a bucket take, or 6000 tensors in a list

# What Python, pydantic and torch take at most for a thing of each kind, in bytes, measured with CPython 3.11. They
# include the copies that the steps after reading make.
TENSOR_NBYTES = 2500
ENTRY_NBYTES = 1200  # a bucket's entry: its description, its slot and its place
_JSON_NBYTES = {b"[": 160, b"{": 320, b":": 160, b",": 40}


def allowance(sent: int) -> int:
    """Return bytes of memory that a request of so many bytes may take beside itself."""
    return max(FREE_NBYTES, TIMES_SENT * sent)


class MemoryBudget:
    """The memory that one request may take. What is made of it is charged before or as it is made.

    Args:
        sent: bytes that were sent.
        nbytes: what it may take; None means the allowance of what was sent.
    """

    def __init__(self, sent: int, nbytes: int | None = None) -> None:
        self.sent = sent
        self.left = self.whole = allowance(sent) if nbytes is None else nbytes

    def spend(self, nbytes: int) -> None:
        """Take bytes from it.

        Raises:
            RequestError: there are not so many left.
        """
        self.left -= nbytes
        if self.left < 0:
            raise self.exceeded()

    def exceeded(self) -> RequestError:
        return RequestError(
            f"the payload has too many parts: what it describes takes more than {self.whole} bytes of memory; "
            "its parts may hold each other, or be named too often"
        )


def check_tensors(count: int, sent: int, what: str) -> None:
    """Check that a request of so many bytes may hold so many tensors.

    Raises:
        RequestError: it may not.
    """
    most = min(MOST_TENSORS, allowance(sent) // TENSOR_NBYTES)
    if count > most:
        raise RequestError(f"{what} of {sent} bytes has {count} tensors, at most {most} are read")


def check_json(text: str | bytes, what: str, sent: int | None = None) -> None:
    """Check what a JSON text takes when it is read, by its punctuation alone.

    A text that is short takes little whatever it holds. A long one is a payload in base64, without punctuation, which
    is looked through at memory speed.

    Punctuation within strings is counted too: names have hardly any, and base64 has none.

    Args:
        sent: bytes of the request that the text is of; None where it is all of it.

    Raises:
        RequestError: more than a text of its length may take.
    """
    if len(text) * max(_JSON_NBYTES.values()) <= FREE_NBYTES:
        return
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    nbytes = sum(each * _count(data, mark) for mark, each in _JSON_NBYTES.items())
    if nbytes > allowance(len(text) if sent is None else sent):
        raise RequestError(f"{what} of {len(text)} bytes has too many parts: they take up to {nbytes} bytes of memory")


def _count(data: bytes, mark: bytes) -> int:
    """Return how often a byte occurs. Where it is rare, looking for the next one is ten times as fast as counting."""
    at = -1
    for found in range(64):
        if (at := data.find(mark, at + 1)) < 0:
            return found
    return 64 + data.count(mark, at + 1)


def check_name(name: str) -> str:
    """Check the length of a tensor's or a layer's name, before a pattern sees it.

    Raises:
        RequestError: it is too long; the message holds its beginning.
    """
    if len(name) > LONGEST_NAME:
        raise RequestError(f"{in_short(name)} is a name of {len(name)} characters, at most {LONGEST_NAME} are read")
    return name
