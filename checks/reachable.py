"""Product code that no entry point reaches: `python -m checks.reachable`, part of `make lint`.

Entry points are the console scripts and pytest plugins of the pyproject files, every `__main__`, and those that
`reachable.toml` names. From there on names are followed through imports; a method counts as called when live code
reads an attribute of its name, so that what is reported is dead, while not all that is dead is reported. Tests and
benchmarks are no entry points: what only they use is not part of the product.

Exit code 1: something is unreachable, or an exception names nothing, or something that is reached without it.
"""

from __future__ import annotations

import fnmatch
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checks.source import Definition, Module, read_packages
from checks.walk import Walk

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = Path(__file__).with_name("reachable.toml")


@dataclass(frozen=True)
class Settings:
    """`packages`: package -> its folder. `entries`: what others start by its name -> who; `kept`: not reached yet -> why
    it stays; `by_framework`: pattern of names -> who calls such; `by_name_calls`: functions that take names of methods."""

    packages: Mapping[str, str]
    entries: Mapping[str, str]
    kept: Mapping[str, str]
    by_framework: Mapping[str, str]
    by_name_calls: Sequence[str]


@dataclass(frozen=True)
class Finding:
    place: str
    name: str

    def __str__(self) -> str:
        return f"{self.place}: {self.name} is reached by no entry point"


def faults(modules: Mapping[str, Module], settings: Settings, started: Sequence[str]) -> list[str]:
    """One line for each outermost thing that is dead, and for each exception that is none."""
    entries = [*started, *settings.entries]
    own = walked(modules, settings, entries)
    live = walked(modules, settings, [*entries, *settings.kept])
    found = [str(finding) for module in modules.values() for finding in _dead_in(module, live)]
    found += [f"entries.{name}: no such definition" for name in settings.entries if not _findings(name, modules, set())]
    for name in settings.kept:
        if not _findings(name, modules, set()):
            found.append(f"kept.{name}: no such definition")
        elif not _findings(name, modules, own):
            found.append(f"kept.{name}: reached without this exception; remove it")
    names = {member for module in modules.values() for item in module.definitions.values() for member in _names(item)}
    found += [
        f"by_framework.{pattern}: no definition has such a name"
        for pattern in settings.by_framework
        if not fnmatch.filter(names, pattern)
    ]
    return found


def walked(modules: Mapping[str, Module], settings: Settings, entries: Sequence[str]) -> set[str]:
    """Names of all that is live."""
    walk = Walk(modules, by_framework=list(settings.by_framework), by_name_calls=settings.by_name_calls)
    return walk.from_entries(entries)


def _findings(name: str, modules: Mapping[str, Module], live: set[str]) -> list[Finding]:
    """What is dead at or below a name; of a name that is nowhere, nothing."""
    module, _, path = name.partition(":")
    if module not in modules:
        return []
    if not path:
        return list(_dead_in(modules[module], live))
    definitions: Mapping[str, Definition] = modules[module].definitions
    *outer, last = path.split(".")
    for part in outer:
        if part not in definitions:
            return []
        definitions = definitions[part].members
    return list(_dead(definitions[last], modules[module], live)) if last in definitions else []


def _dead_in(module: Module, live: set[str]) -> Iterator[Finding]:
    if module.name in live:
        for definition in module.definitions.values():
            yield from _dead(definition, module, live)
    elif module.definitions or module.body:
        yield Finding(f"{module.path}:1", module.name)


def _dead(definition: Definition, module: Module, live: set[str]) -> Iterator[Finding]:
    if definition.name not in live:
        yield Finding(f"{module.path}:{definition.line}", definition.name.replace(":", "."))
        return
    for member in definition.members.values():
        yield from _dead(member, module, live)


def _names(definition: Definition) -> Iterator[str]:
    yield definition.short
    for member in definition.members.values():
        yield from _names(member)


def entry_points(modules: Mapping[str, Module], pyprojects: Sequence[Path]) -> list[str]:
    """Console scripts and pytest plugins of the projects, and every `__main__`."""
    found = [name for name in modules if name.rpartition(".")[2] == "__main__"]
    for path in pyprojects:
        project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
        found += project.get("scripts", {}).values()
        found += project.get("entry-points", {}).get("pytest11", {}).values()
    return found


def read_settings(path: Path) -> Settings:
    return Settings(**tomllib.loads(path.read_text(encoding="utf-8")))


def main() -> int:
    settings = read_settings(SETTINGS)
    modules = read_packages({package: ROOT / folder for package, folder in settings.packages.items()})
    pyprojects = [path for path in (ROOT / "pyproject.toml", ROOT / "ci" / "pyproject.toml") if path.exists()]
    found = faults(modules, settings, entry_points(modules, pyprojects))
    for fault in found:
        print(fault.removeprefix(f"{ROOT}/"))
    if found:
        print(
            f"{len(found)} found: wire each to an entry point, or delete it with its tests; what waits for its user is "
            "kept in checks/reachable.toml with a reason",
            file=sys.stderr,
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
