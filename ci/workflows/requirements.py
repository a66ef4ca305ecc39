"""Print a requirements file from pyproject.toml: `python ci/workflows/requirements.py pyproject.toml --extra dev`.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Dependencies of the project and of the named extras, sorted. `SystemExit` names an unknown extra."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project.get("optional-dependencies", {})
    unknown = [extra for extra in extras if extra not in optional]
    if unknown:
        raise SystemExit(f"{pyproject}: no extra {unknown[0]!r}; known: {', '.join(sorted(optional))}")
    return sorted({*project.get("dependencies", []), *(line for extra in extras for line in optional[extra])})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pyproject", type=Path)
    parser.add_argument("--extra", action="append", default=[])
    options = parser.parse_args()
    sys.stdout.write("\n".join(requirements(options.pyproject, options.extra)) + "\n")
