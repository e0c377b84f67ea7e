"""The wings: arrows one way, no circle of imports, and a page that shows them as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support import wings


@pytest.fixture(scope="module")
def modules():
    return wings.modules()


def test_no_wing_imports_one_to_its_right_and_no_modules_import_each_other_in_a_circle(modules):
    assert wings.faults(modules) == []


def test_the_page_has_the_picture_of_the_present_tree(modules):
    page = wings.PAGE.read_text()
    assert wings.page(page, modules) == page, "run: python -m support.wings --write"


def test_a_circle_and_an_arrow_back_are_faults(modules):
    errors, engine = modules["sgld_lora_merge.errors"], modules["sgld_lora_merge.merge.engine"]
    back = {**modules, errors.name: replace(errors, imports=frozenset({engine.name}))}
    arrow, circle = wings.faults(back)
    assert arrow == "sgld_lora_merge.errors (errors, settings) imports sgld_lora_merge.merge.engine (merge)"
    assert circle.startswith("a circle of imports: ")
