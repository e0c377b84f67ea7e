"""Pairs of a request whose signature is known: its names, shapes and scales were checked for an earlier request.

A signature is all of a request but the values of its tensors. Every update of a run has the same one, so what was found
of the first holds for the next; only values are looked at. `merge.plan_reuse` says what else is reused.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sgld_lora_merge.adapter.names import LONGEST_REMEMBERED
from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.wire.bucket import Bucket, Lazy

KEPT_SIGNATURES = 8
KEPT_TENSORS = 2**14  # of all signatures; they are kept before the update is accepted


class PairPlace(NamedTuple):
    """Where the sides of a pair stand among the tensors of a request, and its scale."""

    layer: str
    a: int
    b: int
    scale: float


class KnownPairs(list[PairPlace]):
    """The pairs of every request with one signature."""

    @functools.cached_property
    def digest(self) -> str:
        """Of their places and their scales."""
        return hashlib.sha256(repr(list(self)).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class BucketPairs(Lazy[Pair]):
    """All tensors of a bucket as pairs, sorted by layer, of a known signature; made when one of them is asked for.

    Attributes:
        signature: all of the request but the values.
    """

    bucket: Bucket
    signature: Hashable
    known: KnownPairs

    @property
    def digest(self) -> str:
        """Of all but the values, the same in every process."""
        return f"{self.bucket.layout.digest} {self.known.digest}"

    @property
    def layers(self) -> list[str]:
        return [pair.layer for pair in self.known]

    def make(self) -> list[Pair]:
        return pairs_at(self.known, self.bucket)

    def __len__(self) -> int:
        return len(self.known)


def layers_of(pairs: Sequence[Pair]) -> list[str]:
    """Return the layer prefixes of pairs; those of a bucket are not made for it."""
    return pairs.layers if isinstance(pairs, BucketPairs) else [pair.layer for pair in pairs]


def signature_of(named: Sequence[tuple[str, torch.Tensor]], scaling: Hashable) -> Hashable:
    """Return all of a request but the values of its tensors.

    Args:
        scaling: all that the request says of scales.
    """
    if isinstance(named, Bucket):
        return named.layout, named.flat.device, scaling
    return tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in named), scaling


def known_pairs(signature: Hashable) -> KnownPairs | None:
    """Return the pairs of a signature; None where it is not known."""
    return _known.get(signature)


def pairs_at(known: Iterable[PairPlace], named: Sequence[tuple[str, torch.Tensor]]) -> list[Pair]:
    """Make the pairs of a request whose signature is known."""
    return [Pair(each.layer, named[each.a][1], named[each.b][1], each.scale) for each in known]


def remember(
    signature: Hashable, named: Sequence[tuple[str, torch.Tensor]], pairs: Sequence[Pair]
) -> KnownPairs | None:
    """Keep the pairs of a signature, in place of the oldest ones; return None where they cannot be kept."""
    places = {id(tensor): place for place, (_, tensor) in enumerate(named)}
    too_long = sum(len(name) for name, _ in named) > LONGEST_REMEMBERED * len(named)
    too_many = len(named) > KEPT_TENSORS
    if too_long or too_many or len(places) < len(named):  # one tensor under two names says nothing of the next request
        return None
    while _known and (len(_known) >= KEPT_SIGNATURES or len(named) + 2 * sum(map(len, _known.values())) > KEPT_TENSORS):
        del _known[next(iter(_known))]
    _known[signature] = KnownPairs(PairPlace(p.layer, places[id(p.a)], places[id(p.b)], p.scale) for p in pairs)
    return _known[signature]


_known: dict[Hashable, KnownPairs] = {}
