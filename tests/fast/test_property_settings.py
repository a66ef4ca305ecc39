"""One profile for every property test: a file chooses how many examples it needs and nothing else."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = ROOT / "tests" / "conftest.py"
ALLOWED = {"max_examples", "stateful_step_count"}
FORBIDDEN = {"register_profile", "load_profile", "HealthCheck", "hypothesis_profile"}


def objections(source: str) -> list[str]:
    """Lines that change more than the number of examples."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _name(node.func) == "settings":
            extra = [keyword.arg or "**" for keyword in node.keywords if keyword.arg not in ALLOWED]
            extra += ["a parent"] if node.args else []
            found += [f"{node.lineno}: settings({name})" for name in extra]
        elif isinstance(node, ast.Name | ast.Attribute) and _name(node) in FORBIDDEN:
            found.append(f"{node.lineno}: {_name(node)}")
    return found


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_no_test_file_brings_its_own_profile() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if path not in (CONFTEST, Path(__file__))]
    assert len(files) > 200
    assert {str(path.relative_to(ROOT)): bad for path in files if (bad := objections(path.read_text()))} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("@settings(max_examples=3)\ndef f(): ...", 0),
        ("T.settings = settings(max_examples=3, stateful_step_count=4)", 0),
        ("@settings(deadline=None)\ndef f(): ...", 1),
        ("@hypothesis.settings(derandomize=True, max_examples=3)\ndef f(): ...", 1),
        ("@settings(parent, suppress_health_check=[])\ndef f(): ...", 2),
        ("@settings(**more)\ndef f(): ...", 1),
        ("settings.register_profile('mine')", 1),
        ("settings.load_profile('mine')", 1),
        ("x = HealthCheck.too_slow", 1),
    ],
)
def test_what_the_check_objects_to(source: str, count: int) -> None:
    assert len(objections(source)) == count


def profile(**variables: str) -> list[str]:
    """(deadline, derandomised, examples, suppressed) as a test of a new process has them."""
    environment = {k: v for k, v in os.environ.items() if k not in ("CI", "TESTS_PROFILE", "GITHUB_EVENT_NAME")}
    code = (
        f"import runpy; runpy.run_path({str(CONFTEST)!r}); from hypothesis import settings as s; d = s.default;"
        "print(d.deadline, d.derandomize, d.max_examples, [c.name for c in d.suppress_health_check])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **variables}, capture_output=True, text=True, check=True
    )
    return done.stdout.split(maxsplit=3)


@pytest.mark.parametrize("variables", [{}, {"CI": "1"}, {"GITHUB_EVENT_NAME": "push"}])
def test_by_day_examples_are_the_same_every_time(variables: dict[str, str]) -> None:
    assert profile(**variables) == ["None", "True", "100", "['too_slow']\n"]


@pytest.mark.parametrize("variables", [{"TESTS_PROFILE": "nightly"}, {"GITHUB_EVENT_NAME": "schedule"}])
def test_by_night_they_are_random_and_more(variables: dict[str, str]) -> None:
    assert profile(**variables) == ["None", "False", "500", "['too_slow']\n"]


def test_this_very_process_has_the_profile() -> None:
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
