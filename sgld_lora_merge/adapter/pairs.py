"""Pairs of LoRA matrices, and the memory that they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgld_lora_merge.wire.layout import aligned


@dataclass(frozen=True, eq=False)
class Pair:
    """One layer's low-rank update ``scale * b @ a``.

    Attributes:
        layer: the layer prefix as the sender names it, without a wrapper's prefix.
        a: ``[rank, in_features]``, float32, bfloat16 or float16; a convolution's is flattened to two dimensions.
        b: ``[out_features, rank]``, float32, bfloat16 or float16.
        scale: the whole scale, finite as a float32.
        owned: the tensors are the engine's own, so that nobody else writes them.
        kernel: of the convolution that the pair is for; () for a linear layer.
    """

    layer: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    owned: bool = False
    kernel: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Of ``b @ a``."""
        return (self.b.shape[0], self.a.shape[1])

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True)
class Pairing:
    """The pairs that were made, sorted by layer, and a sentence for everything that was wrong."""

    pairs: Sequence[Pair]
    faults: tuple[str, ...]


def run_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the memory from the first tensor's beginning to the last end, where they fill it as a bucket's tensors do.

    Return None where they do not. What lies between them is looked at too: zeros in a bucket of ours, anything in
    another's.
    """
    first, last = min(tensors, key=torch.Tensor.data_ptr), max(tensors, key=torch.Tensor.data_ptr)
    span = max(tensor.data_ptr() + tensor.nbytes for tensor in tensors) - first.data_ptr()
    filled = sum(aligned(tensor.nbytes) for tensor in tensors)
    whole = all(tensor.is_contiguous() for tensor in tensors)
    if not whole or span > filled or first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return None
    return first.as_strided((span // first.element_size(),), (1,))
