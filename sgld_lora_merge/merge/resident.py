"""Keep adapters in the engine's own memory: each pair beside the weight that it is merged into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from sgld_lora_merge.adapter.known_pairs import BucketPairs
from sgld_lora_merge.adapter.pairs import Pair
from sgld_lora_merge.adapter.precision import Precision
from sgld_lora_merge.merge.base_store import Key
from sgld_lora_merge.merge.kernels import Term
from sgld_lora_merge.merge.spans import Span
from sgld_lora_merge.merge.targets import Target
from sgld_lora_merge.wire.bucket import Bucket


@dataclass(frozen=True, eq=False)
class Placed:
    """A pair at one of its targets; once it is in the engine's own memory, perhaps only what this rank takes of it."""

    pair: Pair
    target: Target


Adapter = Mapping[Key, Placed]
Adapters = Mapping[str, Adapter]  # by name; a target's merged weight is W0 plus what each of them has there


@dataclass(frozen=True, eq=False)
class Copy:
    """What the engine keeps of one side of a layer's pair.

    Attributes:
        slot: memory of the engine's own.
        side: "a" or "b".
        dim, span: the part of the side that is kept; None keeps all of it.
    """

    slot: torch.Tensor
    layer: str
    side: Literal["a", "b"]
    dim: int = 0
    span: Span | None = None

    def source(self, pair: Pair) -> torch.Tensor:
        tensor = pair.a if self.side == "a" else pair.b
        return tensor if self.span is None else tensor.detach().narrow(self.dim, self.span.start, self.span.size)


def all_placed(adapters: Adapters) -> list[Placed]:
    return [placed for adapter in adapters.values() for placed in adapter.values()]


def all_pairs(adapters: Adapters) -> list[Pair]:
    return list({id(placed.pair): placed.pair for placed in all_placed(adapters)}.values())


def terms_at(adapters: Adapters, target: Target) -> tuple[Term, ...]:
    """Return the adapters' terms at a target, in the order of the adapters' names."""
    key = target.key
    placed = [adapters[name][key] for name in sorted(adapters) if key in adapters[name]]
    return tuple(Term(p.pair.a, p.pair.b, p.pair.scale, p.target.b_rows, p.target.a_cols) for p in placed)


@dataclass(frozen=True, eq=False)
class ResidentAdapter:
    """An adapter in the engine's own memory.

    Attributes:
        copies: what was copied there.
        memory: of all copies, where it is a copy of the bucket that they come from.
    """

    adapter: Adapter
    copies: Sequence[Copy] = ()
    memory: torch.Tensor | None = None


def make_resident(
    adapter: Adapter, device_of: Callable[[Target], torch.device], precision: Precision, bucket: Bucket | None = None
) -> ResidentAdapter:
    """Copy an adapter into the engine's own memory, each pair beside the weight that it is merged into.

    What is there already stays the same object. FP16 mode keeps pairs whole: its product is that of the whole layer, as
    a trainer computes it.

    Args:
        device_of: returns the device of a target's pairs.
        bucket: whose views all pairs are that are not the engine's own.
    """
    groups: Groups = {}
    for placed in adapter.values():
        device = device_of(placed.target)
        if not placed.pair.owned or placed.pair.a.device != device:
            groups.setdefault((id(placed.pair), placed.target.a_cols, device), []).append(placed)
    if not groups:
        return ResidentAdapter(adapter)
    memory, new = None, _new
    if bucket is not None and _takes_all(groups, precision):
        _, _, device = next(iter(groups))
        memory = bucket.flat.to(device, copy=True)
        new = partial(_same_place, bucket, memory)
    copies: list[Copy] = []
    sources: list[torch.Tensor] = []
    result = dict(adapter)
    for (_, _, device), group in groups.items():
        pair, targets = group[0].pair, [placed.target for placed in group]
        if _is_whole(group, precision):
            own, made = _whole(pair, device, new)
        else:
            own, made, targets = _part(pair, targets, device)
        copies += made
        sources += (copy.source(pair) for copy in made)
        result |= {target.key: Placed(own, target) for target in targets}
    if memory is None:
        _copy_all(copies, sources)
    return ResidentAdapter(result, copies, memory)


