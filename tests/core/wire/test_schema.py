"""The HTTP contract: fields, types, ranges and combinations of an update, before its payload is opened."""

import json
import math

import pytest

from sgld_lora_merge.errors import RequestError
from sgld_lora_merge.wire.schema import (
    ErrorAnswer,
    FieldTypeError,
    ModuleAnswer,
    ResetRequest,
    UpdateAnswer,
    UpdateRequest,
    UploadQuery,
    check_update,
    check_upload,
    parse_alpha,
    parse_fields,
    parse_json,
)

FIELDS = {
    "serialized_named_tensors": ["cGF5bG9hZA=="],
    "load_format": "flattened_bucket",
    "target_modules": ["transformer"],
    "weight_update_mode": "lora_merge",
    "lora_alpha": 16,
    "lora_rank": 8,
    "weight_version": "7",
}


def update(**fields):
    return parse_fields(UpdateRequest, FIELDS | fields)[0]


def faults_of(**fields):
    with pytest.raises(RequestError) as error:
        check_update(update(**fields))
    return error.value.faults


# JSON


def test_a_json_object_is_read():
    assert parse_json(b'{"lora_rank": 8}') == {"lora_rank": 8}


def test_nan_is_read_so_that_its_field_can_be_named():
    assert math.isnan(parse_json(b'{"lora_alpha": NaN}')["lora_alpha"])


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"{'lora_rank': 8}", b"[" * 10000, b"nope"])
def test_a_body_that_is_not_json_is_a_400(body):
    with pytest.raises(RequestError, match="the body is not JSON") as error:
        parse_json(body)

    assert error.value.status == 400


@pytest.mark.parametrize(("body", "kind"), [(b"[]", "list"), (b'"x"', "str"), (b"3", "int"), (b"null", "NoneType")])
def test_a_body_that_is_not_an_object_is_a_400(body, kind):
    with pytest.raises(RequestError, match=f"a JSON {kind}, not an object"):
        parse_json(body)


# types


def test_the_request_of_todays_trainers_is_accepted():
    request, ignored = parse_fields(UpdateRequest, FIELDS)

    check_update(request)

    assert ignored == []
    assert (request.lora_alpha, request.lora_rank, request.weight_version) == (16.0, 8, "7")


@pytest.mark.parametrize("alpha", [16, 16.5, 0.5, -2.0, 0])
def test_alpha_is_an_integer_or_a_float(alpha):
    request = update(lora_alpha=alpha)

    check_update(request)

    assert request.lora_alpha == alpha


def test_alpha_may_be_the_word_rank_in_an_update_and_in_an_upload():
    request = update(lora_alpha="rank")
    query, _ = parse_fields(UploadQuery, {"lora_alpha": "rank"})

    check_update(request)
    check_upload(query)

    assert (request.lora_alpha, query.lora_alpha) == ("rank", "rank")
    assert parse_fields(UploadQuery, {"lora_alpha": "16"})[0].lora_alpha == 16.0
    assert (parse_alpha("rank"), parse_alpha("0.5")) == ("rank", 0.5)


@pytest.mark.parametrize("word", ["ranks", "Rank", "six", "", "r" * 1000])
@pytest.mark.parametrize(("model", "fields"), [(UpdateRequest, FIELDS), (UploadQuery, {})], ids=["update", "upload"])
def test_any_other_word_for_alpha_is_a_400_that_says_what_may_stand_there(model, fields, word):
    with pytest.raises(RequestError, match='lora_alpha: a number is needed, or "rank"') as error:
        parse_fields(model, fields | {"lora_alpha": word})

    assert repr(word[:80]) in str(error.value)
    assert len(error.value.faults) == 1
    with pytest.raises(ValueError, match='is neither a number nor "rank"'):
        parse_alpha(word)


def test_absent_fields_have_their_defaults():
    request, _ = parse_fields(UpdateRequest, {"serialized_named_tensors": ["eA=="]})

    check_update(request)

    assert request.modules == ["transformer"]
    assert request.weight_update_mode is None
    assert (request.lora_alpha, request.lora_rank, request.load_format) == (None, None, None)


