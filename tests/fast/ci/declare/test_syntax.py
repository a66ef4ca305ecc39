"""Every test file is compiled once, whether it declares anything or not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles_ci.declare import syntax
from miles_ci.lint import lint
from tests.fast.ci.helpers.trees import PLAIN, REPOSITORY, cpu, workspace, write_tree


@pytest.mark.parametrize(
    ("source", "place", "words"),
    [
        (b"def test_a(:\n    pass\n", (1, 12), "invalid syntax"),
        (b"def test_a():\n    x = '\0'\n", (2, 10), "NUL"),
        (b"def test_a(): assert 1\nreturn 1\n", (2, 1), "outside function"),
        (b"def test_a():\n    pass\n  pass\n", (3, 7), "indentation"),
        (b"# -*- coding: nonsense -*-\n", (1, 1), "encoding"),
        (b"x = 1\n" + b"-" * 100_000 + b"1\n", (1, 1), "MemoryError"),
    ],
)
def test_a_file_that_does_not_compile_is_an_error_with_its_place(tmp_path, source, place, words) -> None:
    write_tree(tmp_path, {"tests/fast/test_bad.py": source, "tests/fast/test_good.py": PLAIN})
    (found,) = [item for item in lint(workspace(tmp_path)).errors if item.path != "docs/reference/registry.schema.json"]
    assert (found.path, found.code) == ("tests/fast/test_bad.py", "syntax-error")
    assert (found.line, found.column) == place
    assert words in found.message


def test_a_faulty_declaration_is_not_reported_twice(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/e2e/test_bad.py": "from miles_ci.declare import register_cpu_ci\nregister_cpu_ci(\n"})
    assert [item.code for item in lint(workspace(tmp_path)).errors if item.path.startswith("tests/")] == [
        "syntax-error"
    ]


def test_what_a_declaring_file_may_not_compile_for_is_found_too(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/e2e/test_bad.py": cpu() + "break\n"})
    (found,) = [item for item in lint(workspace(tmp_path)).errors if item.path.startswith("tests/")]
    assert (found.line, found.code) == (5, "syntax-error")


def test_sound_contents_are_remembered_and_broken_ones_are_not(tmp_path: Path, monkeypatch) -> None:
    write_tree(tmp_path, {"tests/fast/test_a.py": PLAIN, "tests/fast/test_b.py": "def f(:\n"})
    paths, cache = ["tests/fast/test_a.py", "tests/fast/test_b.py", "tests/fast/test_gone.py"], tmp_path / "cache"
    first = syntax.syntax_findings(tmp_path, paths, cache)
    assert [item.path for item in first] == ["tests/fast/test_b.py"]
    compiled: list[str] = []
    inner = syntax._problem
    monkeypatch.setattr(syntax, "_problem", lambda path, data: compiled.append(path) or inner(path, data))
    assert syntax.syntax_findings(tmp_path, paths, cache) == first
    assert compiled == ["tests/fast/test_b.py"]


@pytest.mark.parametrize("content", ["", "{", "[1, null]", '{"a": 1}', "7"])
def test_a_damaged_cache_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    write_tree(tmp_path, {"tests/fast/test_b.py": "def f(:\n", f"cache/{syntax.CACHE_NAME}": content})
    assert len(syntax.syntax_findings(tmp_path, ["tests/fast/test_b.py"], tmp_path / "cache")) == 1


def test_a_file_too_large_to_compile_is_a_warning(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/fast/test_a.py": "X = '" + "x" * (5 << 20) + "'\n"})
    (found,) = [item for item in lint(workspace(tmp_path)).findings if item.path.startswith("tests/")]
    assert (found.code, found.severity) == ("too-large", "warning")


def test_the_command_ends_with_2(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/fast/test_bad.py": "def test_a(:\n"})
    command = [sys.executable, "-m", "miles_ci", "lint", "--root", str(tmp_path), "--write-schema"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "tests/fast/test_bad.py:1:12: error[syntax-error] the file does not compile: invalid syntax" in done.stdout
    assert done.stdout.endswith("1 error(s), 0 warning(s) in 1 test files, 1 registrations\n")
