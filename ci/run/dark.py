"""Tests that look alive in the source and never run: found by comparing the source with what pytest collected.

Three kinds: a test function that pytest did not collect (a TestCase under a custom main, a class with `__init__`, a
name defined twice), a `pytest.main` whose result is thrown away, and a file in which nothing is ever checked.
Leaves out: tests that are collected and skipped (see `outcome`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_CHECKING_NAME = re.compile(
    r"assert|raises|warns|fail|expect|check|verify|validate|compare|match|approx|doctest|given|xfail|abort",
    re.IGNORECASE,
)
_SHOWS = re.compile(r"(?:\w+\.)*(?:print|pprint|debug|info|warning|error|exception|log|write)")
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class DarkTest:
    """`what` names the test or call; `reason` is one sentence."""

    what: str
    line: int
    reason: str

    def text(self) -> str:
        return f"line {self.line}: {self.what}: {self.reason}"


@dataclass
class _Scope:
    """Test functions by name, for one class or for the module, with the classes it derives from."""

    name: str
    line: int
    bases: tuple[str, ...] = ()
    tests: dict[str, int] = field(default_factory=dict)
    overwritten: list[tuple[str, int]] = field(default_factory=list)
    nested: bool = False


def find(source: str, collected: Iterable[str]) -> list[DarkTest]:
    """Dark tests of one file. `collected`: node ids of this file, those of other parts of a split included."""
    tree = ast.parse(source)
    scopes = list(_scopes(tree.body, nested=False))
    alive = {_qualified(node) for node in collected}
    heirs = _heirs(scopes)
    found = []
    for scope in scopes:
        owners = {scope.name, *heirs.get(scope.name, ())}
        for name, line in scope.tests.items():
            if not any((f"{owner}::{name}" if owner else name) in alive for owner in owners):
                where = f"{scope.name}::{name}" if scope.name else name
                found.append(DarkTest(where, line, _why_dead(scope)))
        found.extend(
            DarkTest(name, line, "defined again below with the same name; only the last definition runs")
            for name, line in scope.overwritten
        )
    found.extend(_thrown_away(tree))
    if alive and not any(_checks(node) for node in ast.walk(tree)):
        found.append(DarkTest("the file", 1, "holds no assert, no raise and no checking call: its tests cannot fail"))
    return sorted(found, key=lambda dark: dark.line)


def _why_dead(scope: _Scope) -> str:
    if scope.nested:
        return "defined inside a function or a block that pytest never runs"
    return "not collected by pytest"


def _qualified(node: str) -> str:
    """`a/test_x.py::TestA::test_b[1]` -> `TestA::test_b`"""
    path_end = node.find("::")
    return node[path_end + 2 :].partition("[")[0] if path_end >= 0 else ""


def _scopes(body: list[ast.stmt], *, nested: bool) -> Iterator[_Scope]:
    """The module's own scope, and one for each test class, wherever it stands."""
    scope = _Scope("", 1, nested=nested)
    inner: list[_Scope] = []
    for statement in _statements(body):
        if isinstance(statement, _FUNCTION):
            if statement.name.startswith("test"):
                _add(scope, statement, top_level=True)
            inner.extend(_classes_inside(statement))
        elif isinstance(statement, ast.ClassDef):
            inner.extend(_class_scopes(statement, "", nested))
        elif _is_main_guard(statement):
            assert isinstance(statement, ast.If)
            inner.extend(_scopes(statement.body, nested=True))
    yield scope
    yield from inner


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import, those in if / try / with included; a main guard is left whole."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and not _is_main_guard(statement):
            # Either branch may run; in another environment the other one does.
            yield from _statements(statement.body)
        elif isinstance(statement, ast.With | ast.Try):
            yield from _statements(statement.body)


def _is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in {
        node.id for node in ast.walk(statement.test) if isinstance(node, ast.Name)
    }


