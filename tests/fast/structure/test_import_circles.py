"""Nobody waits for himself: no module imports, over any number of steps, a module that imports it."""

from __future__ import annotations

from pathlib import Path

import pytest
from import_graph import FOLDERS, circles, import_graph

# Packages in which an import inside a function must not close a circle either.
STRICT = ("miles_ci",)


@pytest.mark.parametrize("package", FOLDERS)
def test_no_circle_at_module_level(package: str) -> None:
    assert circles(import_graph(package, lazy=False)) == []


@pytest.mark.parametrize("package", STRICT)
def test_no_circle_is_hidden_inside_a_function(package: str) -> None:
    assert circles(import_graph(package, lazy=True)) == []


def tree(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_circle_over_three_modules_is_found_and_what_hangs_on_it_is_not_part_of_it(tmp_path: Path) -> None:
    folder = tree(
        tmp_path, a="from shop import b\n", b="import shop.room.c\n", room__c="from shop.a import x\n",
        d="import shop.a\n", e="from .b import y\n",
    )  # fmt: skip
    assert circles(import_graph("shop", lazy=False, folder=folder)) == [["shop.a", "shop.b", "shop.room.c"]]


def test_relative_imports_count_with_their_level(tmp_path: Path) -> None:
    folder = tree(tmp_path, a="from .room import c\n", room__c="from ..a import x\n", room__d="from . import c\n")
    assert circles(import_graph("shop", lazy=False, folder=folder)) == [["shop.a", "shop.room.c"]]


def test_imports_for_types_count_never_and_those_in_functions_when_asked(tmp_path: Path) -> None:
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shop import a\n"
    folder = tree(tmp_path, a="from shop import b, c\n", b=types, c="def f():\n    from shop import a\n")
    assert circles(import_graph("shop", lazy=False, folder=folder)) == []
    assert circles(import_graph("shop", lazy=True, folder=folder)) == [["shop.a", "shop.c"]]
