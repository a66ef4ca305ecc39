"""docs/dependencies.md against both pyproject.toml: every package once in its section, with a reason."""

from __future__ import annotations

import re
import tomllib

from pages import ROOT, read_page


def wanted() -> dict[str, list[str]]:
    """Section title -> requirements, of the project and of its harness."""
    found: dict[str, list[str]] = {}
    for path, prefix in (("pyproject.toml", ""), ("ci/pyproject.toml", "miles-ci")):
        project = tomllib.loads((ROOT / path).read_text())["project"]
        found[prefix or "Always"] = project["dependencies"]
        for extra, requirements in project["optional-dependencies"].items():
            found[f"{prefix}, extra {extra}" if prefix else extra] = requirements
    return found


def name_of(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0]


def tables() -> dict[str, dict[str, str]]:
    """Section title -> package -> reason."""
    found: dict[str, dict[str, str]] = {}
    section = ""
    for _, text in read_page(ROOT / "docs" / "dependencies.md").prose:
        if text.startswith("## "):
            section = text.removeprefix("## ").replace("Extra ", "").replace("`", "")
            found[section] = {}
        elif text.startswith("| ") and not text.startswith("| package"):
            name, reason = (cell.strip() for cell in text.strip("| ").split("|", 1))
            assert name not in found[section], f"{name} is listed twice"
            found[section][name] = reason
    return found


def test_page_lists_exactly_the_projects_dependencies() -> None:
    listed = tables()
    assert sorted(listed) == sorted(wanted())
    for section, requirements in wanted().items():
        assert sorted(listed[section]) == sorted({name_of(text) for text in requirements}), section


def test_every_package_has_a_reason() -> None:
    short = [name for section in tables().values() for name, reason in section.items() if len(reason.split()) < 2]
    assert short == []


def test_every_package_is_pinned_for_a_repeatable_environment() -> None:
    pinned = {line.partition("==")[0].strip().lower().replace("_", "-") for line in _constraints()}
    named = [text for requirements in wanted().values() for text in requirements]
    missing = sorted({name_of(text) for text in named if name_of(text).lower().replace("_", "-") not in pinned})
    assert missing == [], "add these to constraints.txt"


def _constraints() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if "==" in line and not line.startswith("#")]
