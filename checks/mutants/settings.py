"""`mutants.toml`: which packages are looked at, by which tests, and the survivors that stay."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checks.mutants.changes import Change, changes_of

Identity = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Package:
    """A folder of product code, the files and folders of tests that answer for it, and the part of its changes, without
    those listed, that they must notice."""

    folder: str
    tests: Sequence[str]
    share: float

    def changes(self, root: Path) -> list[Change]:
        found: list[Change] = []
        for path in sorted((root / self.folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if "node_modules" not in path.parts:
                found += changes_of(name, path.read_bytes())
        return found

    def test_files(self, root: Path) -> list[str]:
        found: set[str] = set()
        for name in self.tests:
            place = root / name
            paths = [place] if place.is_file() else place.rglob("test_*.py")
            found.update(path.relative_to(root).as_posix() for path in paths)
        return sorted(found)


@dataclass(frozen=True)
class Settings:
    """`patience_s`: processor time that a test may take beyond a multiple of what was measured. `preload`: libraries that
    are imported once, before a child is forked for each change. `survivors`: a change -> why it stays."""

    patience_s: float
    preload: Sequence[str]
    packages: Mapping[str, Package]
    survivors: Mapping[Identity, str]


def read_settings(path: Path) -> Settings:
    """Raises `ValueError` with the entry for an unknown, missing or empty key."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    if unknown := data.keys() - {"share", "patience_s", "preload", "packages", "survivor"}:
        raise ValueError(f"{path.name}: unknown {', '.join(sorted(unknown))}")
    survivors: dict[Identity, str] = {}
    for number, entry in enumerate(data.get("survivor", []), 1):
        if entry.keys() != {"path", "within", "text", "before", "after", "reason"} or not entry["reason"].strip():
            raise ValueError(f"{path.name}: survivor {number} needs path, within, text, before, after and a reason")
        key = (entry["path"], entry["within"], entry["text"], entry["before"], entry["after"])
        if key in survivors:
            raise ValueError(f"{path.name}: survivor {number} is listed twice")
        survivors[key] = entry["reason"]
    packages = {}
    for folder, entry in data["packages"].items():
        if not {"tests"} <= entry.keys() <= {"tests", "share"}:
            raise ValueError(f"{path.name}: packages.{folder} has tests and perhaps a share of its own")
        packages[folder] = Package(folder, entry["tests"], float(entry.get("share", data["share"])))
    return Settings(float(data["patience_s"]), data.get("preload", []), packages, survivors)
