"""Fingerprints: the same bytes give the same one, everywhere; anything else gives another."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgld_lora_merge import pack
from sgld_lora_merge.adapter.pairing import pair_up
from sgld_lora_merge.merge.fingerprint import SentUpdates, differences, fingerprint_of, payload_fingerprint
from sgld_lora_merge.merge.kernels import words
from sgld_lora_merge.merge.plan import ModuleUpdate
from sgld_lora_merge.wire.bucket import flatten, unflatten
from sgld_lora_merge.wire.layout import layout_text, read_layout

MASK = 2**64 - 1


def defined(data: bytes) -> str:
    """The definition, in Python's integers."""

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    padded = data + bytes(-len(data) % 8)
    numbers = struct.unpack(f"<{len(padded) // 8}Q", padded)
    total = sum(mix(number + (place + 1) * 0x9E3779B97F4A7C15 & MASK) for place, number in enumerate(numbers))
    return f"sm64:{len(data)}:{total & MASK:016x}"


def test_the_finaliser_is_splitmix64s():
    """Its first three numbers from seed 0, as published."""
    numbers = [words._mixed(torch.tensor([words._signed(i * words.GAMMA)])).item() & MASK for i in (1, 2, 3)]
    assert numbers == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(st.binary(max_size=100))
def test_a_fingerprint_is_what_is_defined(data):
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    assert fingerprint_of(tensor) == defined(data)


def test_more_words_than_a_chunk_and_a_tail():
    tensor = torch.randint(0, 256, (words.CHUNK * 16 + 21,), dtype=torch.uint8)
    assert fingerprint_of(tensor) == defined(bytes(tensor.tolist()))


def test_where_the_bytes_are_and_how_they_are_strided_does_not_matter():
    tensor = torch.randn(6, 10)
    shifted = torch.zeros(61)[1:].view(6, 10).copy_(tensor)
    assert fingerprint_of(shifted) == fingerprint_of(tensor) == fingerprint_of(tensor.t().contiguous().t())
    bytes_of = tensor.view(torch.uint8).flatten()
    assert fingerprint_of(torch.cat([bytes_of.new_zeros(3), bytes_of])[3:]) == fingerprint_of(tensor)


@settings(max_examples=50)
@given(st.integers(0, 8 * 4096 - 1))
def test_one_bit_makes_another_fingerprint(bit):
    data = torch.arange(4096).to(torch.uint8)
    before = fingerprint_of(data)
    data[bit // 8] ^= 1 << bit % 8
    assert fingerprint_of(data) != before


def test_so_does_another_order_and_a_zero_more():
    data = torch.arange(64, dtype=torch.int64)
    assert fingerprint_of(data.flip(0)) != fingerprint_of(data)
    assert fingerprint_of(torch.zeros(8)) != fingerprint_of(torch.zeros(9))


def test_a_payload_of_two_modules_has_both_in_the_order_of_their_names():
    payload, (second, first) = pack({"transformer_2": [("x", torch.ones(3))], "transformer": [("y", torch.zeros(5))]})
    assert payload
    told = payload_fingerprint({"transformer_2": second, "transformer": first})
    assert told == f"{fingerprint_of(first)},{fingerprint_of(second)}"


def tensors(seed=0, rank=2, layers=("x", "y"), dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (f"{layer}.lora_{side}", shape) for layer in layers for side, shape in (("A", (rank, 8)), ("B", (8, rank)))
    ]
    return [(name, torch.randn(*shape, generator=generator).to(dtype)) for name, shape in shapes]


def sent(named, *, bucket=True, module="m", bits=True, **scaling):
    if bucket:
        flat, entries = flatten(named)
        named = unflatten(flat, read_layout(layout_text(entries)))
    return SentUpdates([ModuleUpdate(module, pair_up(named, **scaling).pairs, whole=True)], bits)


def changed(named, name, change):
    return [(each, change(tensor.clone()) if each == name else tensor) for each, tensor in named]


def one_bit(tensor):
    tensor.view(torch.int32)[0, 0] ^= 1
    return tensor


@pytest.mark.parametrize("bucket", [True, False])
def test_the_same_update_has_the_same_digest_and_no_differences(bucket):
    one, two = (sent(tensors(), bucket=bucket, alpha=3) for _ in range(2))
    assert one.digest == two.digest
    assert differences([one.prints, two.prints]) == []


@pytest.mark.parametrize("bucket", [True, False])
@pytest.mark.parametrize(
    ("other", "scaling", "told"),
    [
        (tensors(layers=("x",)), {}, "m: rank 0 was sent a pair for 'y', rank 1 was not"),
        (tensors(layers=("x", "y", "z")), {}, "m: rank 1 was sent a pair for 'z', rank 0 was not"),
        (changed(tensors(), "y.lora_B", one_bit), {}, "m: rank 1 was sent another lora_B for 'y' than rank 0"),
        (changed(tensors(), "x.lora_A", one_bit), {}, "m: rank 1 was sent another lora_A for 'x' than rank 0"),
        (tensors(), {"alpha": 4}, "m: rank 1 was sent another scale for 'x' than rank 0: 2.0 instead of 1.5"),
        (tensors(dtype=torch.bfloat16), {}, "m: rank 1 was sent another lora_A and lora_B for 'x' than rank 0"),
    ],
    ids=["a layer less", "a layer more", "one bit of B", "one bit of A", "scale", "dtype"],
)
def test_another_update_is_told_by_layer(other, scaling, told, bucket):
    mine, theirs = sent(tensors(), bucket=bucket, alpha=3), sent(other, bucket=bucket, **({"alpha": 3} | scaling))
    assert mine.digest != theirs.digest
    assert mine.exact_digest != theirs.exact_digest
    assert told in differences([mine.prints, theirs.prints])


def test_the_same_pairs_in_another_packing_are_the_same_update():
    one, two = sent(tensors(), alpha=3), sent(tensors()[::-1], bucket=False, alpha=3)
    assert one.digest != two.digest
    assert one.exact_digest == two.exact_digest
    assert differences([one.prints, two.prints]) == []


def test_without_bits_only_the_values_may_differ():
    other = changed(tensors(), "y.lora_B", one_bit)
    one, two = (sent(each, bits=False, alpha=3) for each in (tensors(), other))
    assert one.digest == two.digest
    assert one.digest != sent(other, bits=False, alpha=4).digest
