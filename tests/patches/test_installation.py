"""What the arguments of an engine say."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

from server_patches.installation import refusal_of

Role = Enum("Role", ["MONOLITHIC", "ENCODER", "DENOISER"])


def test_disaggregated_roles_take_no_updates():
    """They run another loop, in which a request of ours has no handler."""
    assert refusal_of(SimpleNamespace()) is None
    assert refusal_of(SimpleNamespace(disagg_role=Role.MONOLITHIC, disagg_mode=False)) is None
    assert "role denoiser" in (refusal_of(SimpleNamespace(disagg_role=Role.DENOISER)) or "")
    assert refusal_of(SimpleNamespace(disagg_role=Role.MONOLITHIC, disagg_mode=True)) is not None
