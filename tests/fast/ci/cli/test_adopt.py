"""docs/ci/adopt.md, followed by hand in an empty repository of another project, with the harness installed."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from miles_ci.declare import register_cpu_ci
from tests.fast.ci.helpers.installed import Environment
from tests.fast.ci.helpers.trees import REPOSITORY

register_cpu_ci(12, "stage-a-cpu")

# The page is followed once, not once in each worker.
pytestmark = pytest.mark.xdist_group("adopt")

BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE = (REPOSITORY / "docs/ci/adopt.md").read_text(encoding="utf-8")


class Project:
    """A second test, an environment with the installed harness, and nothing else: the page makes the rest."""

    def __init__(self, root: Path) -> None:
        self.root = root / "acme-gpu"
        self.environment = Environment(root, "run", "schema")
        self.write("tests/fast/test_other.py", "def test_other():\n    assert True\n")
        self.outputs: dict[str, str] = {}

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def insert(self, section: str, body: str) -> None:
        registry = self.root / "registry.yaml"
        text = registry.read_text(encoding="utf-8").replace("pools: {}\n", "pools:\n")
        if not section:
            registry.write_text(f"{text}\n{body}", encoding="utf-8")
            return
        assert f"\n{section}:\n" in text
        registry.write_text(text.replace(f"\n{section}:\n", f"\n{section}:\n{body}", 1), encoding="utf-8")

    def shell(self, line: str) -> subprocess.CompletedProcess[str]:
        return self.environment.run(*shlex.split(line), cwd=self.root)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project after every block of the page, in order."""
    project = Project(tmp_path_factory.mktemp("adopt"))
    for info, body in BLOCK.findall(PAGE):
        kind, _, place = info.strip().partition(" ")[2].partition(":")
        if kind == "registry":
            project.insert(place, body)
        elif kind == "file":
            project.write(place, body)
        else:
            assert info.strip() == "console", info
            for line in body.splitlines():
                done = project.shell(line.removeprefix("$ "))
                assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
                project.outputs[line.removeprefix("$ ")] = done.stdout
    return project


def test_every_command_of_the_page_works_in_another_project(project) -> None:
    outputs = project.outputs
    assert len(outputs) >= 20
    assert "0 error(s), 0 warning(s)" in outputs["miles-ci lint"]
    assert "2 file(s), 2 test(s): 2 passed" in outputs["miles-ci run --suite stage-a-cpu"]
    assert "1 passed" in outputs["python -m pytest --suite stage-a-cpu --shard 1/2"]
    assert "2 gpu" in outputs["miles-ci plan --labels run-ci-core --suite stage-b-8-gpu-a100"]


def test_without_pools_there_is_nothing_to_simulate_and_it_is_said(project, tmp_path) -> None:
    (tmp_path / "registry.yaml").write_bytes(
        (project.environment.site / "miles_ci/registry/first_registry.yaml").read_bytes()
    )
    (tmp_path / "tests/fast").mkdir(parents=True)
    (tmp_path / "tests/fast/test_a.py").write_text("def test_a():\n    assert True\n")
    done = project.shell(f"python -m miles_ci simulate --root {tmp_path} --hours 2 --seeds 1")
    assert "the registry has no pools, so nothing waits" in done.stdout


def test_workflows_of_another_project_are_generated_and_hold_no_finding(project) -> None:
    assert "15 workflow files are current" in project.outputs["miles-ci generate --check"]
    assert "own rules          0 findings in 15 files" in project.outputs["miles-ci lint --workflows"]


def test_without_the_image_of_the_page_generate_says_what_to_add_and_so_does_init(project) -> None:
    registry = project.root / "registry.yaml"
    text = registry.read_text(encoding="utf-8")
    registry.write_text(text[: text.index("\nimages:\n")], encoding="utf-8")
    try:
        made = project.shell("miles-ci generate")
    finally:
        registry.write_text(text, encoding="utf-8")
    assert made.returncode == 2
    assert "images has no entry for cuda: add one whose name begins with 'cuda'" in made.stderr
    assert "images:" in project.outputs["miles-ci init"]
    assert "tests/fast/test_*.py" in project.outputs["miles-ci init"]


def test_a_change_below_src_reaches_the_tests_that_import_it(project) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q", "-b", "main"], ["add", "."], [*identity, "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=project.root, check=True)
    project.write("src/acme/__init__.py", "def add(a, b):\n    return b + a\n")
    done = project.shell("miles-ci plan --base main --suite stage-a-cpu")
    assert "tests/fast/test_add.py" in done.stdout
    assert "tests/fast/test_other.py" not in done.stdout


def test_registry_that_exists_is_not_overwritten(project) -> None:
    before = (project.root / "registry.yaml").read_text(encoding="utf-8")
    done = project.shell("miles-ci init")
    assert done.returncode == 2
    assert "exists already" in done.stderr
    assert (project.root / "registry.yaml").read_text(encoding="utf-8") == before
