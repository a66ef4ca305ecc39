"""Which tests a change can reach. Whatever is not understood selects everything, and says which path did.

A changed path is understood when an edge of the registry matches it, when it is a Python file of the graph
(at the merge base or now), or when it is inert. Edges apply in addition to the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles_ci.registry.model import SelectionRules
from miles_ci.select.diff import Change, DiffError, changes_since, contents_at, parse_name_status
from miles_ci.select.globs import matches
from miles_ci.select.graph import Graph, python_files, read_imports
from miles_ci.select.imports import find_imports

# A path below these is never inert, whatever the registry says: code and tests live there.
ALWAYS_CODE = ("tests", "ci")


@dataclass(frozen=True)
class Affected:
    """`everything` with its reason, or the affected test paths, each with the changed path that reaches it."""

    everything: bool
    reason: str
    tests: frozenset[str] = frozenset()
    via: dict[str, str] = field(default_factory=dict)


def everything(reason: str) -> Affected:
    return Affected(True, reason)


def affected(changed: Sequence[Change], graph: Graph, rules: SelectionRules, tests: Collection[str]) -> Affected:
    """The tests (among `tests`) that the changes can reach."""
    if not changed:
        return everything("the diff is empty")
    changed_paths = sorted({path for change in changed for path in change.paths})
    python_changed: list[str] = []
    via: dict[str, str] = {}
    for path in changed_paths:
        understood = False
        for edge in rules.edges:
            if not matches(path, edge.when):
                continue
            if edge.tests == "**":
                return everything(f"{path} matches selection.edges '{edge.when}'")
            understood = True
            for test in tests:
                if matches(test, edge.tests):
                    via.setdefault(test, path)
        if path in graph.files:
            understood = True
            python_changed.append(path)
        elif not understood:
            understood = not _is_code(path, graph, rules) and any(matches(path, glob) for glob in rules.inert)
        if not understood:
            return everything(f"{path} is neither code nor covered by selection.edges or selection.inert")
    reached = graph.reached_from(python_changed)
    for path in tests:
        if path in reached:
            via.setdefault(path, _origin(path, reached))
    return Affected(False, f"{len(changed_paths)} changed path(s)", frozenset(via), via)


def _is_code(path: str, graph: Graph, rules: SelectionRules) -> bool:
    """Below a folder of tests or code, or inside a Python package, where any file may be read by the code."""
    if any(path.startswith(f"{folder.rstrip('/')}/") for folder in (*ALWAYS_CODE, *rules.code)):
        return True
    folder = path.rpartition("/")[0]
    while folder:
        if f"{folder}/__init__.py" in graph.files:
            return True
        folder = folder.rpartition("/")[0]
    return False


def _origin(path: str, reached: dict[str, str]) -> str:
    while reached[path] != path:
        path = reached[path]
    return path


def affected_since(root: Path, base: str, rules: SelectionRules, tests: Collection[str]) -> Affected:
    """The affected set of the working tree against the merge base with `base`; never raises, fails open."""
    try:
        merge_base, changed = changes_since(root, base)
        return _affected_at(root, merge_base, changed, rules, tests)
    except (DiffError, OSError) as error:
        return everything(f"the diff cannot be read: {error}")


def affected_of_diff(
    root: Path, output: bytes, rules: SelectionRules, tests: Collection[str], *, merge_base: str | None = None
) -> Affected:
    """The same from the saved output of `git diff --name-status -z -M`.

    Without `merge_base` the old contents are unknown: a deleted or renamed Python file selects everything.
    """
    try:
        changed = parse_name_status(output)
        return _affected_at(root, merge_base, changed, rules, tests)
    except (DiffError, OSError) as error:
        return everything(f"the diff cannot be read: {error}")


def _affected_at(
    root: Path, merge_base: str | None, changed: list[Change], rules: SelectionRules, tests: Collection[str]
) -> Affected:
    head = read_imports(str(root), python_files(str(root)))
    names = sorted({path for change in changed for path in change.paths if path.endswith(".py")})
    if merge_base is None:
        return affected(changed, Graph(head), rules, tests)
    before = {path: find_imports(path, data) for path, data in contents_at(root, merge_base, names).items()}
    return affected(changed, Graph(head, before), rules, tests)
