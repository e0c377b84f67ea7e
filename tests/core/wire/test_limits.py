"""Longest and most of what a request holds, and what messages show of it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save

from sgld_lora_merge.adapter import known_pairs
from sgld_lora_merge.adapter.file import LAYER_SCALING, read_adapter
from sgld_lora_merge.adapter.names import parse_name
from sgld_lora_merge.adapter.pairing import pair_up
from sgld_lora_merge.errors import MOST_FAULTS, Faults, RequestError, cut, in_short, name_some
from sgld_lora_merge.wire import layout as layouts
from sgld_lora_merge.wire.bucket import flatten, unflatten
from sgld_lora_merge.wire.described import PayloadReader
from sgld_lora_merge.wire.layout import BucketEntry, layout_text, read_layout
from sgld_lora_merge.wire.limits import (
    LONGEST_LABEL,
    LONGEST_NAME,
    MOST_MODULES,
    MOST_PAYLOADS,
    MemoryBudget,
    check_json,
)
from sgld_lora_merge.wire.payload import FLATTENED_BUCKET, named_tensors
from sgld_lora_merge.wire.schema import (
    FieldTypeError,
    ResetRequest,
    ResolveRequest,
    TransactionRequest,
    UpdateRequest,
    UploadQuery,
    VerifyRequest,
    parse_fields,
)
from sgld_lora_merge.wire.unpickler import load
from support import hostile

LONG = "a" * (LONGEST_NAME + 1 - len(".lora_A")) + ".lora_A"
FITS = LONG[1:]
UPDATE = {"serialized_named_tensors": ["AA=="]}


def file_of(tmp_path, named, metadata=None):
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(save(named, metadata))
    return str(path)


# names


def metadata_of(name):
    return unflatten(torch.zeros(4, dtype=torch.uint8), [BucketEntry(name, (4,), "uint8", 0, 4, 4)])


READERS = {
    "list": lambda name, tmp_path: named_tensors([(name, torch.ones(1))], None, ["transformer"]),
    "metadata": lambda name, tmp_path: metadata_of(name),
    "layout": lambda name, tmp_path: read_layout(json.dumps([[name, "uint8", [4], 0, 4]])),
    "pairs": lambda name, tmp_path: parse_name(name),
    "file": lambda name, tmp_path: read_adapter(file_of(tmp_path, {name: torch.ones(1)})),
    "layer_scaling of a file": lambda name, tmp_path: read_adapter(
        file_of(tmp_path, {"x": torch.ones(1)}, {LAYER_SCALING: json.dumps({name: 1.0})})
    ),
    "layer_scaling": lambda name, tmp_path: parse_fields(
        UpdateRequest, UPDATE | {"layer_scaling": {"transformer": {name: 1.0}}}
    ),
    "verify": lambda name, tmp_path: parse_fields(VerifyRequest, {"modules": {"transformer": {name: {"sha256": "0"}}}}),
    "resolve": lambda name, tmp_path: parse_fields(ResolveRequest, {"modules": {"transformer": [name]}}),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_name_of_512_characters_is_read_and_a_longer_one_is_refused(tmp_path, reader):
    READERS[reader](FITS, tmp_path)

    with pytest.raises(RequestError, match=r"of 513 characters, at most 512") as error:
        READERS[reader](LONG, tmp_path)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("name", "layer", "side", "adapter"),
    [
        ("a.lora_A.lora_A.x", "a", "A", "lora_A.x"),
        ("a.lora_A..lora_B", "a", "A", ".lora_B"),
        (".lora_A.lora_B", ".lora_A", "B", ""),
        ("a.lora_Ax.lora.up.weight", "a.lora_Ax", "B", ""),
        ("a.lora_down", "a", "A", ""),
    ],
)
def test_the_first_side_in_a_name_is_its_side(name, layer, side, adapter):
    parsed = parse_name(name)
    assert (parsed.layer, parsed.side, parsed.adapter) == (layer, side, adapter)


@pytest.mark.parametrize("name", [".lora_A", "a.lora_A.", "a.lora_A\n", "a\n.lora_A", "a.lora_A.x\n", "a.lora_A.\n"])
def test_what_is_no_name_of_a_side_is_refused(name):
    with pytest.raises(RequestError, match="is not named <layer>"):
        parse_name(name)


def test_hard_names_take_linear_time():
    """Case: 20 s for one name of 144 kB; here as many of the longest that are read as take longer than the test."""
    units = (
        ".lora_A.x",
        ".lora_embedding_A.x",
        ".lora_A",
        ".bias",
        ".lora.up.",
        "lora_magnitude_vecto",
        ".vera_lambda_",
        ".oft_",
    )
    for unit in units:
        name = ("a" + unit * LONGEST_NAME)[: LONGEST_NAME - 2] + "\n\n"
        for number in range(3000):
            with pytest.raises(RequestError):
                parse_name(name[:-8] + f"{number:06}\n\n")


# fields

LABELS = [
    (UpdateRequest, "update_id"), (UpdateRequest, "weight_version"), (UpdateRequest, "adapter"),
    (UpdateRequest, "weight_update_mode"), (UpdateRequest, "load_format"), (UploadQuery, "update_id"),
    (UploadQuery, "weight_version"), (UploadQuery, "adapter"), (UploadQuery, "target_module"),
    (ResetRequest, "adapter"), (TransactionRequest, "update_id"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "field"), LABELS)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("v" * (LONGEST_LABEL + 1), "has 129 characters, at most 128 are allowed"),
        ("v" * 200_000, "has 200000 characters"),
        ("1\nWARNING forged", "has a character that cannot be printed"),
        ("\x1b[2J", "has a character that cannot be printed"),
        ("\ud800", "has a character that cannot be printed"),
    ],
    ids=["longer", "much longer", "newline", "escape", "surrogate"],
)
def test_a_label_is_short_and_printable(model, field, value, words):
    base = UPDATE if model is UpdateRequest else {}
    with pytest.raises(RequestError, match=f"{field}: {words}") as error:
        parse_fields(model, base | {field: value})
    assert len(str(error.value)) < 300
    assert str(error.value).isprintable()


@pytest.mark.parametrize("value", ["v" * LONGEST_LABEL, "Schritt 7, zweite Fassung", "версия-7", ""])
def test_a_printable_label_of_128_characters_is_taken(value):
    assert parse_fields(UpdateRequest, UPDATE | {"weight_version": value})[0].weight_version == value


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"serialized_named_tensors": ["AA=="] * (MOST_PAYLOADS + 1)}, "has 1025 payloads, at most 1024"),
        ({"payload_gpu_uuids": ["u"] * (MOST_PAYLOADS + 1)}, "has 1025 entries, at most 1024"),
        ({"payload_gpu_uuids": ["u" * 129]}, "has 129 characters, at most 128"),
        ({"target_modules": ["m"] * (MOST_MODULES + 1)}, "has 65 entries, at most 64"),
        ({"target_modules": ["m" * 129]}, "has 129 characters, at most 128"),
        ({"layer_scaling": {str(i): {} for i in range(MOST_MODULES + 1)}}, "has 65 modules, at most 64"),
        ({"layer_scaling": {"m": {str(i): 1.0 for i in range(2**14 + 1)}}}, "has 16385 layers, at most 16384"),
    ],
)
def test_a_list_that_is_too_long_is_a_400_before_its_items_are_looked_at(fields, words):
    with pytest.raises(RequestError, match=words):
        parse_fields(UpdateRequest, UPDATE | fields)


def test_the_first_wrong_item_of_a_list_is_named_and_no_other():
    with pytest.raises(FieldTypeError, match=r"^serialized_named_tensors\.0: .*, got 1$"):
        parse_fields(UpdateRequest, {"serialized_named_tensors": [1] * MOST_PAYLOADS})


def test_ten_unknown_fields_are_reported_each_cut():
    unknown = {f"{i:03}" + "x" * 2_000_000: 1 for i in range(12)}

    _, ignored = parse_fields(UpdateRequest, UPDATE | unknown)

    assert [name[:3] for name in ignored] == [f"{i:03}" for i in range(10)]
    assert max(map(len, ignored)) < 120


@pytest.mark.parametrize("text", [b"[]," * 10**6, b"{}" * 10**6, b'"a":1,' * 10**6, b"1," * 10**7, b"[" * 10**6])
def test_json_of_many_parts_is_refused_before_it_is_read(text):
    with pytest.raises(RequestError, match=r"the body of \d+ bytes has too many parts"):
        check_json(text, "the body")


# messages


def test_a_text_is_shown_by_its_beginning_and_its_length():
    assert in_short("a" * 80) == repr("a" * 80)
    assert in_short("a" * 81) == f"{'a' * 80!r}... (length 81)"
    assert in_short(b"\0" * 100) == f"{bytes(80)!r}... (length 100)"
    assert cut("a" * 81) == "a" * 80 + "... (81 characters)"
    assert name_some(["b" * 100_000]) == "b" * 80 + "... (100000 characters)"


def test_numbers_and_containers_are_shown_in_short():
    assert in_short(10**5000) == "an integer of 16610 bits"
    assert in_short([[]]) == "a list"
    assert in_short(-1.5) == "-1.5"


def test_faults_beyond_what_an_honest_request_has_are_not_kept():
    faults = Faults(["first"])
    for _ in range(2 * MOST_FAULTS):
        faults.append("x" * 5000)
    faults.extend(["y"] * 5)

    assert len(faults) == MOST_FAULTS
    assert faults[0] == "first"
    assert max(map(len, faults)) < 2100
    assert str(RequestError(*faults)).endswith(f"and {MOST_FAULTS - 10} more")
    assert len(RequestError(*["z"] * 2 * MOST_FAULTS).faults) == MOST_FAULTS


def test_all_faults_of_a_large_request_are_counted():
    with pytest.raises(RequestError, match="and 1430 more"):
        named_tensors([(f"l{i}.lora_A", None) for i in range(1440)], None, ["transformer"])


def test_memory_is_refused_when_it_is_spent():
    memory = MemoryBudget(0, 100)
    memory.spend(100)
    with pytest.raises(RequestError, match="takes more than 100 bytes"):
        memory.spend(1)


# what stays


def test_layouts_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(layouts, "_layouts", {})

    def text(count, width, tag):
        return json.dumps([[f"{tag}{i:0{width}}", "uint8", [4], 4 * i, 4 * i + 4] for i in range(count)])

    few = [text(1, 8, f"few{tag}") for tag in range(20)]
    assert [read_layout(each) is read_layout(each) for each in few] == [True] * 20
    assert list(layouts._layouts) == few[-layouts.KEPT_LAYOUTS :]
    for tag in range(4):
        read_layout(text(6000, 4, tag))
    assert sum(len(each.slots) for each in layouts._layouts.values()) <= layouts.MOST_REMEMBERED
    assert len(layouts._layouts) == 2
    for tag in range(9):
        read_layout(text(1200, 400, tag))
    assert sum(map(len, layouts._layouts)) <= layouts.LONGEST_REMEMBERED
    whole = text(layouts.MOST_REMEMBERED + 1, 4, "whole")
    assert read_layout(whole) is not read_layout(whole)


def test_forms_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(known_pairs, "_known", {})
    for update in range(12):
        named = [(f"{update}.{i}.lora_{side}", torch.ones(1, 1)) for i in range(1000) for side in "AB"]
        assert not pair_up(named).faults
    assert sum(2 * len(form) for form in known_pairs._known.values()) <= known_pairs.KEPT_TENSORS
    assert 4 <= len(known_pairs._known) <= known_pairs.KEPT_SIGNATURES


# files


def header_file(tmp_path, header, content=b""):
    text = json.dumps(header).encode()
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return str(path)


def test_a_shape_that_torch_cannot_make_is_a_request_error(tmp_path):
    header = {"x.lora_A": {"dtype": "F32", "shape": [0, 2**64 - 1], "data_offsets": [0, 0]}}
    with pytest.raises(RequestError, match=r"'x\.lora_A' is no tensor that torch can make") as error:
        read_adapter(header_file(tmp_path, header))
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("dtype", ["F4", "F8_E8M0", "F6_E2M3", "C64"])
def test_an_alpha_of_another_kind_of_number_is_a_fault(tmp_path, dtype):
    for shape, nbytes in (([2], 1), ([1], 1), ([4], 3), ([1], 8)):
        header = {"x.alpha": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}
        try:
            named, _ = read_adapter(header_file(tmp_path, header, bytes(nbytes)))
        except RequestError:
            continue
        assert "an alpha is one number" in str(pair_up(named).faults)


def test_requests_far_larger_than_any_adapter_are_read():
    """An adapter of a large model has some thousand tensors."""
    names = [f"transformer_blocks.{i}.attn.to_out.0.lora_{side}.weight" for i in range(3000) for side in "AB"]
    named = [(name, torch.ones(1, 1)) for name in names]
    flat, entries = flatten(named)
    tensor = hostile.Inline(flat)
    contents = {
        "metadata": {"m": {"flattened_tensor": tensor, "metadata": entries}},
        "layout": {"m": {"flattened_tensor": tensor, "layout": layout_text(entries)}},
        "list": {"m": [(name, hostile.Inline(each)) for name, each in named]},
    }
    for form, content in contents.items():
        read = load(hostile.inline(content, 2), PayloadReader(int))
        found = named_tensors(read, None if form == "list" else FLATTENED_BUCKET, ["m"])["m"]
        assert [name for name, _ in found] == [name for name, _ in named]
