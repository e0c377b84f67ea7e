"""The bucket layout: what is flattened reads back, and metadata that lies is refused."""

import json
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.wire.bucket import Bucket, flatten, unflatten
from sgld_lora_merge.wire.layout import ALIGNMENT, BucketEntry, layout_text, read_layout

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def same_bytes(left, right):
    def as_bytes(tensor):  # a fresh copy: one element of stride 2 counts as contiguous, but cannot be viewed as bytes
        return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)

    return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(as_bytes(left), as_bytes(right))


def entry(name="x", shape=(4,), dtype=torch.float32, start=0, stop=16):
    return BucketEntry(name, shape, dtype, start, stop, stop - start)


# entries_of, flatten, layout_text, unflatten


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(8.0)[::2], torch.arange(6.0).view(2, 3).t(), torch.tensor(7.0), torch.ones(3, 1).expand(3, 4)],
    ids=["strided", "transposed", "scalar", "expanded"],
)
def test_b2_any_strides_become_contiguous_bytes(tensor):
    """Case B2."""
    flat, entries = flatten([("x", tensor)])

    (name, read) = unflatten(flat, entries)[0]
    assert name == "x"
    assert read.is_contiguous()
    assert same_bytes(read, tensor)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_b2_an_empty_tensor_is_refused_by_name(shape):
    """Case B2."""
    with pytest.raises(ValueError, match="'void' is empty") as error:
        flatten([("x", torch.ones(2)), ("void", torch.ones(shape))])

    assert str(shape) in str(error.value)


def test_a_bucket_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one tensor"):
        flatten([])


def test_b3_a_16_bit_tensor_before_a_32_bit_one_reads_back_equal_and_aligned():
    """Case B3."""
    sent = [("a", torch.randn(3).bfloat16()), ("b", torch.randn(2))]

    flat, entries = flatten(sent)

    assert [item.start_idx for item in entries] == [0, 16]
    for (name, tensor), (read_name, read) in zip(sent, unflatten(flat, entries), strict=True):
        assert read_name == name
        assert same_bytes(read, tensor)


def test_every_tensor_starts_at_a_multiple_of_16_bytes_and_ends_with_its_own():
    sent = [(str(n), torch.ones(n, dtype=torch.uint8)) for n in (1, 15, 16, 17, 33)]

    flat, entries = flatten(sent)

    assert [item.start_idx % ALIGNMENT for item in entries] == [0] * 5
    assert [item.end_idx - item.start_idx for item in entries] == [1, 15, 16, 17, 33]
    assert [item.numel for item in entries] == [1, 15, 16, 17, 33]  # bytes, as in sglang
    assert flat.dtype is torch.uint8
    assert flat.numel() == 16 + 16 + 16 + 32 + 48


def test_the_bucket_is_a_copy():
    tensor = torch.ones(4)
    flat, entries = flatten([("x", tensor)])

    tensor.zero_()

    assert torch.equal(unflatten(flat, entries)[0][1], torch.ones(4))


def test_a_parameter_is_flattened_without_its_gradient():
    flat, _ = flatten([("x", torch.nn.Parameter(torch.ones(4)))])

    assert not flat.requires_grad


def test_aligned_tensors_are_views_of_the_bucket():
    flat, entries = flatten([("x", torch.ones(4)), ("y", torch.ones(4))])

    y = unflatten(flat, entries)[1][1]

    assert y.data_ptr() == flat.data_ptr() + 16


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_a_sender_that_does_not_align_its_tensors_is_read(offset):
    tensor = torch.randn(5, 3)
    flat = torch.zeros(offset + tensor.nbytes + 2, dtype=torch.uint8)
    flat[offset : offset + tensor.nbytes] = tensor.view(-1).view(torch.uint8)

    ((_, read),) = unflatten(flat, [entry("x", (5, 3), torch.float32, offset, offset + tensor.nbytes)])

    assert same_bytes(read, tensor)


