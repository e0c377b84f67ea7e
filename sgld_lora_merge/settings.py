"""Every environment variable that this project reads, and the one parser of their values.

A variable is a field of `Settings`. Read the environment with `settings_from` and hand the result on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, cast

from sgld_lora_merge.errors import LoraMergeError

PREFIX = "SGLD_LORA_"
# Names that messages hold.
PRECISION_VARIABLE = "SGLANG_DIFFUSION_LORA_MERGE_FP32"
API_KEY_VARIABLE = "SGLD_LORA_API_KEY"
MAX_BODY_VARIABLE = "SGLD_LORA_MAX_BODY_MB"
MAX_STAGED_VARIABLE = "SGLD_LORA_MAX_STAGED_MB"
MAX_UPLOADS_VARIABLE = "SGLD_LORA_MAX_UPLOADS"
MAX_UPLOADS_MB_VARIABLE = "SGLD_LORA_MAX_UPLOADS_MB"
UPLOAD_IDLE_VARIABLE = "SGLD_LORA_UPLOAD_IDLE_S"
BASE_STORE_VARIABLE = "SGLD_LORA_BASE_STORE"
UNTESTED_VARIABLE = "SGLD_LORA_ALLOW_UNTESTED_SGLANG"
LARGEST = 1e9  # a time limit beyond it overflows in the standard library
MIB = 2**20
_NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

Parser = Callable[[str, str], Any]


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: as it is written in the environment.
        default: what an unset or empty variable stands for, as a person would write it; "" where nothing is written.
        unit: of its value.
        meaning: one sentence for the documentation.
        parse: makes the value of a non-empty text; takes the name and the text, raises `LoraMergeError`.
    """

    name: str
    default: str
    unit: str
    meaning: str
    parse: Parser = field(repr=False)


def _number(name: str, text: str, unit: str) -> float:
    """Read a number above 0 and at most `LARGEST`."""
    number = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not 0 < number <= LARGEST:
        raise LoraMergeError(f"{name}={text!r} is not a number of {unit} above 0 (and at most {LARGEST:g})")
    return number


def _bytes(name: str, text: str) -> int:
    """Read MiB, return bytes."""
    return int(_number(name, text, "MiB") * MIB)


def _reserve(name: str, text: str) -> int:
    """Read whole MiB, 0 included; return bytes."""
    if not re.fullmatch("[0-9]{1,12}", text):
        raise LoraMergeError(f"{name}={text!r} is not a number of MiB")
    return int(text) * MIB


def _count(name: str, text: str) -> int:
    """Read a whole number from 1 on."""
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise LoraMergeError(f"{name}={text!r} is not a whole number above 0")
    return int(text)


def _flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise LoraMergeError(f'{name}={text!r} is neither "1" (yes) nor "0" (no)')
    return text == "1"


