"""The site builds without a warning, and its failure table has messages that the code has."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def texts(file):
    """Every string of a source file, values as an ellipsis."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[sdg]|%\.\d+f", "…", node.value)


def parts(message):
    return [part for part in re.split(r"…", message) if part.strip(" ;:.(),=")]


def test_every_message_of_the_failure_table_is_one_of_the_code():
    page = (ROOT / "docs" / "operations.md").read_text().split("## When something fails")[1]
    messages = re.findall(r"^\| (?:no line )?`(.*?)` \|", page, re.MULTILINE)
    assert len(messages) > 20
    files = [file for package in ("sgld_lora_merge", "server_patches") for file in (ROOT / package).rglob("*.py")]
    code = "\n".join(text for file in files for text in texts(file))
    fields = {"ignored_fields"}
    unknown = {message: [part for part in parts(message) if part not in code] for message in messages}
    assert {message: missing for message, missing in unknown.items() if missing and message not in fields} == {}


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_site_builds_without_a_warning(tmp_path):
    # --quiet would keep warnings from --strict
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_metric_of_the_dashboard_and_of_the_page_is_one_of_the_engine():
    from server_patches.engine_record import EngineRecord
    from server_patches.metrics import text

    module = {"weight_version": "7", "layers": 1, "rounding_loss": 0.1, "base_store_bytes": 1}
    record = EngineRecord(modules={"transformer": module})
    record.failure("request")
    record.received(1, live=True, timings_ms={"merge": 1.0})
    there = set(re.findall(r"^(sgld_lora_\w+)", text(record).decode(), re.MULTILINE))
    shown = re.compile(r"sgld_lora_[a-z_]*[a-z]")
    dashboard = json.loads((ROOT / "docs" / "grafana" / "dashboard.json").read_text())
    asked = {name for panel in dashboard["panels"] for each in panel["targets"] for name in shown.findall(each["expr"])}
    page = set(re.findall(r"^\| `(sgld_lora_\w+)`", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE))
    assert asked == page
    assert asked <= there
