"""The sum that fingerprints are made of, in plain torch: its definition, and what runs where the kernel does not.

    mix(x)  = the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014)
    sum     = mix(w[0] + 1 * GAMMA) + mix(w[1] + 2 * GAMMA) + ...      all of it modulo 2^64

``mix`` is a bijection, so that a change of any single word changes the sum; the place of a word is part of its term, so
that an exchange of two does too.
"""

from __future__ import annotations

import torch

# as signed 64-bit integers, since torch and Triton compute with these; additions and products are the same modulo 2^64
GAMMA = 0x9E3779B97F4A7C15 - 2**64
FIRST = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64
CHUNK = 2**17  # words, 1 MiB: stays in the cache of a CPU


def word_sum(words: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Sum the mixed words.

    Args:
        words: int64, one dimension, contiguous.
        start: place of the first one.

    Returns:
        A tensor without dimensions, int64, on the same device.
    """
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    places = torch.arange(1, min(CHUNK, words.numel()) + 1, device=words.device) * GAMMA
    for first in range(0, words.numel(), CHUNK):
        chunk = words[first : first + CHUNK]
        total += _mixed(chunk + places[: chunk.numel()] + _signed((start + first) * GAMMA)).sum()
    return total


def word_sum_of_rows(words: torch.Tensor, start: int, width: int) -> torch.Tensor:
    """Sum the mixed words of some columns of a wider matrix.

    Args:
        words: int64, ``[rows, columns]``.
        start: place of the first one.
        width: places from one row to the next.

    Returns:
        As `word_sum`.
    """
    rows = torch.arange(words.shape[0], device=words.device) * _signed(width * GAMMA)
    columns = torch.arange(words.shape[1], device=words.device) * GAMMA
    return _mixed(words + rows[:, None] + columns + _signed((start + 1) * GAMMA)).sum()


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Replace each element by its ``mix``."""
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        x ^= (x >> shift) & (2 ** (64 - shift) - 1)  # int64 is shifted with its sign
        x *= factor
    return x


def _signed(value: int) -> int:
    """Return the value modulo 2^64, as a signed 64-bit integer."""
    return (value + 2**63) % 2**64 - 2**63
