"""`miles-ci` alone: installed from its folder as a wheel, started in a repository that has never heard of it."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from miles_ci.declare import register_cpu_ci
from tests.fast.ci.helpers.installed import Environment, requirements_of
from tests.fast.ci.helpers.trees import REPOSITORY

register_cpu_ci(12, "stage-a-cpu")

pytestmark = pytest.mark.xdist_group("distribution")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("wheel"), "run")


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Somebody's git repository: a package, no test, nothing of ours."""
    root = tmp_path / "acme"
    (root / "acme").mkdir(parents=True)
    (root / "acme/__init__.py").write_text("def add(a, b):\n    return a + b\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def test_a_foreign_repository_gets_a_registry_that_lints_clean_plans_and_runs_a_test(environment, foreign) -> None:
    def call(*words: str) -> str:
        done = environment.run("miles-ci", *words, cwd=foreign)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout

    assert "registry.yaml" in call("init")
    untested = environment.run("miles-ci", "lint", cwd=foreign)
    assert untested.returncode == 2
    assert "error[no-test-files] roots: 'tests' no such folder" in untested.stdout
    (foreign / "tests/fast").mkdir(parents=True)
    test = "from acme import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    (foreign / "tests/fast/test_add.py").write_text(test)
    (foreign / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    assert "0 error(s), 0 warning(s) in 1 test files" in call("lint")
    assert "tests/fast/test_add.py" in call("plan", "--suite", "stage-a-cpu")
    assert "1 file(s), 1 test(s): 1 passed" in call("run", "--suite", "stage-a-cpu")
    (results,) = (foreign / "results").rglob("results.json")
    assert [record["path"] for record in json.loads(results.read_text())["tests"]] == ["tests/fast/test_add.py"]
    (foreign / "tests/fast/test_add.py").write_text(test.replace("== 3", "== 4"))
    assert environment.run("miles-ci", "run", "--suite", "stage-a-cpu", cwd=foreign).returncode == 1


def test_workflows_of_a_foreign_repository_install_the_harness_by_its_version(environment, foreign) -> None:
    (foreign / "tests/fast").mkdir(parents=True)
    (foreign / "tests/fast/test_add.py").write_text("def test_add():\n    assert 1 + 2 == 3\n")
    for words in (["init"], ["generate"], ["lint", "--workflows"]):
        done = environment.run("miles-ci", *words, cwd=foreign)
        assert done.returncode == 0, done.stdout + done.stderr
    text = (foreign / ".github/workflows/pr-test.yml").read_text()
    version = environment.run("miles-ci", "--version", cwd=foreign).stdout.split()[1]
    assert f"'miles-ci=={version}'" in text
    assert "PYTHONPATH" not in text
    assert "@harness" not in text


def test_the_environment_holds_what_the_wheel_declares_and_runs_the_wheel(environment, foreign) -> None:
    place = environment.run("python", "-c", "import miles_ci; print(miles_ci.__file__)", cwd=foreign).stdout
    assert place.strip() == str(environment.site / "miles_ci/__init__.py")
    for absent in ("torch", "miles", "numpy", "typer", "rich"):
        assert "ModuleNotFoundError" in environment.run("python", "-c", f"import {absent}", cwd=foreign).stderr


def test_every_file_of_the_package_is_in_the_wheel(environment) -> None:
    (wheel,) = environment.root.parent.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    source = REPOSITORY / "ci"
    files = [path for path in (source / "miles_ci").rglob("*") if path.is_file()]
    kept = [path for path in files if not {"__pycache__", "node_modules"} & set(path.parts)]
    assert sorted({path.relative_to(source).as_posix() for path in kept} - packed) == []
    assert any(name.endswith("node/package-lock.json") for name in packed)


def test_planning_needs_two_packages(environment) -> None:
    (wheel,) = environment.root.parent.glob("*.whl")
    own = {"pydantic", "pyyaml"}
    if sys.version_info < (3, 11):  # noqa: UP036 (the harness alone runs on 3.10)
        own.add("tomli")
    helpers = {"annotated-types", "pydantic-core", "typing-extensions", "typing-inspection"}
    assert set(requirements_of(wheel)) == own | helpers