def _classes_inside(function: ast.AST) -> Iterator[_Scope]:
    """TestCases built inside a function: pytest cannot see them."""
    for node in ast.walk(function):
        if isinstance(node, ast.ClassDef) and _is_test_case(node):
            yield from _class_scopes(node, "", True)


def _class_scopes(node: ast.ClassDef, prefix: str, nested: bool) -> Iterator[_Scope]:
    name = prefix + node.name
    scope = _Scope(name, node.lineno, tuple(_names(node.bases)), nested=nested)
    if not (node.name.startswith("Test") or _is_test_case(node) or prefix):
        # No test class itself, but a link between a base and its heirs.
        yield scope
        return
    for statement in node.body:
        if isinstance(statement, _FUNCTION) and statement.name.startswith("test"):
            _add(scope, statement, top_level=False)
        elif isinstance(statement, ast.ClassDef) and statement.name.startswith("Test"):
            yield from _class_scopes(statement, f"{name}::", nested)
    yield scope


def _is_test_case(node: ast.ClassDef) -> bool:
    return any("TestCase" in name for name in _names(node.bases))


def _add(scope: _Scope, function: ast.FunctionDef | ast.AsyncFunctionDef, *, top_level: bool) -> None:
    decorators = {name for decorator in function.decorator_list for name in _names([decorator])}
    if {"fixture", "property", "overload"} & {name.rpartition(".")[2] for name in decorators}:
        return
    if top_level and not function.name.startswith("test_"):
        return
    if function.name in scope.tests:
        scope.overwritten.append((function.name, scope.tests[function.name]))
    scope.tests[function.name] = function.lineno


def _heirs(scopes: list[_Scope]) -> dict[str, set[str]]:
    """Class -> the classes of this file that inherit its tests."""
    heirs: dict[str, set[str]] = {}
    for _ in scopes:
        before = sum(len(names) for names in heirs.values())
        for scope in scopes:
            for base in scope.bases:
                heirs.setdefault(base, set()).update({scope.name, *heirs.get(scope.name, ())})
        if sum(len(names) for names in heirs.values()) == before:
            break
    return heirs


def _names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Call):
            node = node.func
        if isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Name | ast.Attribute):
            yield ast.unparse(node)


def _thrown_away(tree: ast.Module) -> Iterator[DarkTest]:
    """Calls of `pytest.main`, under any name, whose result nobody judges: neither kept, nor kept and only printed."""
    reason = "its result is thrown away, so failures inside it are lost; use sys.exit(pytest.main(...))"
    spellings = _spellings_of_main(tree)
    unused = set(_shown_only(tree))
    judged = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node not in unused
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node in unused and spellings.intersection(_names([node])):
            yield DarkTest("pytest.main", node.lineno, reason)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            kept = len(names) < len(targets) or not judged.isdisjoint(names)
            if not kept and spellings.intersection(_names([node.value])):
                yield DarkTest("pytest.main", node.lineno, reason)


def _spellings_of_main(tree: ast.Module) -> set[str]:
    """`pytest.main`, and what imports and plain assignments of this file call it."""
    found = {"pytest.main"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {f"{item.asname}.main" for item in node.names if item.name == "pytest" and item.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "pytest":
            found |= {item.asname or item.name for item in node.names if item.name == "main"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and set(_names([node.value])) & found and not isinstance(node.value, ast.Call):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def _shown_only(tree: ast.Module) -> Iterator[ast.AST]:
    """Expressions that stand alone, and everything inside one that only prints or logs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            yield node.value
            if isinstance(node.value, ast.Call) and any(map(_SHOWS.fullmatch, _names([node.value]))):
                for argument in [*node.value.args, *(item.value for item in node.value.keywords)]:
                    yield from ast.walk(argument)


def _checks(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert | ast.Raise):
        return True
    if isinstance(node, ast.keyword):
        return node.arg == "check" or bool(node.arg and _CHECKING_NAME.search(node.arg))
    if isinstance(node, ast.Call):
        return any(_CHECKING_NAME.search(name) for name in _names([node]))
    return False