def test_null_is_the_same_as_absent():
    absent, _ = parse_fields(UpdateRequest, {"serialized_named_tensors": ["eA=="]})

    null, ignored = parse_fields(
        UpdateRequest,
        {"serialized_named_tensors": ["eA=="]} | dict.fromkeys(FIELDS.keys() - {"serialized_named_tensors"}),
    )

    assert null == absent
    assert ignored == []


def test_unknown_fields_are_ignored_and_listed():
    """A mistyped ``lora_aplha`` must be seen."""
    request, ignored = parse_fields(UpdateRequest, FIELDS | {"lora_aplha": 16, "flush_cache": None})

    check_update(request)

    assert ignored == ["flush_cache", "lora_aplha"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_alpha", "16"),
        ("lora_alpha", True),
        ("lora_alpha", [16]),
        ("lora_alpha", 10**400),
        ("lora_rank", "16"),
        ("lora_rank", 16.5),
        ("lora_rank", True),
        ("serialized_named_tensors", "cGF5bG9hZA=="),
        ("serialized_named_tensors", [3]),
        ("target_modules", "transformer"),
        ("payload_gpu_uuids", {"0": "GPU"}),
        ("load_format", 1),
        ("weight_update_mode", True),
        ("weight_version", 7),
        ("update_id", 7),
        ("bucket_index", "0"),
        ("num_buckets", 1.5),
        ("commit", "false"),
        ("allow_partial", 1),
        ("layer_scaling", [1.0]),
        ("layer_scaling", {"transformer": 2.0}),
        ("layer_scaling", {"transformer": {"to_q": "2"}}),
    ],
)
def test_a_field_of_the_wrong_type_is_a_422_that_names_it(field, value):
    with pytest.raises(FieldTypeError, match=field) as error:
        update(**{field: value})

    assert error.value.status == 422


def test_a_wrong_type_is_shown_with_its_value():
    with pytest.raises(FieldTypeError, match=r"lora_rank: .*, got '16'"):
        update(lora_rank="16")


def test_a_long_wrong_value_is_shown_in_part():
    with pytest.raises(FieldTypeError) as error:
        update(lora_rank="9" * 1000)

    assert len(str(error.value)) < 200


def test_all_fields_of_a_wrong_type_are_named():
    with pytest.raises(FieldTypeError, match=r"lora_alpha.*lora_rank"):
        update(lora_alpha="16", lora_rank="8")


def test_a_request_without_payloads_is_a_400():
    with pytest.raises(RequestError, match="serialized_named_tensors is required"):
        parse_fields(UpdateRequest, {"lora_rank": 8})


# values


@pytest.mark.parametrize("alpha", [math.nan, math.inf, -math.inf])
def test_an_alpha_that_is_not_finite_is_a_400(alpha):
    (fault,) = faults_of(lora_alpha=alpha)

    assert f"lora_alpha is {alpha}" in fault


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_below_one_is_a_400(rank):
    (fault,) = faults_of(lora_rank=rank)

    assert f"lora_rank is {rank}" in fault


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weight_update_mode": "lora_mergee"}, "weight_update_mode 'lora_mergee' is unknown"),
        ({"load_format": "flat"}, "load_format 'flat' is unknown"),
        ({"serialized_named_tensors": []}, "serialized_named_tensors is empty"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": ["a", "b", "a"]}, "target_modules names a module twice"),
        ({"payload_gpu_uuids": ["GPU-1", "GPU-2"]}, "one entry per payload: 2 for 1 payloads"),
        ({"payload_gpu_uuids": []}, "one entry per payload: 0 for 1 payloads"),
        (
            {"layer_scaling": {"vae": {"to_q": 1.0}}},
            "layer_scaling has modules that target_modules does not name: ['vae']",
        ),
        ({"update_id": ""}, "update_id is empty"),
        ({"update_id": "u", "bucket_index": 0}, "bucket_index and num_buckets go together"),
        ({"update_id": "u", "num_buckets": 1}, "bucket_index and num_buckets go together"),
        ({"bucket_index": 0, "num_buckets": 1}, "need an update_id"),
        ({"update_id": "u", "bucket_index": 0, "num_buckets": 0}, "num_buckets is 0"),
        ({"update_id": "u", "bucket_index": 1, "num_buckets": 1}, "bucket_index 1 is outside 0 to 0"),
        ({"update_id": "u", "bucket_index": -1, "num_buckets": 1}, "bucket_index -1 is outside 0 to 0"),
    ],
)
def test_a_value_out_of_range_or_place_is_a_400_that_names_it(fields, words):
    (fault,) = faults_of(**fields)

    assert words in fault


