"""Make pairs of named tensors: every check that needs no model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from sgld_lora_merge.adapter.known_pairs import BucketPairs, known_pairs, pairs_at, remember, signature_of
from sgld_lora_merge.adapter.names import ALPHA, OtherKindError, layer_name, other_kind, parse_name
from sgld_lora_merge.adapter.pairs import Pair, Pairing, run_of
from sgld_lora_merge.adapter.precision import checked_scale, scale_of
from sgld_lora_merge.errors import Faults, RequestError, in_short, name_some, shape_in_short
from sgld_lora_merge.wire.bucket import Bucket
from sgld_lora_merge.wire.layout import DTYPES
from sgld_lora_merge.wire.schema import Alpha

DIMENSIONS = range(2, 6)  # a linear layer's two, and up to three more for the kernel of a convolution
ALPHA_DTYPES = {dtype for dtype in DTYPES.values() if not dtype.is_complex}
PAIR_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pair_up(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    alpha: Alpha | None = None,
    rank: int | None = None,
    layer_scaling: Mapping[str, float] | None = None,
    alpha_required: bool = False,
) -> Pairing:
    """Group named tensors into pairs and check all that can be checked without a model.

    Faults are names that are not LoRA names, duplicates, lone sides, shapes, ranks, dtypes, scales, non-finite values,
    and nothing at all.

    Args:
        named_tensors: names as in `parse_name`, in any order.
        alpha: scale is alpha / rank; "rank" and None mean alpha = rank. A layer's own ``.alpha`` entry goes before it.
        rank: must be the rank of every pair without a scale of its own; None checks nothing.
        layer_scaling: layer prefix -> the whole scale of that layer, in place of any alpha / rank.
        alpha_required: a layer whose alpha nothing says is a fault, instead of alpha = rank.
    """
    named = named_tensors if isinstance(named_tensors, Bucket) else list(named_tensors)
    own = {layer_name(layer): scale for layer, scale in (layer_scaling or {}).items()}
    scaling = _Scaling(alpha, rank, own, alpha_required)
    signature = signature_of(named, scaling.signature)
    known = known_pairs(signature)
    if known is None:
        pairing, halves = _pair_up(named, scaling)
        plain = len(halves) == len(named) and not any(pair.kernel for pair in pairing.pairs)
        if not pairing.faults and plain:
            known = remember(signature, named, pairing.pairs)
        if known is None:
            return Pairing(pairing.pairs, tuple(dict.fromkeys((*pairing.faults, *_non_finite(halves)))))
    if isinstance(named, Bucket):
        faults = () if _is_finite(named.elements) else _non_finite_of(named)
        return Pairing(BucketPairs(named, signature, known), faults)
    return Pairing(pairs_at(known, named), _non_finite_of(named))


def _pair_up(named: Sequence[tuple[str, torch.Tensor]], scaling: _Scaling) -> tuple[Pairing, list[_Half]]:
    """Do all of `pair_up` that does not look at values; return also the sides that it found."""
    faults = Faults()
    halves, alphas = _group(named, faults)
    if unused := sorted(scaling.own_scales.keys() - halves.keys()):
        faults.append(f"layer_scaling names layers that have no pair: {name_some(unused)}")
    pairs = []
    for layer in sorted(halves):
        try:
            pairs.append(_make_pair(layer, halves[layer], functools.partial(scaling.of, own_alpha=alphas.get(layer))))
        except RequestError as error:
            faults.extend(error.faults)
    said = scaling.own_scales.keys() | alphas.keys()
    if scaling.alpha is None and scaling.alpha_required and (silent := sorted(halves.keys() - said)):
        faults.append(
            f"no alpha for {name_some(silent)}: PEFT keeps it in adapter_config.json; add lora_alpha=NUMBER to the "
            "query, or lora_alpha=rank if scale 1.0 is meant, as by ComfyUI for a file that says none"
        )
    if lone := sorted(alphas.keys() - halves.keys()):
        faults.append(f"alpha entries of layers that have no pair: {name_some(lone)}")
    if not halves and not faults:
        faults.append("the payload holds no lora_A / lora_B tensors")
    # what is wrong with the request is wrong in all layers
    return Pairing(tuple(pairs), tuple(dict.fromkeys(faults))), [h for sides in halves.values() for h in sides.values()]


class _Half(NamedTuple):
    """One side of a pair."""

    name: str
    adapter: str
    tensor: torch.Tensor


class _Scaling(NamedTuple):
    """What a request says of scales, besides alpha entries."""

    alpha: Alpha | None
    rank: int | None
    own_scales: Mapping[str, float]
    alpha_required: bool

    @property
    def signature(self) -> Hashable:
        return self.alpha, self.rank, tuple(self.own_scales.items()), self.alpha_required

    def of(self, layer: str, rank: int, own_alpha: float | None) -> float:
        if layer in self.own_scales:
            return checked_scale(self.own_scales[layer], f"layer_scaling of {in_short(layer)}")
        if own_alpha is not None:
            return checked_scale(own_alpha / rank, f"the alpha entry {own_alpha} of {in_short(layer)} over rank {rank}")
        if self.rank is not None and self.rank != rank:
            raise RequestError(f"{in_short(layer)} has rank {rank}, the request says lora_rank {self.rank}")
        return scale_of(self.alpha, rank)


def _group(
    named: Iterable[tuple[str, torch.Tensor]], faults: list[str]
) -> tuple[dict[str, dict[str, _Half]], dict[str, float]]:
    """Return layer -> side -> tensor, and layer -> alpha entry; append faults of single tensors to ``faults``."""
    halves: dict[str, dict[str, _Half]] = {}
    alphas: dict[str, float] = {}
    others: dict[str, dict[str, str]] = {}
    for name, tensor in named:
        try:
            parsed = parse_name(name)
            if parsed.side == ALPHA:
                if parsed.layer in alphas:
                    raise RequestError(f"{in_short(name)} is the second alpha entry of its layer")
                alphas[parsed.layer] = _alpha(name, tensor)
                continue
        except OtherKindError as error:
            others.setdefault(error.kind, {})[name] = error.layer
            continue
        except RequestError as error:
            faults.extend(error.faults)
            continue
        sides = halves.setdefault(parsed.layer, {})
        if parsed.side in sides:
            faults.append(f"{in_short(name)} and {in_short(sides[parsed.side].name)} are the same lora_{parsed.side}")
        else:
            sides[parsed.side] = _Half(name, parsed.adapter, tensor)
        if tensor.dtype not in PAIR_DTYPES:
            faults.append(f"{in_short(name)} has dtype {tensor.dtype}; float32, bfloat16 and float16 are merged")
        if tensor.dim() not in DIMENSIONS:
            expected = f"lora_{parsed.side} has two dimensions, or a kernel besides"
            faults.append(f"{in_short(name)} has shape {shape_in_short(tensor.shape)}; {expected}")
        elif tensor.numel() == 0:
            faults.append(f"{in_short(name)} is empty: shape {shape_in_short(tensor.shape)}")
    for kind, layers in others.items():
        faults.append(other_kind(list(layers), kind))
        for layer in layers.values():
            if layer not in halves:  # that its alpha has no pair is no fault of its own
                alphas.pop(layer, None)
    return halves, alphas


def _alpha(name: str, tensor: torch.Tensor) -> float:
    if tensor.numel() != 1 or tensor.dtype not in ALPHA_DTYPES:
        shape = shape_in_short(tensor.shape)
        raise RequestError(f"{in_short(name)} has shape {shape} and dtype {tensor.dtype}; an alpha is one number")
    return float(tensor)


def _make_pair(layer: str, sides: Mapping[str, _Half], scale: Callable[[str, int], float]) -> Pair:
    if len(sides) == 1:
        (present,) = sides
        missing = "B" if present == "A" else "A"
        raise RequestError(f"{in_short(layer)} has lora_{present} but no lora_{missing}")
    a, b = sides["A"], sides["B"]
    if a.adapter != b.adapter:
        raise RequestError(f"{in_short(a.name)} and {in_short(b.name)} belong to different adapters")
    if any(half.tensor.dim() not in DIMENSIONS or not half.tensor.numel() for half in (a, b)):
        raise RequestError()  # named where the tensors were grouped
    kernel = tuple(a.tensor.shape[2:])
    if _is_stack(a.tensor, b.tensor):
        raise RequestError(
            f"{layer!r}: lora_A {tuple(a.tensor.shape)} and lora_B {tuple(b.tensor.shape)} are "
            f"{a.tensor.shape[0]} pairs in one; send each section of a fused layer under its own name, as "
            "to_q, to_k and to_v, with two dimensions"
        )
    if tuple(b.tensor.shape[2:]) != (1,) * len(kernel):
        raise RequestError(
            f"{in_short(layer)}: lora_B {tuple(b.tensor.shape)} does not fit lora_A {tuple(a.tensor.shape)}: it needs "
            f"kernel {(1,) * len(kernel)}"
        )
    own_rank = a.tensor.shape[0]
    if b.tensor.shape[1] != own_rank:
        raise RequestError(
            f"{in_short(layer)}: lora_A {tuple(a.tensor.shape)} has rank {own_rank}, "
            f"lora_B {tuple(b.tensor.shape)} has rank {b.tensor.shape[1]}"
        )
    if a.tensor.device != b.tensor.device:
        raise RequestError(f"{in_short(layer)}: lora_A is on {a.tensor.device}, lora_B on {b.tensor.device}")
    matrix_a, matrix_b = (half.tensor.flatten(1) if kernel else half.tensor for half in (a, b))
    return Pair(layer, matrix_a, matrix_b, scale(layer, own_rank), kernel=kernel)


def _is_stack(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether these are several pairs, ``[sections, rank, in]`` and ``[sections, out, rank]``, and no kernel."""
    stacked = a.dim() == b.dim() == 3 and a.shape[:2] == (b.shape[0], b.shape[2])
    return stacked and tuple(b.shape[1:]) != (a.shape[0], 1)


