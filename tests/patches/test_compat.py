"""Which sglang is served, and the sentences for one that is not."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from server_patches import compat
from server_patches.patch import patches

ROOT = Path(__file__).parents[2]


def found(monkeypatch, version):
    def answer(name):
        if version is None:
            raise compat.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(compat, "version", answer)


@pytest.mark.parametrize("version", compat.SUPPORTED)
def test_a_supported_version_is_served(monkeypatch, version):
    found(monkeypatch, version)
    assert compat.check_version({}) is None


@pytest.mark.parametrize("version", ["0.5.16", "0.5.20", "0.5.24", "0.6.0"])
def test_another_version_is_refused_with_all_ways_out(monkeypatch, version):
    found(monkeypatch, version)
    problem = compat.check_version({})
    for part in (version, compat.SUPPORTED[-1], compat.UNTESTED_VARIABLE, "SGLANG_PLUGINS"):
        assert part in problem


def test_another_version_may_be_tried(monkeypatch):
    found(monkeypatch, "0.5.24")
    assert compat.check_version({compat.UNTESTED_VARIABLE: "1"}) is None


def test_no_sglang_is_said_with_the_command_that_installs_it(monkeypatch):
    found(monkeypatch, None)
    assert "pip install 'sgld-lora-merge[engine]'" in compat.check_version({})


def test_every_patch_says_why_and_until_when():
    for patch in patches():
        assert patch.target.startswith("sglang.multimodal_gen.runtime.")
        assert patch.kind in ("AROUND", "BEFORE", "AFTER")
        assert patch.why
        assert patch.until


def test_hooks_that_did_not_take_are_named():
    targets = [patch.target for patch in patches()]
    assert compat.unapplied(patches(), set(targets)) is None
    assert targets[0] in compat.unapplied(patches(), set(targets[1:]))


def test_the_matrix_and_the_engine_extra_have_the_supported_versions():
    (engines,) = re.findall(r"^ENGINES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tuple(engines.split()) == compat.SUPPORTED
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    allowed = Requirement(extras["engine"][0]).specifier
    assert tuple(f"0.5.{patch}" for patch in range(15, 30) if f"0.5.{patch}" in allowed) == compat.SUPPORTED
