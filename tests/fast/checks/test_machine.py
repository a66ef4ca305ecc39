"""The one line that `make` says where the environment cannot be made, and where megatron-core is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from checks.lock import PYTHONS
from checks.machine import NEWEST, OLDEST, refusal
from miles_ci.declare import register_cpu_ci

register_cpu_ci(5, "stage-a-cpu")

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
@pytest.mark.parametrize("minor", [11, 12, 13])
def test_supported_machines_are_let_through(minor, processor) -> None:
    assert refusal((3, minor), "Linux", processor) is None


@pytest.mark.parametrize(
    ("version", "system", "processor", "said"),
    [
        ((3, 10), "Linux", "x86_64", "Python 3.11, 3.12 or 3.13 is needed"),
        ((3, 14), "Linux", "x86_64", "megatron-core, alone .* 3.11, 3.12 or 3.13 is needed"),
        ((4, 0), "Linux", "x86_64", "megatron-core, alone"),
        ((3, 14), "Darwin", "arm64", "Python 3.14 or newer"),
        ((3, 13), "Darwin", "arm64", "megatron-core, alone .* linux/arm64"),
        ((3, 12), "Linux", "riscv64", "x86_64 and aarch64 only"),
    ],
)
def test_others_get_one_line_with_the_way_out(version, system, processor, said) -> None:
    line = refusal(version, system, processor)
    assert re.search(said, line)
    assert "\n" not in line


def test_the_project_file_the_check_of_the_lock_and_make_agree() -> None:
    declared = re.search(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert (3, int(declared[1])) == OLDEST
    assert (3, int(declared[2]) - 1) == NEWEST
    assert tuple(f"3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)) == PYTHONS


def test_make_ends_with_the_line_before_it_makes_anything(tmp_path: Path) -> None:
    python = tmp_path / "python3.14"
    # This Python under another number: 3.14 itself is on few machines.
    python.write_text(
        f"#!{sys.executable}\nimport runpy, sys\nsys.version_info = (3, 14, 0, 'final', 0)\nsys.argv.pop(0)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    python.chmod(0o755)
    command = ["make", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}", "quickstart"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    line, *rest = done.stderr.splitlines()
    assert line.startswith("megatron-core, alone of all packages, has no wheel for Python 3.14")
    assert line.endswith("Use: make PYTHON=/path/to/python3.11 quickstart")
    assert all(re.match(r"make(\[\d+\])?: \*\*\*", other) for other in rest)
    assert not (tmp_path / "venv").exists()


def test_without_megatron_core_training_says_so_in_one_line() -> None:
    code = "import sys; sys.modules['megatron'] = None; from miles.cli import main; sys.argv[1:] = {!r}; main()"
    for words in (["recipe", "check", "recipes/quickstart.yaml"], ["train", "recipes/quickstart.yaml", "--dry-run"]):
        command = [sys.executable, "-c", code.format(words)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 2
        assert (
            "training needs megatron-core, which is not installed: it has wheels for Python 3.11 to 3.13" in done.stderr
        )
        assert "Traceback" not in done.stderr
    code = "import sys; sys.modules['megatron'] = None; import miles.train.megatron.backend"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.splitlines()[-1].startswith("miles.config.errors.ConfigError: training needs megatron-core")