def fill(copies: Sequence[Copy], memory: torch.Tensor | None, pairs: Sequence[Pair]) -> None:
    """Copy the values of other pairs of the same signature into the memory that `make_resident` made."""
    if memory is not None and isinstance(pairs, BucketPairs):
        memory.copy_(pairs.bucket.flat)
    else:
        by_layer = {pair.layer: pair for pair in pairs}
        _copy_all(copies, [copy.source(by_layer[copy.layer]) for copy in copies])


def on_host(adapters: Adapters) -> Adapters:
    """Move the pairs of adapters to host memory; what is there already stays the same object."""
    cpu = torch.device("cpu")
    return {name: make_resident(adapter, lambda _: cpu, Precision.FP16).adapter for name, adapter in adapters.items()}


def own_copy(pair: Pair) -> Pair:
    """Copy a pair into memory of the engine's own, on the host."""
    own, copies = _whole(pair, torch.device("cpu"))
    _copy_all(copies, [copy.source(pair) for copy in copies])
    return own


# the targets of a pair that take the same of its columns and are on the same device
Groups = dict[tuple[int, tuple[Span, ...], torch.device], list[Placed]]


def _takes_all(groups: Groups, precision: Precision) -> bool:
    """Return whether the pairs are all the sender's, all kept whole, and on one device."""
    return len({device for _, _, device in groups}) == 1 and all(
        not group[0].pair.owned and _is_whole(group, precision) for group in groups.values()
    )


New = Callable[[torch.Tensor, torch.device], torch.Tensor]  # memory for a tensor's copy on a device


def _new(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _same_place(bucket: Bucket, memory: torch.Tensor, tensor: torch.Tensor, _: torch.device) -> torch.Tensor:
    """Return the place of a bucket's tensor in a copy of the bucket."""
    start = (tensor.data_ptr() - bucket.flat.data_ptr()) // tensor.element_size()
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), start)


def _whole(pair: Pair, device: torch.device, new: New = _new) -> tuple[Pair, list[Copy]]:
    a, b = (new(each, device) for each in (pair.a, pair.b))
    return Pair(pair.layer, a, b, pair.scale, True, pair.kernel), [Copy(a, pair.layer, "a"), Copy(b, pair.layer, "b")]


def _is_whole(group: Sequence[Placed], precision: Precision) -> bool:
    """Return whether targets of the same columns keep their pair as it is: they take all, or may not take a part."""
    pair, rows = group[0].pair, [span for placed in group for span in placed.target.b_rows]
    if pair.owned or precision is Precision.FP16:
        return True
    return group[0].target.a_cols == (Span(0, pair.a.shape[1]),) and rows == [Span(0, pair.b.shape[0])]


def _part(pair: Pair, targets: Sequence[Target], device: torch.device) -> tuple[Pair, list[Copy], list[Target]]:
    """Take the part of a pair that targets of the same columns use; return the targets with respect to that part."""
    columns, rows = targets[0].a_cols, [span for target in targets for span in target.b_rows]
    (a, of_a), (b, of_b) = _slots(pair, "a", columns, 1, device), _slots(pair, "b", rows, 0, device)
    moved, start = [], 0
    for target in targets:
        own_rows = Span(0, sum(span.size for span in target.b_rows)).shifted(start)
        moved.append(replace(target, b_rows=(own_rows,), a_cols=(Span(0, a.shape[1]),)))
        start = own_rows.stop
    return replace(pair, a=a, b=b, owned=True), of_a + of_b, moved


def _slots(
    pair: Pair, side: Literal["a", "b"], spans: Sequence[Span], dim: int, device: torch.device
) -> tuple[torch.Tensor, list[Copy]]:
    """Allocate memory for spans of one dimension, one after the other; return also what is to be copied there."""
    tensor = pair.a if side == "a" else pair.b
    sizes = [span.size for span in spans]
    shape = [sum(sizes) if d == dim else size for d, size in enumerate(tensor.shape)]
    memory = torch.empty(shape, dtype=tensor.dtype, device=device)
    slots = zip(memory.split(sizes, dim), spans, strict=True)
    return memory, [Copy(slot, pair.layer, side, dim, span) for slot, span in slots]


def _copy_all(copies: Sequence[Copy], sources: list[torch.Tensor]) -> None:
    """Copy all together: on a GPU a thousand copies take a few launches."""
    if copies:
        with torch.no_grad():
            torch._foreach_copy_([copy.slot for copy in copies], sources)
