"""The list of licences names every package that the requirement files pin."""

from __future__ import annotations

from support.licences import ROOT, pinned


def test_every_pinned_package_has_its_licence_listed():
    rows = [line.split("|") for line in (ROOT / "docs" / "licences.md").read_text().splitlines() if "|" in line]
    listed = {row[1].strip(): row[3].strip() for row in rows[2:]}
    assert listed.keys() == pinned().keys() | {"sglang"}
    assert not [name for name, licence in listed.items() if licence == "not named"]
