"""Ports for the engines of one machine."""

from __future__ import annotations

import random
import socket

from sgld_lora_merge.errors import LoraMergeError

# below the range from which Linux takes the ports of outgoing connections
LOWEST, HIGHEST = 20000, 32000


class Ports:
    """Consecutive ports that nobody listens on, and that no other engine on this machine is given.

    A name in Linux's abstract socket namespace keeps others away. It is as wide as the ports are, one network
    namespace, and goes with the process.

    Args:
        count: how many.

    Raises:
        LoraMergeError: there are none.
    """

    def __init__(self, count: int) -> None:
        blocks = list(range(LOWEST, HIGHEST - count, count))
        random.shuffle(blocks)
        for first in blocks:
            lock = socket.socket(socket.AF_UNIX)
            try:
                lock.bind(f"\0sgld_lora_merge_ports_{first}")
            except OSError:
                lock.close()
                continue
            if all(map(_is_free, range(first, first + count))):
                self.first, self._lock = first, lock
                return
            lock.close()
        raise LoraMergeError(f"no {count} consecutive ports are free between {LOWEST} and {HIGHEST}")

    def close(self) -> None:
        """Give the ports back."""
        self._lock.close()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
