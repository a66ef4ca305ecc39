"""docs/guide/recipes.md names every key of a recipe, and no key that is not one."""

from __future__ import annotations

import re

from pages import ROOT, expand, read_page
from recipe_keys import keys, section_of

from miles.recipe.schema import Recipe

PAGE = read_page(ROOT / "docs" / "guide" / "recipes.md")


def documented() -> set[str]:
    """Keys in the first column of the page's tables."""
    cells = [text.split("|")[1] for _, text in PAGE.prose if text.startswith("| `")]
    return {key for cell in cells for span in re.findall(r"`([^`]+)`", cell) for key in expand(span)}


def test_every_key_is_documented_and_every_documented_key_exists() -> None:
    known = set(keys(Recipe))
    assert sorted(known - documented()) == [], "add these keys to docs/guide/recipes.md"
    assert sorted(documented() - known) == [], "these keys are gone"


def test_sections_name_the_files_of_their_classes() -> None:
    for name, field in Recipe.model_fields.items():
        section = section_of(field.annotation)
        if section is not None and not section.__module__.startswith("miles.recipe"):
            path = section.__module__.replace(".", "/") + ".py"
            assert any(f"`{path}`" in text for _, text in PAGE.prose), f"{name}: name {path} in its heading"
