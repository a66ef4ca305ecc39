"""The pytest plugin in real pytest processes, with and without xdist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from miles_ci import pytest_plugin
from miles_ci.workspace import Workspace
from tests.fast.ci.helpers.lean import LEAN_PYTEST

PACKAGE_PARENT = Path(pytest_plugin.__file__).resolve().parents[1]
REGISTRY = PACKAGE_PARENT.parent / "registry.yaml"
CUDA = "from miles_ci.declare import register_cuda_ci\nregister_cuda_ci(60, {suite!r}, hardware={hardware!r}, num_gpus={gpus}, labels=['kernels'])\n"


class Tree:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "registry.yaml").write_text(REGISTRY.read_text())
        (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n')

    def file(self, path: str, source: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(textwrap.dedent(source))

    def pytest(self, *words: str) -> tuple[int, str]:
        hidden = ("MILES_CI_", "PYTEST_", "CUDA_", "HIP_", "ROCR_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        env |= {"PYTHONPATH": str(PACKAGE_PARENT), **LEAN_PYTEST}
        # No driver is found, whatever the machine that runs this test has.
        env["LD_LIBRARY_PATH"] = str(self.root)
        command = [sys.executable, "-m", "pytest", "-p", "miles_ci.pytest_plugin", "-rs", *words]
        if "-n" in words:
            command += ["-p", "xdist"]
        done = subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, timeout=100)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_gpu_file_is_skipped_with_what_it_needs_and_never_imported(tree):
    tree.file("tests/fast-gpu/test_gpu.py", CUDA.format(suite="stage-b-2-gpu-h200", hardware=["hopper"], gpus=2)
              + "import there_is_no_such_module\n")  # fmt: skip
    tree.file("tests/fast/test_cpu.py", "def test_a(): assert True\n")
    code, output = tree.pytest("tests")
    assert code == 0, output
    assert "needs 2 x hopper, found 1 x cpu" in output
    assert "1 passed, 1 skipped" in output


def test_required_hardware_that_is_missing_is_a_failure(tree):
    tree.file("tests/fast-gpu/test_gpu.py", CUDA.format(suite="stage-b-1-gpu-h200", hardware=["h200"], gpus=1)
              + "def test_a(): assert True\n")  # fmt: skip
    code, output = tree.pytest("tests", "--require-hardware")
    assert code != 0
    assert "--require-hardware: needs 1 x h200, found 1 x cpu" in output


def test_suite_option_leaves_other_files_unopened(tree):
    tree.file("tests/fast/test_one.py", "def test_a(): assert True\n")
    tree.file("tests/e2e/test_two.py", """
        from miles_ci.declare import register_cpu_ci
        register_cpu_ci(5, "stage-b-cpu")
        def test_b(): assert True
    """)  # fmt: skip
    tree.file("tests/e2e/test_gpu.py", CUDA.format(suite="stage-b-1-gpu-h200", hardware=["h200"], gpus=1)
              + "raise SystemExit('must not be imported')\n")  # fmt: skip
    code, output = tree.pytest("tests", "--suite", "stage-b-cpu", "-v")
    assert code == 0, output
    assert "test_two.py::test_b" in output
    assert "test_one" not in output


def test_shards_cover_the_suite_alone_and_under_xdist_and_agree_with_the_planner(tree):
    names = {f"test_n{number}" for number in range(10)}
    for name in names:
        tree.file(f"tests/fast/{name}.py", "def test_a(): assert True\n")
    words = ("tests", "--suite", "stage-a-cpu", "-v", "--shard")
    code, alone = tree.pytest(*words, "1/2", "-p", "no:xdist")
    assert code == 0, alone
    code, spread = tree.pytest(*words, "2/2", "-n", "2", "--dist", "loadgroup")
    assert code == 0, spread
    # Without xdist: "path::name PASSED"; with it: "[gw0] PASSED path::name".
    first = set(re.findall(r"(test_n\d)\.py::test_a PASSED", alone))
    second = set(re.findall(r"PASSED tests/fast/(test_n\d)\.py::test_a", spread))
    assert first | second == names
    assert not first & second
    planned = pytest_plugin._plan(Workspace.find(str(tree.root)), "stage-a-cpu", "1/2")
    assert {Path(path).stem for path in planned.units} == first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--suite", "stage-a-cpus"), "did you mean 'stage-a-cpu'?"),
        (("--shard", "1/2"), "--shard I/N needs --suite ID"),
        (("--suite", "stage-a-cpu", "--shard", "3/2"), "write i/n with 1 <= i <= n"),
    ],
)
def test_wrong_options_end_with_a_usage_error(tree, words, message):
    tree.file("tests/fast/test_one.py", "def test_a(): assert True\n")
    code, output = tree.pytest("tests", *words)
    assert code == 4, output
    assert message in output
    # One message at the start, not one for each folder and worker.
    _, spread = tree.pytest("tests", "-n", "2", *words)
    assert spread.count(message) == 1, spread


def test_without_options_and_registry_the_plugin_is_silent(tree):
    (tree.root / "registry.yaml").unlink()
    source = CUDA.format(suite="stage-b-1-gpu-h200", hardware=["h200"], gpus=1) + "def test_a(): assert True\n"
    tree.file("tests/fast/test_one.py", source)
    code, output = tree.pytest("tests")
    assert (code, "1 passed" in output) == (0, True)


def test_import_is_light():
    code = "import sys, pytest; before = set(sys.modules); import miles_ci.pytest_plugin; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE_PARENT, check=True)
    assert set(done.stdout.split()) <= {"miles_ci", "miles_ci.pytest_plugin"}
