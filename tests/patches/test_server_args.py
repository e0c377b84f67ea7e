"""What the arguments of an engine say."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

from server_patches.settings import refusal

Role = Enum("Role", ["MONOLITHIC", "ENCODER", "DENOISER"])


def test_disaggregated_roles_take_no_updates():
    """They run another loop, in which a request of ours has no handler."""
    assert refusal(SimpleNamespace()) is None
    assert refusal(SimpleNamespace(disagg_role=Role.MONOLITHIC, disagg_mode=False)) is None
    assert "role denoiser" in (refusal(SimpleNamespace(disagg_role=Role.DENOISER)) or "")
    assert refusal(SimpleNamespace(disagg_role=Role.MONOLITHIC, disagg_mode=True)) is not None