@pytest.mark.parametrize(
    "fields",
    [
        {"update_id": "step-7"},
        {"update_id": "step-7", "bucket_index": 0, "num_buckets": 1},
        {"layer_scaling": {"transformer": {"to_q": 4.0}}},
        {"target_modules": ["transformer", "transformer_2"], "layer_scaling": {"transformer_2": {}}},
        {"payload_gpu_uuids": ["GPU-1"]},
        {"load_format": None},
        {"commit": True, "allow_partial": True, "update_id": "step-7"},
    ],
)
def test_what_the_contract_allows_is_accepted(fields):
    check_update(update(**fields))


@pytest.mark.parametrize(
    ("field", "value"), [("update_id", "u"), ("commit", True), ("layer_scaling", {}), ("allow_partial", False)]
)
def test_our_fields_do_not_belong_to_a_full_weight_update(field, value):
    (fault,) = faults_of(weight_update_mode=None, **{field: value})

    assert fault.startswith(field)


def test_all_that_is_wrong_comes_in_one_error():
    faults = faults_of(
        serialized_named_tensors=[],
        weight_update_mode="merge",
        load_format="flat",
        target_modules=["a", "a"],
        lora_alpha=math.nan,
        lora_rank=0,
        payload_gpu_uuids=["GPU-1"],
        layer_scaling={"b": {}},
        update_id="",
        bucket_index=0,
    )

    assert len(faults) == 10


def test_a_reset_may_name_modules_or_not():
    assert parse_fields(ResetRequest, {})[0].target_modules is None
    assert parse_fields(ResetRequest, {"target_modules": ["transformer"]})[0].target_modules == ["transformer"]
    with pytest.raises(FieldTypeError, match="target_modules"):
        parse_fields(ResetRequest, {"target_modules": "transformer"})


# answers


def test_the_answer_has_the_fields_of_the_contract():
    answer = UpdateAnswer(
        message="live",
        weight_version="7",
        layers=720,
        merge_mode="merge",
        merge_precision="fp32",
        base_store="host",
        rounding_loss=0.0105,
        pairs_rounded=False,
        modules={"transformer": ModuleAnswer(layers=720, rounding_loss=0.0105)},
        payload_opened=[True],
        timings_ms={"total": 1.0},
    )

    assert json.loads(answer.model_dump_json()) == {
        "success": True,
        "message": "live",
        "weight_version": "7",
        "state": "live",
        "layers": 720,
        "skipped": [],
        "ignored_fields": [],
        "merge_mode": "merge",
        "merge_precision": "fp32",
        "base_store": "host",
        "rounding_loss": 0.0105,
        "pairs_rounded": False,
        "modules": {
            "transformer": {
                "layers": 720,
                "rounding_loss": 0.0105,
                "merge_mode": "merge",
                "pairs_rounded": False,
                "kept": 0,
                "versions": {},
                "base": "loaded",
            }
        },
        "payload_opened": [True],
        "timings_ms": {"total": 1.0},
    }


def test_an_error_answer_says_which_payloads_were_opened():
    answer = ErrorAnswer(message="wrong", payload_opened=[True, False])

    assert json.loads(answer.model_dump_json()) == {
        "success": False,
        "message": "wrong",
        "payload_opened": [True, False],
    }
