"""Kohya's layer names: every dot has become an underscore, so one name may be spelled with dots in several ways."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

PREFIXES = ("lora_unet_", "lora_transformer_")
MOST_WORDS = 24  # between underscores; real names have up to 15, and the spellings may double with every word
ADVICE = (
    "a layer name in kohya format must stand for one of the engine's or of its checkpoint's names; convert other files "
    "first: load_lora_weights of the diffusers pipeline, then save_lora_adapter of the module"
)


def segments_of(names: Iterable[str]) -> set[str]:
    """What stands between the dots of these names."""
    return {segment for name in names if name for segment in name.split(".")}


def is_flattened(layer: str) -> bool:
    """Whether a layer prefix is in kohya format."""
    return layer.startswith(PREFIXES)


def spellings(layer: str, segments: Collection[str]) -> Iterator[str]:
    """Every dotted name that a flattened one may stand for; none for a name without kohya's prefix.

    Args:
        layer: the layer prefix as the sender names it, kohya's prefix included.
        segments: what may stand between two dots; numbers may anyway.
    """
    for prefix in PREFIXES:
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
