"""What a package lets others use stands in its `__all__`, and others use nothing else.

A name of `__all__` is a module of the package or something its `__init__` offers. Modules are named instead of what
they hold, so that importing one room costs nothing of the others.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from import_graph import FOLDERS, ROOT, imports_of, modules_of

# Packages whose rooms all have an `__all__`.
STATED = ("miles", "miles_ci")
USERS = ("tests", "benchmarks", "docs", "miles", "ci")
IMPORT = re.compile(r"from ([\w.]+) import (?:\(([^)]*)\)|([\w, ]+))")


def packages(package: str) -> dict[str, Path]:
    """Every package below (not the distribution's root, which nobody is outside of)."""
    found = modules_of(package)
    return {name: path for name, path in found.items() if path.name == "__init__.py" and name != package}


def stated(path: Path) -> list[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def used_from_outside(package: str) -> dict[str, dict[str, set[str]]]:
    """Package -> name right below it -> the modules of the product, outside of that package, that import it."""
    rooms = packages(package)
    found: dict[str, dict[str, set[str]]] = {room: {} for room in rooms}
    for module, path in modules_of(package).items():
        for source, name in imports_of(path, module, lazy=True):
            words = [*source.split("."), *([name] if name else [])]
            for depth in range(2, len(words)):
                room = ".".join(words[:depth])
                if room in rooms and module != room and not module.startswith(f"{room}."):
                    found[room].setdefault(words[depth], set()).add(module)
    return found


def imported_anywhere(package: str) -> set[str]:
    """Dotted names that product, tests, benchmarks and documents import, also in source text that a test writes."""
    found = set()
    for folder in USERS:
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]:
            text = path.read_text(encoding="utf-8")
            for source, bracketed, plain in IMPORT.findall(text) if package in text else ():
                found |= {f"{source}.{name}" for name in re.findall(r"\w+", bracketed or plain)}
    return found


@pytest.mark.parametrize("package", STATED)
def test_outsiders_use_only_what_a_package_states(package: str) -> None:
    rooms = packages(package)
    hidden = {
        f"{room}.{name}": sorted(users)
        for room, names in used_from_outside(package).items()
        for name, users in names.items()
        if name not in stated(rooms[room])
    }
    assert hidden == {}, "state these in __all__ of their package, or use something that is stated"


@pytest.mark.parametrize("package", STATED)
def test_every_stated_name_exists_and_is_used_from_outside(package: str) -> None:
    rooms, modules, used = packages(package), modules_of(package), used_from_outside(package)
    anywhere = imported_anywhere(package)
    idle = []
    for room, path in rooms.items():
        for name in stated(path):
            full = f"{room}.{name}"
            is_module = full in modules
            offered = f" {name}" in path.read_text(encoding="utf-8")
            if not (name in used[room] if is_module else offered and full in anywhere):
                idle.append(full)
    assert idle == [], "nobody outside uses these: take them out of __all__"


@pytest.mark.parametrize("package", STATED)
def test_nobody_imports_a_private_name(package: str) -> None:
    private = [
        f"{module}: {source}.{name}"
        for module, path in modules_of(package).items()
        for source, name in imports_of(path, module, lazy=True)
        if source.split(".")[0] == package
        and any(word.startswith("_") and not word.startswith("__") for word in (*source.split("."), name))
    ]
    assert private == []


def test_the_rule_sees_a_name_that_is_not_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"room/__init__.py": "__all__ = ['open']\n", "room/open.py": "", "room/shut.py": "",
                       "user.py": "from shop.room.shut import x\n", "room/own.py": "from shop.room import shut\n"}.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setitem(FOLDERS, "shop", tmp_path)
    assert used_from_outside("shop") == {"shop.room": {"shut": {"shop.user"}}}
    assert stated(tmp_path / "room/__init__.py") == ["open"]
