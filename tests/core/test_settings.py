"""Every variable of the environment, and the values and names that stop a start."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from sgld_lora_merge.errors import LoraMergeError
from sgld_lora_merge.settings import Settings, settings_from, variables
from support import configuration

ROOT = Path(__file__).parents[2]
NUMBERS = ["SGLD_LORA_MAX_BODY_MB", "SGLD_LORA_MAX_STAGED_MB", "SGLD_LORA_STAGING_TIMEOUT_S",
           "SGLD_LORA_AGREEMENT_TIMEOUT_S", "SGLD_LORA_MAX_UPLOADS_MB", "SGLD_LORA_UPLOAD_IDLE_S"]  # fmt: skip
FLAGS = ["SGLD_LORA_VERIFY", "SGLD_LORA_ALLOW_UNTESTED_SGLANG"]


def fault(**environ):
    with pytest.raises(LoraMergeError) as raised:
        settings_from(environ)
    return str(raised.value)


def test_every_field_is_a_variable_with_name_unit_and_meaning():
    known = variables()
    assert list(known) == [each.name for each in fields(Settings)]
    for variable in known.values():
        assert re.fullmatch("SGLD_LORA_[A-Z_]+|SGLANG_DIFFUSION_LORA_MERGE_FP32", variable.name)
        assert variable.unit
        assert variable.meaning


def test_unset_and_empty_are_the_default():
    empty = {variable.name: "" for variable in variables().values() if variable.name != "SGLD_LORA_API_KEY"}
    assert settings_from({}) == settings_from(empty) == Settings()


def test_the_default_that_is_written_down_is_the_one_that_holds():
    for setting, variable in variables().items():
        if setting not in ("api_key", "base_reserve_bytes"):
            assert settings_from({variable.name: variable.default}) == Settings(), variable.name


def test_values_are_read_in_their_units():
    environ = {"SGLD_LORA_API_KEY": "k", "SGLD_LORA_MAX_BODY_MB": "0.5", "SGLD_LORA_UPLOAD_IDLE_S": "1e2",
               "SGLD_LORA_MAX_UPLOADS": "3", "SGLD_LORA_VERIFY": "1", "SGLD_LORA_BASE_RESERVE_MB": "0",
               "SGLANG_DIFFUSION_LORA_MERGE_FP32": "0", "PATH": "/bin"}  # fmt: skip
    assert settings_from(environ) == Settings(
        api_key="k", max_body_bytes=2**19, upload_idle_s=100.0, max_uploads=3, verify=True, base_reserve_bytes=0,
        precision="fp16",
    )  # fmt: skip


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "ten", "1e999", "1e10", " 5", "5\n", "1_000", "٣", "0x10"])
@pytest.mark.parametrize("variable", NUMBERS)
def test_a_number_that_means_nothing_is_refused_with_its_variable(variable, value):
    assert re.search(
        rf"^{variable}={re.escape(repr(value))} is not a number of \w+ above 0", fault(**{variable: value})
    )


@pytest.mark.parametrize("value", ["true", "yes", "on", "01", " 1", "2"])
@pytest.mark.parametrize("variable", FLAGS)
def test_a_flag_is_one_or_zero(variable, value):
    assert fault(**{variable: value}) == f'{variable}={value!r} is neither "1" (yes) nor "0" (no)'


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "1e2", " 1"])
def test_a_count_is_a_whole_number(value):
    assert fault(SGLD_LORA_MAX_UPLOADS=value) == f"SGLD_LORA_MAX_UPLOADS={value!r} is not a whole number above 0"


def test_an_empty_token_protects_nothing_and_is_refused():
    assert fault(SGLD_LORA_API_KEY="").startswith("SGLD_LORA_API_KEY is set but empty, which protects nothing")


@pytest.mark.parametrize("value", ["secret\n", " secret", "secret\t", "two words", "\x1b[2J", "schlüssel", "\r\n", " "])
def test_a_token_that_no_caller_can_send_is_refused_and_not_shown(value):
    said = fault(SGLD_LORA_API_KEY=value)
    assert said.startswith(f"SGLD_LORA_API_KEY has {len(value)} characters, and one of them is white space")
    assert value.strip() == "" or value.strip() not in said


def test_a_mistyped_name_is_refused_with_the_nearest():
    assert fault(SGLD_LORA_APIKEY="k") == (
        "SGLD_LORA_APIKEY is no variable of sgld-lora-merge; the nearest is SGLD_LORA_API_KEY"
    )
    assert "the nearest is SGLD_LORA_BASE_STORE" in fault(SGLD_LORA_BASESTORE="")
    assert settings_from({"SGLD_LOAD_SECONDS": "1", "sgld_lora_api_key": "k"}) == Settings()


def test_all_faults_are_told_at_once():
    said = fault(SGLD_LORA_VERIFY="true", SGLD_LORA_MAX_BODY_MB="much", SGLD_LORA_BASE_STORE="disk",
                 SGLD_LORA_BODY="1", SGLANG_DIFFUSION_LORA_MERGE_FP32="yes")  # fmt: skip
    assert "SGLANG_DIFFUSION_LORA_MERGE_FP32='yes' is not a precision" in said
    for part in ("SGLD_LORA_VERIFY='true'", "SGLD_LORA_MAX_BODY_MB='much'", "SGLD_LORA_BASE_STORE='disk'",
                 "SGLD_LORA_BODY is no variable"):  # fmt: skip
        assert part in said


def test_the_table_of_the_documentation_is_this_one():
    page = configuration.PAGE.read_text()
    assert configuration.page(page) == page, "run: python -m support.configuration --write"
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert rows == [(each.name, each.unit, each.default or "none", each.meaning) for each in variables().values()]


def test_nothing_else_reads_variables_of_ours():
    """A name outside of the parser would be one that it refuses."""
    named = re.compile(r"""["'](SGLD_LORA_\w+|SGLANG_DIFFUSION_LORA_MERGE_FP32)""")
    files = [file for package in ("sgld_lora_merge", "server_patches") for file in (ROOT / package).rglob("*.py")]
    readers = {file.name for file in files if named.search(file.read_text())}
    assert readers == {"settings.py"}
