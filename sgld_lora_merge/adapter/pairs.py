"""Tensor names to LoRA pairs: every check that needs no model."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sgld_lora_merge.adapter.precision import checked_scale, scale_of
from sgld_lora_merge.errors import Faults, RequestError, in_short, name_some, shape_in_short
from sgld_lora_merge.wire.bucket import DTYPES, Bucket, Lazy, aligned
from sgld_lora_merge.wire.limits import check_name

DIMENSIONS = range(2, 6)  # a linear layer's two, and up to three more for the kernel of a convolution
ALPHA_DTYPES = {dtype for dtype in DTYPES.values() if not dtype.is_complex}
PAIR_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST_REMEMBERED = 256  # characters of a name whose parts are kept for the next update
WRAPPER_PREFIXES = ("base_model.model.", "diffusion_model.")  # PEFT's, and the one of the original checkpoints

# <layer>.lora_A, or as diffusers and the original checkpoints write it: lora_down, lora.down; then adapter and .weight.
# No pattern here looks further than a few characters from where it starts, so that it takes linear time.
_SIDE = re.compile(r"\.lora[_.](A|B|down|up)(?=\..|\Z)")
_SIDES = {"A": "A", "B": "B", "down": "A", "up": "B"}
_ALPHA = "alpha"
# Names that other trainers write and that must not be dropped in silence: pattern, what it is.
_REFUSED_NAMES = (
    (re.compile(r"lora_magnitude_vector|\.dora_scale$"), "a DoRA magnitude; DoRA is not a low-rank update"),
    (re.compile(r"\.lora_bias$|\.bias$|\.diff_b$"), "a bias; it is not merged"),
    (re.compile(r"\.diff$|\.set_weight$"), "a full difference; send it as a full-weight update"),
    (re.compile(r"\.lora_embedding_[AB](\.|$)"), "of an nn.Embedding; linear layers and convolutions are merged"),
    (re.compile(r"^lora_te\d?_"), "of a text encoder in kohya format; send that module's layers under dotted names"),
)  # fmt: skip


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
class LoraName:
    """A tensor name taken apart: ``<layer>.lora_<side>[.<adapter>][.weight]``, or ``<layer>.alpha``.

    Attributes:
        side: "A", "B", or "alpha" for a layer's own alpha.
    """

    layer: str
    side: str
    adapter: str


def parse_name(name: str) -> LoraName:
    """Take a LoRA tensor name apart.

    Raises:
        RequestError: any other name; the message holds it, and says what it is where that is known.
    """
    check_name(name)
    return _parsed(name) if len(name) <= LONGEST_REMEMBERED else _parsed.__wrapped__(name)


@functools.lru_cache(maxsize=2**14)  # every update of a run has the same names
def _parsed(name: str) -> LoraName:
    for pattern, kind in _REFUSED_NAMES:
        if pattern.search(name):
            raise RequestError(f"{in_short(name)} is {kind}")
    if name.endswith(".alpha"):
        return LoraName(layer_name(name.removesuffix(".alpha")), _ALPHA, "")
    match = None if "\n" in name else _SIDE.search(name, 1)
    if match is None:
        raise RequestError(f"{in_short(name)} is not named <layer>.lora_A or <layer>.lora_B")
    adapter = name[match.end() :].removeprefix(".")
    adapter = "" if adapter == "weight" else adapter.removesuffix(".weight")
    return LoraName(layer_name(name[: match.start()]), _SIDES[match[1]], adapter)


def layer_name(name: str) -> str:
    """A layer prefix without what trainers put in front of it."""
    for prefix in WRAPPER_PREFIXES:
        name = name.removeprefix(prefix)
    return name


@dataclass(frozen=True)
class Pairing:
    """The pairs that were made, sorted by layer, and a sentence for everything that was wrong."""

    pairs: Sequence[Pair]
    faults: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class BucketPairs(Lazy[Pair]):
    """All tensors of a bucket as pairs, sorted by layer, of a request whose form is known; made when one is asked for.

    Attributes:
        form: all of the request but the values.
    """

    bucket: Bucket
    form: Hashable
    remembered: _RememberedPairs

    @property
    def digest(self) -> str:
        """Of all but the values, the same in every process."""
        return f"{self.bucket.layout.digest} {self.remembered.digest}"

    @property
    def layers(self) -> list[str]:
        return [pair.layer for pair in self.remembered]

    def make(self) -> list[Pair]:
        return _made(self.remembered, self.bucket)

    def __len__(self) -> int:
        return len(self.remembered)


def layers_of(pairs: Sequence[Pair]) -> list[str]:
    """Their layer prefixes; pairs that are not made yet need not be made for it."""
    return pairs.layers if isinstance(pairs, BucketPairs) else [pair.layer for pair in pairs]


def pair_up(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    alpha: float | None = None,
    rank: int | None = None,
    layer_scaling: Mapping[str, float] | None = None,
    alpha_required: bool = False,
) -> Pairing:
    """Group named tensors into pairs and check all that can be checked without a model.

    Faults are names that are not LoRA names, duplicates, lone sides, shapes, ranks, dtypes, scales, non-finite values,
    and nothing at all.

    Args:
        named_tensors: names as in `parse_name`, in any order.
        alpha: scale is alpha / rank; None means alpha = rank. A layer's own ``.alpha`` entry goes before it.
        rank: must be the rank of every pair without a scale of its own; None checks nothing.
        layer_scaling: layer prefix -> the whole scale of that layer, in place of any alpha / rank.
        alpha_required: a layer whose alpha nothing says is a fault, instead of alpha = rank.
    """
    named = named_tensors if isinstance(named_tensors, Bucket) else list(named_tensors)
    own = {layer_name(layer): scale for layer, scale in (layer_scaling or {}).items()}
    scaling = _Scaling(alpha, rank, own, alpha_required)
    form = _form(named, scaling)
    if form not in _remembered:
        pairing, halves = _pair_up(named, scaling)
        plain = len(halves) == len(named) and not any(pair.kernel for pair in pairing.pairs)
        if pairing.faults or not plain or not _remember(form, named, pairing.pairs):
            return Pairing(pairing.pairs, tuple(dict.fromkeys((*pairing.faults, *_non_finite(halves)))))
    remembered = _remembered[form]
    if isinstance(named, Bucket):
        faults = () if _is_finite(named.elements) else _non_finite_of(named)
        return Pairing(BucketPairs(named, form, remembered), faults)
    return Pairing(_made(remembered, named), _non_finite_of(named))


class _Remembered(NamedTuple):
    """A pair of a request of some form: where its sides stand among the tensors, and its scale."""

    layer: str
    a: int
    b: int
    scale: float


class _RememberedPairs(list[_Remembered]):
    """The pairs of a request of some form."""

    @functools.cached_property
    def digest(self) -> str:
        """Of where they are and of their scales."""
        return hashlib.sha256(repr(list(self)).encode()).hexdigest()


# Every update of a run has the same names, shapes and scales; what was found of them holds for the next one.
_remembered: dict[Hashable, _RememberedPairs] = {}
REMEMBERED_FORMS = 8
REMEMBERED_TENSORS = 2**14  # of all forms; they are kept before the update is accepted


def _form(named: Sequence[tuple[str, torch.Tensor]], scaling: _Scaling) -> Hashable:
    """All of a request but the values of its tensors."""
    tensors: Hashable
    if isinstance(named, Bucket):
        tensors = named.layout, named.flat.device
    else:
        tensors = tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in named)
    return tensors, scaling.alpha, scaling.rank, tuple(scaling.own_scales.items()), scaling.alpha_required


def _made(remembered: Iterable[_Remembered], named: Sequence[tuple[str, torch.Tensor]]) -> list[Pair]:
    return [Pair(r.layer, named[r.a][1], named[r.b][1], r.scale) for r in remembered]


def _remember(form: Hashable, named: Sequence[tuple[str, torch.Tensor]], pairs: Sequence[Pair]) -> bool:
    """Whether the form could be remembered."""
    places = {id(tensor): place for place, (_, tensor) in enumerate(named)}
    too_long = sum(len(name) for name, _ in named) > LONGEST_REMEMBERED * len(named)
    too_many = len(named) > REMEMBERED_TENSORS
    if too_long or too_many or len(places) < len(named):  # one tensor under two names says nothing of the next request
        return False
    while _remembered and (
        len(_remembered) >= REMEMBERED_FORMS
        or len(named) + 2 * sum(map(len, _remembered.values())) > REMEMBERED_TENSORS
    ):
        del _remembered[next(iter(_remembered))]
    found = (_Remembered(p.layer, places[id(p.a)], places[id(p.b)], p.scale) for p in pairs)
    _remembered[form] = _RememberedPairs(found)
    return True


def _pair_up(named: Sequence[tuple[str, torch.Tensor]], scaling: _Scaling) -> tuple[Pairing, list[_Half]]:
    """All of `pair_up` that does not look at values, and the sides that it found."""
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
    if lone := sorted(alphas.keys() - halves.keys()):
        faults.append(f"alpha entries of layers that have no pair: {name_some(lone)}")
    if not halves and not faults:
        faults.append("the payload holds no lora_A / lora_B tensors")
    # what is wrong with the request is wrong in all layers
    return Pairing(tuple(pairs), tuple(dict.fromkeys(faults))), [h for sides in halves.values() for h in sides.values()]


class _Half(NamedTuple):
    name: str
    adapter: str
    tensor: torch.Tensor


class _Scaling(NamedTuple):
    """What a request says of scales, besides alpha entries."""

    alpha: float | None
    rank: int | None
    own_scales: Mapping[str, float]
    alpha_required: bool

    def of(self, layer: str, rank: int, own_alpha: float | None) -> float:
        if layer in self.own_scales:
            return checked_scale(self.own_scales[layer], f"layer_scaling of {in_short(layer)}")
        if own_alpha is not None:
            return checked_scale(own_alpha / rank, f"the alpha entry {own_alpha} of {in_short(layer)} over rank {rank}")
        if self.alpha is None and self.alpha_required:
            raise RequestError(
                f"{in_short(layer)} has no alpha: PEFT keeps it in adapter_config.json; add lora_alpha to the query"
            )
        if self.rank is not None and self.rank != rank:
            raise RequestError(f"{in_short(layer)} has rank {rank}, the request says lora_rank {self.rank}")
        return scale_of(self.alpha, rank)


def _group(
    named: Iterable[tuple[str, torch.Tensor]], faults: list[str]
) -> tuple[dict[str, dict[str, _Half]], dict[str, float]]:
    """Layer -> side -> tensor, and layer -> alpha entry; faults of single names and tensors go to ``faults``."""
    halves: dict[str, dict[str, _Half]] = {}
    alphas: dict[str, float] = {}
    for name, tensor in named:
        try:
            parsed = parse_name(name)
            if parsed.side == _ALPHA:
                if parsed.layer in alphas:
                    raise RequestError(f"{in_short(name)} is the second alpha entry of its layer")
                alphas[parsed.layer] = _alpha(name, tensor)
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
            told = f"lora_{parsed.side} has two dimensions, or a kernel besides"
            faults.append(f"{in_short(name)} has shape {shape_in_short(tensor.shape)}; {told}")
        elif tensor.numel() == 0:
            faults.append(f"{in_short(name)} is empty: shape {shape_in_short(tensor.shape)}")
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
    """Whether these are several pairs, ``[sections, rank, in]`` and ``[sections, out, rank]``, and no convolution's."""
    stacked = a.dim() == b.dim() == 3 and a.shape[:2] == (b.shape[0], b.shape[2])
    return stacked and tuple(b.shape[1:]) != (a.shape[0], 1)


