"""docs/add-a-family.md is true: its tables have the members that the code has. That its example opens a
checkpoint is checked where all examples of the pages are run (tests/test_docs_commands.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from data.image_rules import Images
from families import FAMILIES

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "add-a-family.md").read_text(encoding="utf-8")
OF_FAMILY, OF_IMAGES = (
    {name for cell in re.findall(r"^\| (`.*?`) \|", table, re.M) for name in re.findall(r"`(\w+)", cell)}
    for table in re.findall(r"^\| \| \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.M)[:2]
)
SOME = {"places", "image_rule", "their_inputs", "saved_name"}  # which only families have that need them


def test_the_page_names_what_an_image_rule_has():
    members = {name for name in {*vars(Images), *Images.__annotations__} if not name.startswith("_")}
    assert members == OF_IMAGES


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_it(name):
    family = FAMILIES[name]
    assert set(vars(family)) >= OF_FAMILY - SOME and name in (family.NAME, *family.MODEL_TYPES)
