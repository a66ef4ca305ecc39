"""The static import graph of a repository's Python files and reverse reachability in it.

A module depends on what it imports, on the `__init__` of every package on the way, and, for tests, on
each `conftest.py` above it. Names are resolved from the repository root, from the file's own folder, and from source
roots: the folder above a top-most package (`src/`, `python/`), and any top-level folder that is no package itself.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping

from miles_ci.select.imports import FileImports, find_imports

_CACHES = frozenset({"__pycache__", "node_modules"})
# Outputs of runs and builds, at the top level only.
_OUTPUTS = frozenset({"build", "dist", "runs", "results"})


def python_files(root: str) -> list[str]:
    """Python files below `root`, relative, sorted; hidden folders, environments, caches and outputs are left out."""
    found: list[str] = []
    stack = [""]
    while stack:
        folder = stack.pop()
        try:
            entries = list(os.scandir(os.path.join(root, folder)))
        except OSError:
            continue
        if folder and any(entry.name == "pyvenv.cfg" for entry in entries):
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                output = entry.name.startswith(".") or entry.name.endswith(".egg-info") or path in _OUTPUTS
                if not output and entry.name not in _CACHES:
                    stack.append(path)
            elif entry.name.endswith(".py") and entry.is_file(follow_symlinks=False):
                found.append(path)
    return sorted(found)


def read_imports(root: str, paths: Iterable[str]) -> dict[str, FileImports]:
    """Imports of each file; an unreadable file raises `OSError` (the caller then selects everything)."""
    result: dict[str, FileImports] = {}
    for path in paths:
        with open(os.path.join(root, path), "rb") as stream:
            result[path] = find_imports(path, stream.read())
    return result


class Graph:
    """Which files depend on a file, over one or several states of the tree.

    `states` are maps from path to imports (head, and the changed files as they were at the merge base):
    the graph is their union, so that deleted and renamed modules still have their dependents.
    """

    def __init__(self, *states: Mapping[str, FileImports]) -> None:
        self.files: frozenset[str] = frozenset(path for state in states for path in state)
        self._by_module: dict[str, list[str]] = {}
        for path in sorted(self.files):
            for module in self._names_of(path):
                self._by_module.setdefault(module, []).append(path)
        self._importers: dict[str, set[str]] = {}
        for state in states:
            for path, imports in state.items():
                self._add(path, imports)

    def _names_of(self, path: str) -> set[str]:
        """Every dotted name under which a file may be imported."""
        parts = path[:-3].split("/")
        top = len(parts) - 1
        while top > 0 and "/".join([*parts[:top], "__init__.py"]) in self.files:
            top -= 1
        starts = {0, top} if top < len(parts) - 1 else {0}
        if f"{parts[0]}/__init__.py" not in self.files:
            starts.add(1)
        if parts[-1] == "__init__":
            parts.pop()
        return {".".join(parts[start:]) for start in starts if start < len(parts)}

    def _add(self, path: str, imports: FileImports) -> None:
        folder = path.rpartition("/")[0]
        here = folder.replace("/", ".")
        targets: set[str] = set()
        for name in imports.modules:
            self._resolve(name, targets)
            if here:
                self._resolve(f"{here}.{name}", targets, own=here)
        for script in imports.scripts:
            for candidate in (script.removeprefix("./"), f"{folder}/{script}"):
                if candidate in self.files:
                    targets.add(candidate)
        while folder:
            for special in ("conftest.py", "__init__.py"):
                if f"{folder}/{special}" in self.files:
                    targets.add(f"{folder}/{special}")
            folder = folder.rpartition("/")[0]
        if "conftest.py" in self.files and (path.startswith("tests/") or path.rpartition("/")[2].startswith("test_")):
            targets.add("conftest.py")
        targets.discard(path)
        for target in targets:
            self._importers.setdefault(target, set()).add(path)

    def _resolve(self, name: str, targets: set[str], own: str = "") -> None:
        """Add the file of the longest known prefix and of every package above it."""
        while name and name != own:
            found = self._by_module.get(name)
            if found is not None:
                targets.update(found)
            name = name.rpartition(".")[0]

    def reached_from(self, changed: Iterable[str]) -> dict[str, str]:
        """Every file that depends on a changed one (itself included) -> the file through which it does."""
        via: dict[str, str] = {}
        queue: deque[str] = deque()
        for path in sorted(set(changed)):
            if path in self.files and path not in via:
                via[path] = path
                queue.append(path)
        while queue:
            current = queue.popleft()
            for importer in sorted(self._importers.get(current, ())):
                if importer not in via:
                    via[importer] = current
                    queue.append(importer)
        return via
