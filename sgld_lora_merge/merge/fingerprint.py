"""Fingerprints: whether two parties hold the same bytes, in one pass at the speed of memory.

    sm64:<bytes>:<sum>      bytes in decimal; the sum of `kernels.words` in 16 hexadecimal digits

of the bytes as little-endian 64-bit words, the last one filled up with zeros. It is the same on a CPU and on a GPU. It
finds accidents (memory that was reused, another order, another value); it is no protection against somebody who
computes bytes with the fingerprint of others.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sgld_lora_merge.adapter.known_pairs import BucketPairs
from sgld_lora_merge.adapter.pairs import Pair, run_of
from sgld_lora_merge.merge import kernels
from sgld_lora_merge.merge.plan import ModuleUpdate

WORD = 8  # bytes


def fingerprint_of(tensor: torch.Tensor) -> str:
    """Return the fingerprint of a tensor's bytes, in the order of its elements.

    Args:
        tensor: of any dtype, shape and stride, on a CPU or a GPU, which this waits for.
    """
    ((nbytes, total),) = _sums([tensor])
    return f"sm64:{nbytes}:{total % 2**64:016x}"


def payload_fingerprint(buckets: Mapping[str, torch.Tensor]) -> str:
    """Return the fingerprint of a payload: that of each module's flattened bucket, modules in the order of their names.

    Args:
        buckets: module -> uint8 tensor.
    """
    return ",".join(fingerprint_of(buckets[module]) for module in sorted(buckets))


class PairPrint(NamedTuple):
    """All that a pair is, its bytes by their sums. Plain data, which ranks send to each other."""

    scale: float
    kernel: tuple[int, ...]
    a: tuple[object, ...]
    b: tuple[object, ...]


@dataclass(frozen=True, eq=False)
class SentUpdates:
    """What one rank was sent, to be compared with what the others were sent.

    Attributes:
        updates: as they were read; their pairs may be views into the sender's memory.
        bits: look at the values of A and B. Without, only at all the rest: where every rank reads the same file.
    """

    updates: Sequence[ModuleUpdate]
    bits: bool = True

    @functools.cached_property
    def digest(self) -> str:
        """Equal on two ranks only where the updates are; where it differs, `prints` tells whether they are.

        A bucket is looked at as a whole, with what lies between its tensors.
        """
        return _digest(
            (update.module, update.adapter, update.whole, _signature(update), self._run_sums(update.pairs))
            for update in self.updates
        )

    @functools.cached_property
    def exact_digest(self) -> str:
        """Equal on two ranks where the updates are, however they were packed, and only there."""
        return _digest(sorted(self.prints.items()))

    @functools.cached_property
    def prints(self) -> dict[tuple[str, str], PairPrint]:
        """(module, layer prefix) -> what its pair is."""
        named = [(update.module, pair) for update in self.updates for pair in update.pairs]
        tensors = [side for _, pair in named for side in (pair.a, pair.b)]
        sums = iter(_sums(tensors) if self.bits else [()] * len(tensors))
        return {(module, pair.layer): _print(pair, next(sums), next(sums)) for module, pair in named}

    def _run_sums(self, pairs: Sequence[Pair]) -> list[tuple[int, ...]]:
        if not self.bits:
            return []
        if isinstance(pairs, BucketPairs):
            return _sums([pairs.bucket.flat])
        tensors = [side for pair in pairs for side in (pair.a, pair.b)]
        run = run_of(tensors) if len({tensor.dtype for tensor in tensors}) == 1 else None
        return _sums(tensors if run is None else [run])


def differences(by_rank: Sequence[Mapping[tuple[str, str], PairPrint]]) -> list[str]:
    """Return a sentence for everything in which another rank's pairs differ from those of rank 0."""
    first = by_rank[0]
    faults = []
    for rank, other in enumerate(by_rank):
        for key in sorted(first.keys() | other.keys()):
            mine, theirs = first.get(key), other.get(key)
            if mine == theirs:
                continue
            module, layer = key
            has, lacks = (0, rank) if theirs is None else (rank, 0)
            if mine is None or theirs is None:
                faults.append(f"{module}: rank {has} was sent a pair for {layer!r}, rank {lacks} was not")
            else:
                fields = [name for name in PairPrint._fields if getattr(mine, name) != getattr(theirs, name)]
                what = " and ".join(_WORDS[name] for name in fields)
                shown = f": {theirs.scale} instead of {mine.scale}" if "scale" in fields else ""
                faults.append(f"{module}: rank {rank} was sent another {what} for {layer!r} than rank 0{shown}")
    return faults


_WORDS = {"scale": "scale", "kernel": "kernel", "a": "lora_A", "b": "lora_B"}


def _print(pair: Pair, a: tuple[int, ...], b: tuple[int, ...]) -> PairPrint:
    return PairPrint(pair.scale, pair.kernel, (*_form(pair.a), *a), (*_form(pair.b), *b))


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return (str(tensor.dtype), *tensor.shape)


def _signature(update: ModuleUpdate) -> object:
    if isinstance(update.pairs, BucketPairs):
        return update.pairs.digest
    return [(pair.layer, pair.scale, pair.kernel, _form(pair.a), _form(pair.b)) for pair in update.pairs]


def _digest(parts: Iterable[object]) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(repr(part).encode())
    return hasher.hexdigest()


def _sums(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Return bytes of each tensor and the sum of its words; each device is waited for once, however many there are."""
    by_device: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(place)
    sums = [0] * len(tensors)
    for places in by_device.values():
        totals = torch.stack([_sum_of(tensors[place]) for place in places]).tolist()
        for place, total in zip(places, totals, strict=True):
            sums[place] = total
    return [(tensor.nbytes, total) for tensor, total in zip(tensors, sums, strict=True)]


def _sum_of(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if data.data_ptr() % WORD or data.storage_offset() % WORD:
        data = data.clone()
    whole = data.numel() // WORD
    total = kernels.word_sum(data[: whole * WORD].view(torch.int64))
    if rest := data[whole * WORD :].numel():
        last = torch.zeros(WORD, dtype=torch.uint8, device=data.device)
        last[:rest] = data[whole * WORD :]
        total = total + kernels.word_sum(last.view(torch.int64), whole)
    return total
