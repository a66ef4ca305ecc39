"""Every file of the fast tests passes alone, as the first that a fresh clone runs: no file rests on another's traces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from miles_ci.declare import register_cpu_ci

register_cpu_ci(1500, "stage-b-cpu", nightly=True, split=True)

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "fast").rglob("test_*.py"))
# What a first run leaves behind is in these; a clone has none of them.
LEFT_OUT = (".hypothesis", ".pytest_cache", ".venv", "runs", "results")


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked and the new files of this checkout, without anything that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    target = tmp_path_factory.mktemp("clone")
    for name in filter(None, listed):
        if (ROOT / name).is_file() and not name.startswith(LEFT_OUT):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    subprocess.run(["git", "init", "-q"], cwd=target, check=True)
    return target


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES)
def test_file_passes_alone_and_first(file: str, clone: Path, tmp_path: Path) -> None:
    fresh = shutil.copytree(clone, tmp_path / "clone", symlinks=True)
    assert not (fresh / ".hypothesis").exists()
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "CI" and not name.startswith(("MILES_CI_", "PYTEST_", "GITHUB_", "TESTS_"))
    }
    environment["PYTHONPATH"] = os.pathsep.join((str(fresh), str(fresh / "ci")))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file],
        cwd=fresh, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
