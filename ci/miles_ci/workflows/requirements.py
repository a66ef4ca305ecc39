"""Print a requirements file from pyproject.toml: `python …/requirements.py pyproject.toml --extra dev`.

Standard library only (and `tomli` on Python 3.10): it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def requirements(pyprojects: list[Path], extras: list[str]) -> list[str]:
    """Dependencies of the projects and of the named extras, sorted. `SystemExit` names an unknown extra."""
    projects = [tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in pyprojects]
    optional: dict[str, list[str]] = {}
    for project in projects:
        for name, lines in project.get("optional-dependencies", {}).items():
            optional[name] = [*optional.get(name, []), *lines]
    unknown = [extra for extra in extras if extra not in optional]
    if unknown:
        raise SystemExit(
            f"{', '.join(map(str, pyprojects))}: no extra {unknown[0]!r}; known: {', '.join(sorted(optional))}"
        )
    return sorted(
        {
            *(line for project in projects for line in project.get("dependencies", [])),
            *(line for extra in extras for line in optional[extra]),
        }
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pyproject", type=Path, nargs="+")
    parser.add_argument("--extra", action="append", default=[])
    options = parser.parse_args()
    sys.stdout.write("\n".join(requirements(options.pyproject, options.extra)) + "\n")
