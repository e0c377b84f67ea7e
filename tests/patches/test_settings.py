"""What the environment and the arguments of an engine say."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

import pytest

from server_patches.settings import positive_number, refusal
from sgld_lora_merge.errors import LoraMergeError

Role = Enum("Role", ["MONOLITHIC", "ENCODER", "DENOISER"])


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "ten"])
def test_a_number_that_means_nothing_is_refused_with_its_variable(value):
    with pytest.raises(LoraMergeError, match=f"LIMIT='{value}' is not a number of MiB above 0"):
        positive_number("LIMIT", 4.0, "MiB", {"LIMIT": value})


def test_a_number_that_is_not_set_is_the_default():
    assert positive_number("LIMIT", 4.0, "MiB", {}) == positive_number("LIMIT", 4.0, "MiB", {"LIMIT": ""}) == 4.0


def test_disaggregated_roles_take_no_updates():
    """They run another loop, in which a request of ours has no handler."""
    assert refusal(SimpleNamespace()) is None
    assert refusal(SimpleNamespace(disagg_role=Role.MONOLITHIC, disagg_mode=False)) is None
    assert "role denoiser" in (refusal(SimpleNamespace(disagg_role=Role.DENOISER)) or "")
    assert refusal(SimpleNamespace(disagg_role=Role.MONOLITHIC, disagg_mode=True)) is not None