def _choice(name: str, text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise LoraMergeError(f"{name}={text!r} is not one of {', '.join(choices)}")
    return text


def _precision(name: str, text: str) -> str:
    if text not in ("0", "1"):
        raise LoraMergeError(
            f'{name}={text!r} is not a precision: set "1" (fp32, the default) or "0" '
            "(fp16: the weight's own dtype, equal to a train-side merge)"
        )
    return "fp32" if text == "1" else "fp16"


def _token(name: str, text: str) -> str:
    """Check a bearer token. No message holds its value, since messages go to logs."""
    if not all("!" <= character <= "~" for character in text):
        raise LoraMergeError(
            f"{name} has {len(text)} characters, and one of them is white space, a control character or not ASCII: "
            "no caller could send it. Set visible ASCII characters, without a newline at the end"
        )
    return text


def _variable(name: str, value: Any, default: str, unit: str, meaning: str, parse: Parser) -> Any:
    """Declare a field of `Settings`; ``value`` is the parsed default."""
    return field(default=value, metadata={"variable": Variable(name, default, unit, meaning, parse)})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the environment asks for. Sizes are bytes, times are seconds."""

    precision: Literal["fp32", "fp16"] = _variable(
        PRECISION_VARIABLE, "fp32", "1", "0 or 1",
        "`1`: computed above the weight's precision, rounded once. `0`: every step in the weight's own dtype, bit for "
        "bit what a trainer's eager `W0 + ((B @ A) * s).to(W0.dtype)` gives", _precision,
    )  # fmt: skip
    api_key: str | None = _variable(
        API_KEY_VARIABLE, None, "", "text",
        "weight routes, sglang's own included, then need `Authorization: Bearer <key>`; clients send it", _token,
    )  # fmt: skip
    max_body_bytes: int = _variable(MAX_BODY_VARIABLE, 4096 * MIB, "4096", "MiB", "limit of one request body", _bytes)
    max_staged_bytes: int = _variable(
        MAX_STAGED_VARIABLE, 16384 * MIB, "16384", "MiB",
        "limit of the staged pairs of an update that arrives in buckets, per rank", _bytes,
    )  # fmt: skip
    staging_timeout_s: float = _variable(
        "SGLD_LORA_STAGING_TIMEOUT_S", 600.0, "600", "seconds",
        "an update that waits longer for its next bucket or its commit is abandoned", partial(_number, unit="seconds"),
    )  # fmt: skip
    max_uploads: int = _variable(
        MAX_UPLOADS_VARIABLE, 16, "16", "uploads", "limit of the uploads that are received at once", _count
    )
    max_uploads_bytes: int = _variable(
        MAX_UPLOADS_MB_VARIABLE, 8192 * MIB, "8192", "MiB", "limit of all open uploads together", _bytes
    )
    upload_idle_s: float = _variable(
        UPLOAD_IDLE_VARIABLE, 60.0, "60", "seconds",
        "an upload must send 64 KiB in each such time, and waits as long for a place", partial(_number, unit="seconds"),
    )  # fmt: skip
    agreement_timeout_s: float = _variable(
        "SGLD_LORA_AGREEMENT_TIMEOUT_S", 300.0, "300", "seconds",
        "how long the ranks of a replica wait for each other", partial(_number, unit="seconds"),
    )  # fmt: skip
    base_store: Literal["auto", "device", "host"] = _variable(
        BASE_STORE_VARIABLE, "auto", "auto", "auto, device or host",
        "where W0 is kept: on the GPU, in pinned host memory, or (`auto`) on the GPU if the reserve stays free besides "
        "what a generation once took. The status says which, and why",
        partial(_choice, choices=("auto", "device", "host")),
    )  # fmt: skip
    base_reserve_bytes: int | None = _variable(
        "SGLD_LORA_BASE_RESERVE_MB", None, "a tenth of the GPU", "MiB",
        "what `auto` leaves free on the GPU", _reserve,
    )  # fmt: skip
    allow_untested_sglang: bool = _variable(
        UNTESTED_VARIABLE, False, "0", "0 or 1",
        "`1`: start with another version of sglang, at your own risk", _flag,
    )  # fmt: skip
    verify: bool = _variable(
        "SGLD_LORA_VERIFY", False, "0", "0 or 1",
        "read by the trainer. `1`: every sync is compared with what the trainer computes", _flag,
    )  # fmt: skip


def variables() -> dict[str, Variable]:
    """Return every variable, by the name of its field of `Settings`."""
    return {each.name: cast(Variable, each.metadata["variable"]) for each in fields(Settings)}


def settings_from(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read every variable. An unset or an empty one has its default; an empty token is a fault.

    Raises:
        LoraMergeError: with all faults: values that mean nothing, and names that begin with ``SGLD_LORA_`` and are
            none of ours. Each is named with its value.
    """
    known = variables()
    values: dict[str, Any] = {}
    faults = _unknown(environ, [variable.name for variable in known.values()])
    for setting, variable in known.items():
        text = environ.get(variable.name)
        if text == "" and setting == "api_key":
            faults.append(
                f"{variable.name} is set but empty, which protects nothing: give it a token, or unset it for an engine "
                "that takes weights from every caller"
            )
        if not text:
            continue
        try:
            values[setting] = variable.parse(variable.name, text)
        except LoraMergeError as error:
            faults.append(str(error))
    if faults:
        raise LoraMergeError("; ".join(faults))
    return Settings(**values)


def _unknown(environ: Mapping[str, str], known: list[str]) -> list[str]:
    """Describe variables with our prefix that nothing reads; a mistyped name would otherwise have no effect."""
    faults = []
    for name in sorted(environ.keys() - set(known)):
        if name.startswith(PREFIX):
            nearest = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            faults.append(f"{name} is no variable of sgld-lora-merge; the nearest is {nearest}")
    return faults