def _non_finite_of(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, ...]:
    return tuple(_non_finite([_Half(name, "", tensor) for name, tensor in named]))


def _non_finite(halves: Sequence[_Half]) -> list[str]:
    """Return faults for NaN and infinite values; one device synchronisation however many tensors there are."""
    device = next((half.tensor.device for half in halves), None)
    sound = [half for half in halves if half.tensor.dtype in PAIR_DTYPES and half.tensor.device == device]
    checked = [half for half in sound if half.tensor.numel()]
    if not checked or (device is not None and device.type == "cuda" and _all_finite(checked)):
        return []
    # Both show in the extremes, which a CPU finds in a tenth of the time that it needs to look at every element.
    extremes = torch.stack([torch.stack(torch.aminmax(half.tensor)).float() for half in checked])
    finite = torch.isfinite(extremes).all(dim=1).tolist()
    return [
        f"{in_short(half.name)} holds NaN or infinite values"
        for half, good in zip(checked, finite, strict=True)
        if not good
    ]


def _all_finite(halves: Sequence[_Half]) -> bool:
    """Return whether sums of squares are finite, in one launch or a few on a GPU.

    May return False for finite but large values (the square overflows); the caller then checks exactly.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for half in halves:
        by_dtype.setdefault(half.tensor.dtype, []).append(half.tensor.detach())
    runs = [run_of(tensors) for tensors in by_dtype.values()]
    if all(run is not None and _is_finite(run) for run in runs):
        return True
    norms = [torch.stack(torch._foreach_norm(tensors)).float() for tensors in by_dtype.values()]
    return bool(torch.isfinite(torch.cat(norms)).all())


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite, in one pass.

    On a GPU it may return False for finite but large values (the square overflows); the caller then checks exactly.
    """
    if tensor.is_cuda:
        return bool(torch.isfinite(torch.linalg.vector_norm(tensor, dtype=torch.float32)))
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
