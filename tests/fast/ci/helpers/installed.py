"""The harness as somebody else gets it: a wheel in an environment that holds its declared dependencies and no more."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from tests.fast.ci.helpers.lean import LEAN_PYTEST
from tests.fast.ci.helpers.trees import REPOSITORY


def build_wheel(folder: Path) -> Path:
    """A wheel from a copy of ci/: building leaves nothing in the source tree."""
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "node_modules", "build", "*.egg-info")
    shutil.copytree(REPOSITORY / "ci", source, ignore=ignored)
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    (wheel,) = folder.glob("miles_ci-*.whl")
    return wheel


def requirements_of(wheel: Path, *extras: str) -> list[str]:
    """Names of the distributions that the wheel says it needs, with what those need, by its own metadata."""
    (made,) = importlib.metadata.distributions(path=[str(wheel)])
    wanted, found = [*_names(made, extras)], set()
    while wanted:
        name = wanted.pop()
        if name not in found:
            found.add(name)
            wanted += _names(importlib.metadata.distribution(name), ())
    return sorted(found)


def _names(distribution: importlib.metadata.Distribution, extras: tuple[str, ...]) -> Iterator[str]:
    for requirement in map(Requirement, distribution.requires or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement.name.lower().replace("_", "-")


class Environment:
    """A virtual environment with the wheel installed by pip, and its declared dependencies by link."""

    def __init__(self, folder: Path, *extras: str) -> None:
        wheel = build_wheel(folder)
        self.root = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.root)], check=True, timeout=100)
        self.python = self.root / "bin/python"
        (self.site,) = self.root.glob("lib/python*/site-packages")
        for name in requirements_of(wheel, *extras):
            self._link(importlib.metadata.distribution(name))
        # A source tree on PYTHONPATH with its .egg-info would pass for an installation.
        options = ["--quiet", "--no-deps", "--no-index", "--ignore-installed", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", *options, str(wheel)]
        subprocess.run(command, check=True, capture_output=True, timeout=100)

    def _link(self, distribution: importlib.metadata.Distribution) -> None:
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            source, target = Path(str(distribution.locate_file(top))), self.site / top
            if source.exists() and not target.exists():
                target.symlink_to(source)

    def run(self, *words: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run the installed `miles-ci`, or another program of the environment, as in a fresh shell."""
        program, *rest = words
        ours = ("MILES_CI_", "PYTEST_", "GITHUB_", "PYTHON", "VIRTUAL_ENV")
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        env |= {**LEAN_PYTEST, "MILES_CI_LOCK_DIR": str(self.root.parent / "locks"), **extra}
        command = [str(self.root / "bin" / program), *rest]
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False)