def _non_finite_of(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, ...]:
    return tuple(_non_finite([_Half(name, "", tensor) for name, tensor in named]))


def _non_finite(halves: Sequence[_Half]) -> list[str]:
    """Faults for NaN and infinite values; one device synchronisation however many tensors there are."""
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
    """Whether sums of squares are finite, which takes a launch or a few on a GPU; large values may deny it wrongly."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for half in halves:
        by_dtype.setdefault(half.tensor.dtype, []).append(half.tensor.detach())
    runs = [run_of(tensors) for tensors in by_dtype.values()]
    if all(run is not None and _is_finite(run) for run in runs):
        return True
    norms = [torch.stack(torch._foreach_norm(tensors)).float() for tensors in by_dtype.values()]
    return bool(torch.isfinite(torch.cat(norms)).all())


def _is_finite(tensor: torch.Tensor) -> bool:
    """One pass over all elements. On a GPU large values may deny it wrongly: it looks at the sum of squares."""
    if tensor.is_cuda:
        return bool(torch.isfinite(torch.linalg.vector_norm(tensor, dtype=torch.float32)))
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def run_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The memory from the first tensor's beginning to the last end, where they fill it as those of a bucket do.

    None where they do not. What lies between them is looked at too: zeros in a bucket of ours, anything in another's.
    """
    first, last = min(tensors, key=torch.Tensor.data_ptr), max(tensors, key=torch.Tensor.data_ptr)
    span = max(tensor.data_ptr() + tensor.nbytes for tensor in tensors) - first.data_ptr()
    filled = sum(aligned(tensor.nbytes) for tensor in tensors)
    whole = all(tensor.is_contiguous() for tensor in tensors)
    if not whole or span > filled or first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return None
    return first.as_strided((span // first.element_size(),), (1,))
