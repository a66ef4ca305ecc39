"""The pictures of docs/architecture.md against the imports in the code, in both directions."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import ROOT, read_page

PAGE = read_page(ROOT / "docs" / "architecture.md")
PAGE_LINES = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()
# Bases that everything may import are not drawn, nor is the entry point of `python -m miles_ci`.
BASES = {"miles": {"config"}, "miles_ci": {"errors", "environment", "valid_text", "__main__", "__version__"}}
FOLDERS = {"miles": ROOT, "miles_ci": ROOT / "ci"}


def drawn(package: str) -> set[tuple[str, str]]:
    """Arrows of the picture that says `%% package`."""
    pictures = [fence for fence in PAGE.fences if fence.language == "mermaid" and f"  %% {package}" in fence.lines]
    assert len(pictures) == 1, f"one picture of {package}"
    return {(m[1], m[2]) for line in pictures[0].lines if (m := re.fullmatch(r"\s*(\w+) --> (\w+)", line))}


def imported(package: str, root: Path | None = None) -> set[tuple[str, str]]:
    """(importer, imported) among the direct children of `package`; lazy imports count, those for types do not."""
    root = root or FOLDERS[package]
    edges = set()
    for path in (root / package).rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if len(parts) == 2 and parts[1] == "__init__":
            continue
        edges |= {(parts[1], other) for other in _siblings(ast.parse(path.read_text()), package) if other != parts[1]}
    return {edge for edge in edges if not set(edge) & BASES[package]}


def _siblings(tree: ast.AST, package: str) -> Iterator[str]:
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
        return
    modules: list[str] = []
    if isinstance(tree, ast.ImportFrom) and tree.level == 0 and tree.module:
        modules = [f"{tree.module}.{alias.name}" for alias in tree.names] if tree.module == package else [tree.module]
    elif isinstance(tree, ast.Import):
        modules = [alias.name for alias in tree.names]
    elif isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        # `importlib.import_module` by a table of names.
        modules = [tree.value] if re.fullmatch(rf"{package}\.\w+\.[\w.]+", tree.value) else []
    for module in modules:
        head, _, rest = module.partition(".")
        if head == package and rest:
            yield rest.partition(".")[0]
    for child in ast.iter_child_nodes(tree):
        yield from _siblings(child, package)


def reachable(edges: set[tuple[str, str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        node = waiting.pop()
        following = {b for a, b in edges if a == node} - found
        found |= following
        waiting += following
    return found


@pytest.mark.parametrize("package", BASES)
def test_every_import_follows_from_the_arrows(package: str) -> None:
    arrows = drawn(package)
    lost = [f"{a} --> {b}" for a, b in sorted(imported(package)) if b not in reachable(arrows, a)]
    assert lost == [], f"draw these in docs/architecture.md, or remove the imports of {package}"


@pytest.mark.parametrize("package", BASES)
def test_every_arrow_is_an_import_and_none_follows_from_others(package: str) -> None:
    arrows = drawn(package)
    assert sorted(arrows - imported(package)) == [], "no such import is left"
    for a, b in sorted(arrows):
        assert b not in reachable(arrows - {(a, b)}, a), f"{a} --> {b} follows from other arrows; leave it out"
        assert a not in reachable(arrows, a), f"{a} is in a circle"


@pytest.mark.parametrize("package", BASES)
def test_every_component_is_in_the_picture(package: str) -> None:
    names = {
        entry.stem
        for entry in (FOLDERS[package] / package).iterdir()
        if entry.suffix == ".py" or (entry / "__init__.py").exists()
    }
    nodes = {node for arrow in drawn(package) for node in arrow}
    assert names - BASES[package] - {"__init__"} == nodes


def test_lazy_imports_count_and_imports_for_types_do_not(tmp_path: Path) -> None:
    folder = tmp_path / "miles" / "a"
    folder.mkdir(parents=True)
    (folder / "x.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from miles.types import T\n"
        "def f():\n    from miles.lazy import g\n    import miles.other.deep\n"
    )
    assert imported("miles", tmp_path) == {("a", "lazy"), ("a", "other")}


def test_every_seam_names_files_that_are_there_and_says_which_engines_the_loop_starts() -> None:
    rows = re.findall(r"^\| [^|]+ \| `([\w/.]+\.py)` \| (.+) \|$", "\n".join(PAGE_LINES), re.MULTILINE)
    assert len(rows) >= 8
    for path, _ in rows:
        assert (ROOT / path).is_file(), path
    engines = next(text for path, text in rows if path == "miles/rollout/engine.py")
    starts = "cannot be started by the training loop yet" not in (ROOT / "miles/orchestrate/backends.py").read_text()
    assert ("which the loop does not start yet" not in engines) == starts


def test_the_layers_name_every_package_of_miles_once() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(
        c["layers"] for c in contracts if c["type"] == "layers" and any("miles.cli" in layer for layer in c["layers"])
    )
    named = re.findall(r"miles\.(\w+)", " ".join(layers))
    rooms = {path.parent.name for path in (ROOT / "miles").glob("*/__init__.py")} | {"cli", "api"}
    assert len(named) == len(set(named))
    assert rooms - set(named) == set()
