"""The wire reference has the routes and fields that there are."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.server import environment
from support.wire_reference import PAGE

pytest.importorskip("sglang")


def test_the_page_is_what_the_routes_and_models_make():
    command = [sys.executable, "-W", "ignore", "-m", "support.wire_reference"]
    made = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True).stdout
    assert made == PAGE.read_text(), "run: python -m support.wire_reference --write"
