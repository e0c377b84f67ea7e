"""What the environment and the arguments of an engine say."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from sgld_lora_merge.errors import LoraMergeError


def positive_number(variable: str, default: float, unit: str, environ: Mapping[str, str] = os.environ) -> float:
    """The value of a variable; ``default`` where it is unset or empty.

    Raises:
        LoraMergeError: it is not a finite number above 0; the message names the variable and the value.
    """
    value = environ.get(variable) or str(default)
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise LoraMergeError(f"{variable}={value!r} is not a number of {unit} above 0")
    return number


def refusal(server_args: Any) -> str | None:
    """Why an engine with these arguments takes no updates; None where it does."""
    role = getattr(getattr(server_args, "disagg_role", None), "name", "MONOLITHIC")
    if role == "MONOLITHIC" and not getattr(server_args, "disagg_mode", False):
        return None
    return f"this engine has the disaggregated role {role.lower()}; updates are for engines of one piece"
