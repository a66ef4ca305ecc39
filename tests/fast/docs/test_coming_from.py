"""The page for users of other trainers: TRL's names are TRL's, and one name of theirs has one line."""

from __future__ import annotations

import dataclasses
import re

import pytest
from pages import ROOT, read_page
from recipe_keys import keys

from miles.recipe.schema import Recipe

PAGE = read_page(ROOT / "docs" / "guide" / "coming-from.md")


def table(title: str) -> dict[str, str]:
    """Left cell -> right cell of the table under that title."""
    rows: dict[str, str] = {}
    section = ""
    for _, text in PAGE.prose:
        if text.startswith("## "):
            section = text.removeprefix("## ")
        elif section == title and text.startswith("| `"):
            left, right = (cell.strip() for cell in text.strip("| ").split(" | ", 1))
            assert left not in rows, left
            rows[left] = right
    return rows


def names(cell: str) -> list[str]:
    return [span.partition(":")[0] for span in re.findall(r"`([^`]+)`", cell)]


def test_trls_names_are_fields_of_its_configuration() -> None:
    trl = pytest.importorskip("trl", reason="extra dev")
    known = {field.name for field in dataclasses.fields(trl.GRPOConfig)} | {"reward_funcs"}
    told = {name for cell in table("TRL") for name in names(cell)}
    assert len(told) > 30
    assert sorted(told - known) == []


@pytest.mark.parametrize("title", ["TRL", "verl", "slime"])
def test_every_name_of_theirs_has_one_line(title: str) -> None:
    rows = table(title)
    told = [name for cell in rows for name in re.findall(r"`([^`]+)`", cell)]
    assert len(rows) > 15
    assert sorted({name for name in told if told.count(name) > 1}) == []
    assert all(right for right in rows.values())


@pytest.mark.parametrize("title", ["TRL", "verl", "slime"])
def test_every_name_of_ours_is_a_key_or_a_section_of_a_recipe(title: str) -> None:
    known = set(keys(Recipe))
    sections = {key[: at.start()] for key in known for at in re.finditer(r"\.", key)}
    ours = {name for cell in table(title).values() for name in names(cell) if "." in name}
    assert len(ours) > 10
    assert sorted(ours - known - sections) == []
