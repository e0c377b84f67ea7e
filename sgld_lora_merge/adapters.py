"""Adapters as the engine holds them: pairs in memory of its own, each at the targets it lands on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sgld_lora_merge.base_store import Key
from sgld_lora_merge.kernels import Term
from sgld_lora_merge.pairs import Pair
from sgld_lora_merge.precision import Precision
from sgld_lora_merge.targets import Span, Target

DEFAULT_ADAPTER = "default"


@dataclass(frozen=True, eq=False)
class Placed:
    """A pair at one of its targets; once it is in the engine's own memory, perhaps only what this rank takes of it."""

    pair: Pair
    target: Target


Adapter = Mapping[Key, Placed]
Adapters = Mapping[str, Adapter]  # by name; a target's merged weight is W0 plus what each of them has there

_Copies = list[tuple[torch.Tensor, torch.Tensor]]  # destination, source


def all_placed(adapters: Adapters) -> list[Placed]:
    return [placed for adapter in adapters.values() for placed in adapter.values()]


def all_pairs(adapters: Adapters) -> list[Pair]:
    return list({id(placed.pair): placed.pair for placed in all_placed(adapters)}.values())


def terms_at(adapters: Adapters, target: Target) -> tuple[Term, ...]:
    """What the adapters have at a target; in the order of their names, whatever the order they came in."""
    key = target.key
    placed = [adapters[name][key] for name in sorted(adapters) if key in adapters[name]]
    return tuple(Term(p.pair.a, p.pair.b, p.pair.scale, p.target.b_rows, p.target.a_cols) for p in placed)


def owned(adapter: Adapter, place: Callable[[Target], torch.device], precision: Precision) -> Adapter:
    """The adapter in the engine's own memory, each pair beside the weight that it is merged into.

    What is there already stays the same object. FP16 mode keeps pairs whole: its product is that of the whole layer, as
    a trainer computes it.

    Args:
        place: the device of a target's pairs.
    """
    groups: dict[tuple[int, tuple[Span, ...], torch.device], list[Placed]] = {}
    for placed in adapter.values():
        device = place(placed.target)
        if not placed.pair.owned or placed.pair.a.device != device:
            groups.setdefault((id(placed.pair), placed.target.a_cols, device), []).append(placed)
    if not groups:
        return adapter
    copies: _Copies = []
    result = dict(adapter)
    for (_, _, device), group in groups.items():
        pair, targets = group[0].pair, [placed.target for placed in group]
        if pair.owned or precision is Precision.FP16:
            own = _whole(pair, device, copies)
        else:
            own, targets = _part(pair, targets, device, copies)
        result |= {target.key: Placed(own, target) for target in targets}
    _run(copies)
    return result


def on_host(adapters: Adapters) -> Adapters:
    """The adapters with their pairs in host memory; what is there already stays the same object."""
    cpu = torch.device("cpu")
    return {name: owned(adapter, lambda _: cpu, Precision.FP16) for name, adapter in adapters.items()}


def own_copy(pair: Pair) -> Pair:
    """The pair in memory of the engine's own, on the host."""
    copies: _Copies = []
    own = _whole(pair, torch.device("cpu"), copies)
    _run(copies)
    return own


def _whole(pair: Pair, device: torch.device, copies: _Copies) -> Pair:
    a, b = (torch.empty(each.shape, dtype=each.dtype, device=device) for each in (pair.a, pair.b))
    copies += ((a, pair.a), (b, pair.b))
    return Pair(pair.layer, a, b, pair.scale, True, pair.kernel)


def _part(pair: Pair, targets: Sequence[Target], device: torch.device, copies: _Copies) -> tuple[Pair, list[Target]]:
    """What targets of the same columns take of a pair, and the targets upon that."""
    columns, rows = targets[0].a_cols, [span for target in targets for span in target.b_rows]
    if columns == (Span(0, pair.a.shape[1]),) and rows == [Span(0, pair.b.shape[0])]:
        return _whole(pair, device, copies), list(targets)
    a, b = _slots(pair.a, columns, 1, device, copies), _slots(pair.b, rows, 0, device, copies)
    moved, start = [], 0
    for target in targets:
        own_rows = Span(0, sum(span.size for span in target.b_rows)).shifted(start)
        moved.append(replace(target, b_rows=(own_rows,), a_cols=(Span(0, a.shape[1]),)))
        start = own_rows.stop
    return replace(pair, a=a, b=b, owned=True), moved


def _slots(
    tensor: torch.Tensor, spans: Sequence[Span], dim: int, device: torch.device, copies: _Copies
) -> torch.Tensor:
    """Memory for those spans of one dimension, one after the other; what is to be copied there is added."""
    sizes = [span.size for span in spans]
    shape = [sum(sizes) if d == dim else size for d, size in enumerate(tensor.shape)]
    memory = torch.empty(shape, dtype=tensor.dtype, device=device)
    for span, slot in zip(spans, memory.split(sizes, dim), strict=True):
        copies.append((slot, tensor.detach().narrow(dim, span.start, span.size)))
    return memory


def _run(copies: _Copies) -> None:
    """All copies together: on a GPU a thousand of them take a few launches."""
    if copies:
        destinations, sources = zip(*copies, strict=True)
        with torch.no_grad():
            torch._foreach_copy_(destinations, sources)
