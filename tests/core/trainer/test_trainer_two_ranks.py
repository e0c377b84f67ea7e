"""Two ranks of FSDP2 over gloo, as processes of their own: the base's comparison, and failures on one of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft")
WORKER = Path(__file__).with_name("two_ranks.py")


@pytest.mark.parametrize("scenario", ["base", "stages"])
def test_on_both_ranks(tmp_path, scenario):
    command = [sys.executable, "-W", "ignore", str(WORKER)]
    root = Path(__file__).parents[3]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "meet"), scenario], cwd=root) for rank in range(2)]
    assert [rank.wait(200) for rank in ranks] == [0, 0]
