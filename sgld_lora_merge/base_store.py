"""Where the pristine base weight W0 lives: one copy of the rows that are targets, and of no others."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Key = tuple[str, int]


class BaseStore:
    """W0 of one module, kept beside the live weights on their own device.

    A snapshot is taken when a section first becomes a target, while the live weight still is its base; after that the
    merged weight is always computed from the snapshot.
    """

    def __init__(self) -> None:
        self._base: dict[Key, torch.Tensor] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._base

    def __getitem__(self, key: Key) -> torch.Tensor:
        return self._base[key]

    @property
    def nbytes(self) -> int:
        return sum(base.nbytes for base in self._base.values())

    @property
    def kind(self) -> str:
        """What the answer and the status call the store: ``device`` or ``host``."""
        return "device" if any(base.is_cuda for base in self._base.values()) else "host"

    def adopt(self, snapshots: Mapping[Key, torch.Tensor]) -> None:
        """Keep snapshots that `snapshot` made; the store owns them from now on."""
        self._base.update(snapshots)

    def drop(self) -> None:
        """Forget every base weight: something else has changed the live weights for good."""
        self._base.clear()


def snapshot(rows: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of live rows that still hold the base weight."""
    return rows.detach().clone(memory_format=torch.contiguous_format)
