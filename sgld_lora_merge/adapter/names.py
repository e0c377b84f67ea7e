"""The grammar of names: what a LoRA tensor's name says, and what layer names in kohya format stand for.

Kohya's names have an underscore in place of every dot, so that one name may be spelled with dots in several ways.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sgld_lora_merge.errors import RequestError, in_short, name_some
from sgld_lora_merge.wire.limits import check_name

LONGEST_REMEMBERED = 256  # characters of a name whose parts are kept for the next update
WRAPPER_PREFIXES = ("base_model.model.", "diffusion_model.")  # PEFT's, and the one of the original checkpoints
# <layer>.lora_A, or as diffusers and the original checkpoints write it: lora_down, lora.down; then adapter and .weight.
# No pattern here looks further than a few characters from where it starts, so that it takes linear time.
_SIDE = re.compile(r"\.lora[_.](A|B|down|up)(?=\..|\Z)")
_SIDES = {"A": "A", "B": "B", "down": "A", "up": "B"}
ALPHA = "alpha"
# Names that other trainers write and that must not be dropped in silence: pattern, what it is.
_REFUSED_NAMES = (
    (re.compile(r"\.lora_bias$|\.bias$"), "a bias; it is not merged"),
    (re.compile(r"\.lora_embedding_[AB](\.|$)"), "of an nn.Embedding; linear layers and convolutions are merged"),
    (re.compile(r"^lora_te\d?_"), "of a text encoder in kohya format; send that module's layers under dotted names"),
)  # fmt: skip
# What follows the layer in the names of other kinds of update (names of PEFT, LyCORIS and kohya), and the kind.
_OTHER_KINDS = (
    (re.compile(r"\.lokr_"), "LoKr"),
    (re.compile(r"\.hada_"), "LoHa"),
    (re.compile(r"\.b?oft_(blocks|diag|[rRsS])(\.|$)"), "OFT"),
    (re.compile(r"(^|\.)vera_(lambda_[bd]|[AB])(\.|$)"), "VeRA"),
    (re.compile(r"\.lora_mid(\.|$)"), "LoCon with a middle matrix"),
    (re.compile(r"\.lora_magnitude_vector(\.|$)|\.dora_scale$"), "DoRA"),
    (re.compile(r"\.(lora_E|ranknum)(\.|$)"), "AdaLoRA"),
    (re.compile(r"\.ia3_l(\.|$)|\.on_input$"), "IA3"),
    (re.compile(r"\.(a1|a2|b1|b2|bm1|bm2)\.weight$"), "GLoRA"),
    (re.compile(r"\.(diff|diff_b|set_weight|w_norm|b_norm)$"), "a full difference of a weight or a bias"),
)
KOHYA_PREFIXES = ("lora_unet_", "lora_transformer_")
MOST_WORDS = 24  # between underscores; real names have up to 15, and the spellings may double with every word
KOHYA_ADVICE = (
    "a layer name in kohya format must stand for one of the engine's or of its checkpoint's names; convert other files "
    "first: load_lora_weights of the diffusers pipeline, then save_lora_adapter of the module"
)


@dataclass(frozen=True)
class LoraName:
    """A tensor name taken apart: ``<layer>.lora_<side>[.<adapter>][.weight]``, or ``<layer>.alpha``.

    Attributes:
        side: "A", "B", or "alpha" for a layer's own alpha.
    """

    layer: str
    side: str
    adapter: str


class OtherKindError(RequestError):
    """A tensor is of another kind of update, which no pair stands for.

    Attributes:
        layer: the layer prefix.
        kind: what the kind is called.
    """

    def __init__(self, name: str, layer: str, kind: str) -> None:
        super().__init__(other_kind([name], kind))
        self.layer = layer
        self.kind = kind


def other_kind(names: Sequence[str], kind: str) -> str:
    """Return the sentence that refuses all tensors of another kind."""
    shown = in_short(names[0]) if len(names) == 1 else name_some(names)
    verb = "is" if len(names) == 1 else "are"
    return (
        f"{shown} {verb} {kind}, of which no pair can be made: merge it in the trainer or by the tool that made it, "
        "and send full weights"
    )


def parse_name(name: str) -> LoraName:
    """Take a LoRA tensor name apart.

    Raises:
        OtherKindError: a tensor of another kind of update.
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
        return LoraName(layer_name(name.removesuffix(".alpha")), ALPHA, "")
    match = None if "\n" in name else _SIDE.search(name, 1)
    if match is None:
        for pattern, kind in _OTHER_KINDS:
            if (found := pattern.search(name)) is not None:
                raise OtherKindError(name, layer_name(name[: found.start()]), kind)
        raise RequestError(f"{in_short(name)} is not named <layer>.lora_A or <layer>.lora_B")
    adapter = name[match.end() :].removeprefix(".")
    adapter = "" if adapter == "weight" else adapter.removesuffix(".weight")
    return LoraName(layer_name(name[: match.start()]), _SIDES[match[1]], adapter)


def layer_name(name: str) -> str:
    """Return a layer prefix without what trainers put in front of it."""
    for prefix in WRAPPER_PREFIXES:
        name = name.removeprefix(prefix)
    return name


def segments_of(names: Iterable[str]) -> set[str]:
    """Return what stands between the dots of these names."""
    return {segment for name in names if name for segment in name.split(".")}


def is_flattened(layer: str) -> bool:
    """Return whether a layer prefix is in kohya format."""
    return layer.startswith(KOHYA_PREFIXES)


def spellings(layer: str, segments: Collection[str]) -> Iterator[str]:
    """Yield every dotted name that a flattened one may stand for; none for a name without kohya's prefix.

    Args:
        layer: the layer prefix as the sender names it, kohya's prefix included.
        segments: what may stand between two dots; numbers may anyway.
    """
    for prefix in KOHYA_PREFIXES:
        words = layer.removeprefix(prefix).split("_")
        if layer.startswith(prefix) and len(words) <= MOST_WORDS:
            yield from (".".join(parts) for parts in _partings(words, segments))


def _partings(words: Sequence[str], segments: Collection[str]) -> Iterator[list[str]]:
    if not words:
        yield []
    for count in range(1, len(words) + 1):
        segment = "_".join(words[:count])
        if segment in segments or segment.isdecimal():
            for rest in _partings(words[count:], segments):
                yield [segment, *rest]
