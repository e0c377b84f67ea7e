"""What the arguments of an engine say."""

from __future__ import annotations

from typing import Any


def refusal(server_args: Any) -> str | None:
    """Why an engine with these arguments takes no updates; None where it does."""
    role = getattr(getattr(server_args, "disagg_role", None), "name", "MONOLITHIC")
    if role == "MONOLITHIC" and not getattr(server_args, "disagg_mode", False):
        return None
    return f"this engine has the disaggregated role {role.lower()}; updates are for engines of one piece"