def test_a_bucket_that_is_itself_unaligned_is_read():
    tensor = torch.randn(4)
    memory = torch.zeros(17, dtype=torch.uint8)
    memory[1:] = tensor.view(torch.uint8)

    ((_, read),) = unflatten(memory[1:], [entry()])

    assert same_bytes(read, tensor)


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16"])
def test_the_dtype_may_be_a_string(dtype):
    tensor = torch.randn(4).bfloat16()
    flat, _ = flatten([("x", tensor)])

    ((_, read),) = unflatten(flat, [entry("x", [4], dtype, 0, 8)])

    assert same_bytes(read, tensor)


def test_a_scalar_entry_has_an_empty_shape():
    flat, _ = flatten([("x", torch.tensor(2.5))])

    ((_, read),) = unflatten(flat, [entry("x", (), torch.float32, 0, 4)])

    assert read.shape == ()
    assert read.item() == 2.5


def test_a_bucket_without_entries_holds_nothing():
    assert unflatten(torch.zeros(16, dtype=torch.uint8), []) == []


@st.composite
def tensors(draw):
    """A tensor of any dtype, up to three dimensions, and any layout: transposed, strided, offset or expanded."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 5), max_size=3))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    first = draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    whole = [size * step + first for size, step in zip(shape, steps, strict=True)]
    values = torch.randint(0, 100, whole, generator=generator)
    tensor = (values % 2 == 0) if dtype is torch.bool else values.to(dtype)
    for dim, (size, step) in enumerate(zip(shape, steps, strict=True)):
        tensor = tensor.narrow(dim, first, size * step)[(slice(None),) * dim + (slice(None, None, step),)]
    if shape and draw(st.booleans()):
        tensor = tensor.permute(*draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[:1].expand(3, *tensor.shape[1:])
    return tensor


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(tensors(), min_size=1, max_size=6))
def test_every_list_of_tensors_reads_back_byte_for_byte(sent):
    named = [(f"t{i}", tensor) for i, tensor in enumerate(sent)]

    flat, entries = flatten(named)
    read = unflatten(flat, entries)

    assert [name for name, _ in read] == [name for name, _ in named]
    assert all(same_bytes(got, tensor) for (_, got), tensor in zip(read, sent, strict=True))


# metadata that lies


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (entry(shape=(5,)), "takes 20 bytes"),
        (entry(shape=(2**40, 2**40)), "bytes"),
        (entry(shape=(-4,)), "integers from 0"),
        (entry(shape=(-2, -2)), "integers from 0"),
        (entry(shape=(4.0,)), "integers from 0"),
        (entry(shape=("4",)), "integers from 0"),
        (entry(shape=4), "not iterable"),
        (entry(shape=None), "not iterable"),
        (entry(start=-16, stop=0), "integers from 0"),
        (entry(start=16, stop=0), "has -16"),
        (entry(start=32, stop=48), "outside the bucket of 32 bytes"),
        (entry(start=24, stop=40), "outside the bucket of 32 bytes"),
        (entry(start=0, stop=15), "has 15"),
        (BucketEntry("x", (4,), torch.float32, "0", 16, 16), "integers from 0"),
        (BucketEntry("x", (4,), torch.float32, 0, None, 16), "integers from 0"),
        (entry(dtype="bfloat17"), "'bfloat17' is not a dtype"),
        (entry(dtype="nn"), "is not a dtype"),
        (entry(dtype="load"), "is not a dtype"),
        (entry(dtype=None), "None is not a dtype"),
        (entry(dtype=4), "4 is not a dtype"),
        (entry(dtype=torch.float64), "takes 32 bytes"),
    ],
)
def test_metadata_that_does_not_describe_bytes_of_the_bucket_is_refused_by_name(wrong, words):
    with pytest.raises(RequestError, match="metadata of 'x'") as error:
        unflatten(torch.zeros(32, dtype=torch.uint8), [wrong])

    assert words in str(error.value)


def deeply_nested():
    name = []
    for _ in range(100_000):
        name = [name]
    return name


@pytest.mark.parametrize(
    "hostile",
    [
        entry(shape=(2**62, 2**62, 0), stop=0),
        entry(shape=(2**70, 0), stop=0),
        entry(shape=(10**5000,)),
        BucketEntry(10**5000, (4,), torch.float32, 0, 16, 16),
        BucketEntry(deeply_nested(), (4,), torch.float32, 0, 16, 16),
        BucketEntry("x", (4,), 10**5000, 0, 16, 16),
    ],
    ids=["elements", "extent", "digits", "digits in the name", "depth of the name", "digits in the dtype"],
)
def test_metadata_that_torch_or_python_cannot_even_print_is_a_request_error(hostile):
    with pytest.raises(RequestError, match="metadata of"):
        unflatten(torch.zeros(32, dtype=torch.uint8), [hostile])


@pytest.mark.parametrize(
    "flat",
    [torch.zeros(64, dtype=torch.uint8)[::2], torch.zeros(1, dtype=torch.uint8).expand(32)],
    ids=["strided", "expanded"],
)
def test_a_bucket_whose_bytes_do_not_follow_each_other_is_a_request_error(flat):
    """A payload chooses the strides of its bucket."""
    with pytest.raises(RequestError):
        unflatten(flat, [entry()])


@pytest.mark.parametrize("name", [3, None, b"x", ["x"]])
def test_a_name_that_is_not_a_string_is_refused(name):
    with pytest.raises(RequestError, match="not a string"):
        unflatten(torch.zeros(32, dtype=torch.uint8), [entry(name)])


def test_all_wrong_entries_are_named():
    wrong = [entry("a", shape=(5,)), entry("b"), entry("c", dtype="what"), entry("d", start=64, stop=80)]

    with pytest.raises(RequestError) as error:
        unflatten(torch.zeros(32, dtype=torch.uint8), wrong)

    assert [fault.split(":")[0] for fault in error.value.faults] == [f"metadata of {name!r}" for name in "acd"]


@pytest.mark.parametrize("second", [(0, 16), (8, 16), (16, 32), (0, 48)])
def test_entries_that_overlap_are_refused_by_both_names_whether_as_metadata_or_as_a_layout(second):
    start, stop = second
    entries = [
        BucketEntry("x", (24,), torch.uint8, 0, 24, 24),
        BucketEntry("after", (8,), torch.uint8, 56, 64, 8),
        BucketEntry("y", (stop - start,), torch.uint8, start, stop, stop - start),
    ]
    flat = torch.zeros(64, dtype=torch.uint8)
    for described in (lambda: entries, lambda: read_layout(layout_text(entries))):
        with pytest.raises(RequestError, match=r"overlaps '[xy]'") as error:
            unflatten(flat, described())
        assert "'x'" in str(error.value)
        assert "'y'" in str(error.value)
        assert "'after'" not in str(error.value)


@pytest.mark.parametrize(
    "flat",
    [
        torch.zeros(32),
        torch.zeros(4, 8, dtype=torch.uint8),
        torch.zeros((), dtype=torch.uint8),
        b"bytes",
        None,
        [0] * 32,
    ],
    ids=["float32", "two dimensions", "no dimension", "bytes", "None", "list"],
)
def test_a_bucket_is_a_uint8_tensor_of_one_dimension(flat):
    with pytest.raises(RequestError, match="flattened_tensor is not a uint8 tensor of one dimension"):
        unflatten(flat, [entry()])


@pytest.mark.parametrize("entries", [None, "metadata", {"x": entry()}, [entry(), "x"], [("x", (4,), 0, 16)]])
def test_metadata_is_a_list_of_entries(entries):
    with pytest.raises(RequestError, match="metadata is not a list of FlattenedTensorMetadata"):
        unflatten(torch.zeros(32, dtype=torch.uint8), entries)


def test_a_layout_is_read_back_from_its_text():
    flat, entries = flatten([("x", torch.arange(3.0)), ("y", torch.ones(2, 5, dtype=torch.bfloat16))])

    text = layout_text(entries)

    assert json.loads(text) == [["x", "float32", [3], 0, 12], ["y", "bfloat16", [2, 5], 16, 36]]
    for (name, tensor), (known, other) in zip(
        unflatten(flat, read_layout(text)), unflatten(flat, entries), strict=True
    ):
        assert name == known
        assert torch.equal(tensor, other)


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "{",
        "1",
        "[1]",
        '["abcde"]',
        '[["x", "float32", [4], 0]]',
        '[["x", "float32", [4], "0", 16]]',
        "[" * 100_000,
        '[["x", "float32", [4], 0, ' + "9" * 5000 + "]]",
    ],
    ids=lambda layout: layout[:24],
)
def test_a_layout_that_is_none_is_refused(layout):
    with pytest.raises(RequestError, match="layout is not a JSON list"):
        read_layout(layout)


def test_what_is_wrong_with_the_entries_of_a_layout_is_named():
    with pytest.raises(RequestError) as error:
        read_layout('[["x", "float32", [4], 0, 15], ["y", "float12", [1], 16, 20], [3, "float32", [1], 0, 4]]')
    assert [fault.split(":")[0] for fault in error.value.faults] == [
        "metadata of 'x'",
        "metadata of 'y'",
        "metadata of entry 2",
    ]


def test_a_layout_that_is_not_text_is_refused():
    with pytest.raises(RequestError, match="layout is a list, not JSON text"):
        read_layout([])


def test_what_a_layout_says_is_checked_as_metadata_is():
    with pytest.raises(RequestError, match="outside the bucket of 8 bytes"):
        unflatten(torch.zeros(8, dtype=torch.uint8), read_layout('[["x", "float32", [4], 0, 16]]'))


def test_a_very_long_layout_is_read_and_not_kept():
    rows = [[f"{index:0200}", "float32", [1], 16 * index, 16 * index + 4] for index in range(20_000)]

    entries = read_layout(json.dumps(rows))

    assert [entry.start for entry in entries] == [row[3] for row in rows]
    assert read_layout(json.dumps(rows)) is not entries


def row(name="x", dtype="uint8", shape=(8,), start=0, stop=8):
    return [name, dtype, shape, start, stop]


def read(flat, *rows):
    return unflatten(flat, read_layout(json.dumps(rows)))


@pytest.mark.parametrize(
    ("rows", "regular"),
    [
        ([row("x", "bfloat16", [3], 0, 6), row("y", "bfloat16", [2, 2], 16, 24)], True),
        ([row("x", "bfloat16", [3], 0, 6), row("y", "float32", [4], 16, 32)], False),
        ([row("x", "bfloat16", [3], 0, 6), row("y", "bfloat16", [4], 8, 16)], False),
        ([row("x", "bfloat16", [3], 0, 6), row("y", "bfloat16", [4], 32, 40)], False),
        ([], False),
    ],
    ids=["regular", "two dtypes", "unaligned", "a gap", "nothing"],
)
def test_the_tensors_of_a_regular_bucket_are_made_when_they_are_asked_for(rows, regular):
    flat = torch.arange(64, dtype=torch.uint8)
    found = read(flat, *rows)
    assert isinstance(found, Bucket) is regular
    assert [name for name, _ in found] == [each[0] for each in rows]
    for (_, tensor), (_, dtype, shape, start, stop) in zip(found, rows, strict=True):
        assert torch.equal(tensor, flat[start:stop].clone().view(getattr(torch, dtype)).view(shape))
    assert read(flat[1:], *rows) is not found
    if regular:
        stop = max(each[4] for each in rows)
        assert found.flat.numel() == stop
        assert not isinstance(read(flat[1:], *rows), Bucket)
        with pytest.raises(RequestError, match="outside the bucket"):
            read(flat[: stop - 1], *rows)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [row(name=f"x{i}", start=1, stop=9) for i in range(3)],
            r"'x2': \[1, 9\) overlaps 'x0', \[1, 9\)",
        ),
        ([row(shape=[2**62] * 200_000)], "has 200000 dimensions, torch has at most 64"),
        ([row(dtype="_dynamo")], "'_dynamo' is not a dtype"),
    ],
    ids=["overlapping entries", "many dimensions", "a module of torch"],
)
def test_a_layout_that_would_take_memory_or_time_without_end_is_refused(rows, words):
    loaded = set(sys.modules)
    with pytest.raises(RequestError, match=words):
        unflatten(torch.zeros(16, dtype=torch.uint8), read_layout(json.dumps(rows)))
    assert not [name for name in set(sys.modules) - loaded if name.startswith("torch")]


def test_a_name_that_no_answer_could_hold_is_refused():
    with pytest.raises(RequestError, match="is not a JSON list"):
        read_layout('[["\\ud800","uint8",[8],0,8]]')
