"""A change of a file that a test reads selects that test: every repository file that a test names in a string."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from miles_ci.registry import load_fleet
from miles_ci.select.affected import Affected, affected
from miles_ci.select.diff import Change
from miles_ci.select.graph import Graph, python_files, read_imports
from tests.fast.ci.helpers.trees import REPOSITORY

RULES = load_fleet(REPOSITORY / "registry.yaml").selection
FAST = "tests/fast/"
OURSELVES = "tests/fast/ci/select/test_named_files.py"
# Names of files in small trees that the tests make, which are ours only by accident.
MADE_UP = {
    ("tests/fast/ci/declare/test_syntax.py", ".gitignore"),
    ("tests/fast/ci/select/test_affected.py", "README.md"),
    ("tests/fast/ci/select/test_affected.py", "ci/README.md"),
    ("tests/fast/ci/select/test_affected.py", "docs/README.md"),
    ("tests/fast/ci/test_no_project_word.py", "README.md"),
    ("tests/fast/ci/workflows/test_patches_edits_images.py", "README.md"),
    ("tests/fast/miles/data/tasks/test_row_sources.py", "README.md"),
    ("tests/fast/miles/orchestrate/test_input_record.py", "README.md"),
}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return Graph(read_imports(str(REPOSITORY), python_files(str(REPOSITORY))))


def every_test(graph: Graph) -> set[str]:
    return {path for path in graph.files if path.startswith("tests/") and "/test_" in path}


def change(graph: Graph, path: str) -> Affected:
    return affected([Change("M", path)], graph, RULES, every_test(graph))


def named(source: str) -> Iterator[str]:
    """String literals, and paths put together as `ROOT / "docs" / "page.md"`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        parts: list[str] = []
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            if not (isinstance(node.right, ast.Constant) and isinstance(node.right.value, str)):
                break
            parts.insert(0, node.right.value)
            node = node.left
        if len(parts) > 1:
            yield "/".join(parts)


def files_named_in(path: str) -> set[str]:
    words = {word for word in named((REPOSITORY / path).read_text(encoding="utf-8")) if 0 < len(word) < 200}
    paths = {word for word in words if word.isprintable() and word[0] != "/" and ".." not in word.split("/")}
    return {word for word in paths if (REPOSITORY / word).is_file() and (path, word) not in MADE_UP}


def test_every_file_that_a_test_or_its_helper_names_selects_that_test(graph: Graph) -> None:
    readers: dict[str, set[str]] = {}
    every = every_test(graph)
    for path in graph.files:
        if path.startswith(FAST) and path != OURSELVES:
            for name in files_named_in(path):
                readers.setdefault(name, set()).update((every & graph.reached_from([path]).keys()) - {OURSELVES})
    assert {"docs/ci/adopt.md", "docs/architecture.md", "registry.yaml"} <= readers.keys()
    missed = {}
    for name, tests in readers.items():
        found = change(graph, name)
        if not found.everything and tests - found.tests:
            missed[name] = sorted(tests - found.tests)
    assert missed == {}, "add edges to registry.yaml, or the pair to MADE_UP when the file is not read"


@pytest.mark.parametrize(
    ("path", "test"),
    [
        ("README.md", "tests/fast/docs/test_pages.py"),
        ("CONTRIBUTING.md", "tests/fast/docs/test_pages.py"),
        ("docs/architecture.md", "tests/fast/docs/test_architecture.py"),
        ("docs/ci/adopt.md", "tests/fast/ci/cli/test_adopt.py"),
        ("docs/ci/maintainer.md", "tests/fast/ci/bot/test_docs.py"),
        ("docs/ci/cards/example-merged.json", "tests/fast/ci/bot/test_docs.py"),
        ("miles/config/environment.py", "tests/fast/docs/test_pages.py"),
    ],
)
def test_a_changed_page_selects_the_tests_that_check_it_and_not_everything(graph: Graph, path: str, test: str) -> None:
    found = change(graph, path)
    assert not found.everything
    assert test in found.tests


@pytest.mark.parametrize(
    "path", ["miles/data/table.json", "ci/miles_ci/registry/first_registry.yaml", "tests/fast/data.json"]
)
def test_a_file_that_code_may_read_still_selects_everything(graph: Graph, path: str) -> None:
    assert change(graph, path).everything
