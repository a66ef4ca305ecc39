"""The test functions that a source file defines, by class, whatever pytest makes of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Arms = tuple[tuple[int, int], ...]
"""The compound statements around a statement of a body, and which of their alternatives holds it."""

# `except*` is read from Python 3.11 on.
_TRY: tuple[Any, ...] = (ast.Try, getattr(ast, "TryStar", ast.Try))
_NO_TESTS = frozenset({"fixture", "property", "overload"})
_TEST_WORD = re.compile(r"^[tT]est|Tests?$|_tests?$")


@dataclass(frozen=True)
class Definition:
    """One test function. `arms` is empty where it is defined whenever the body runs."""

    function: Function
    arms: Arms = ()

    @property
    def line(self) -> int:
        return self.function.lineno


@dataclass
class Scope:
    """Test functions by name, for one class or for the module (empty name), with the classes it derives from.

    `usual`: pytest looks at a class of this name, or at any TestCase, without being configured.
    """

    name: str
    bases: tuple[str, ...] = ()
    tests: dict[str, Definition] = field(default_factory=dict)
    overwritten: list[tuple[str, int]] = field(default_factory=list)
    nested: bool = False
    usual: bool = True
    node: ast.ClassDef | None = None
    arms: Arms = ()


def scopes_of(tree: ast.Module) -> Iterator[Scope]:
    """The module's own scope, and one for each class that may hold tests or hand them on, wherever it stands."""
    return _Finder(_used_names(tree)).scopes(tree.body, nested=False)


def heirs_of(scopes: list[Scope]) -> dict[str, set[str]]:
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


def dotted_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """`a.b` of each node that is one, or a call or subscript of one."""
    for node in nodes:
        if isinstance(node, ast.Call):
            node = node.func
        if isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Name | ast.Attribute):
            yield ast.unparse(node)


def _used_names(tree: ast.Module) -> frozenset[str]:
    """Names that are read other than as a base class: a class among them serves the tests, and is none."""
    bases = {base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases}
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node not in bases:
            used.add(node.id)
        elif isinstance(node, ast.Attribute) and node not in bases:
            used.add(node.attr)
    return frozenset(used)


@dataclass(frozen=True)
class _Finder:
    used: frozenset[str]

    def scopes(self, body: list[ast.stmt], *, nested: bool) -> Iterator[Scope]:
        scope = Scope("", nested=nested)
        inner: list[Scope] = []
        classes: dict[str, Scope] = {}
        for statement, arms in _statements(body):
            if isinstance(statement, FUNCTION):
                if statement.name.startswith("test_"):
                    _add(scope, statement, arms)
                inner.extend(self._inside(statement))
            elif isinstance(statement, ast.ClassDef):
                found = list(self._of_class(statement, arms, "", nested))
                inner.extend(found)
                before = classes.get(statement.name)
                if before is not None and before.tests and before.node and not _exclude(before.arms, arms):
                    scope.overwritten.append((statement.name, before.node.lineno))
                classes[statement.name] = found[-1]
            elif isinstance(statement, ast.If) and _is_main_guard(statement):
                inner.extend(self.scopes(statement.body, nested=True))
        yield scope
        yield from inner

    def _inside(self, function: Function) -> Iterator[Scope]:
        """TestCases built inside a function: pytest cannot see them."""
        for node in ast.walk(function):
            if isinstance(node, ast.ClassDef) and _is_test_case(node):
                yield from self._of_class(node, (), "", True)

    def _of_class(self, node: ast.ClassDef, arms: Arms, prefix: str, nested: bool) -> Iterator[Scope]:
        """Of the classes inside it, then of the class itself."""
        name = prefix + node.name
        usual = node.name.startswith("Test") or _is_test_case(node)
        scope = Scope(name, tuple(dotted_names(node.bases)), nested=nested, usual=usual, node=node, arms=arms)
        if usual or _TEST_WORD.search(node.name) or node.name not in self.used:
            for statement, inner in _statements(node.body, arms):
                if isinstance(statement, FUNCTION):
                    if statement.name.startswith("test" if usual else "test_"):
                        _add(scope, statement, inner)
                elif isinstance(statement, ast.ClassDef):
                    yield from self._of_class(statement, inner, f"{name}::", nested)
        # Without tests of its own it is still a link between a base and its heirs.
        yield scope


def _statements(body: list[ast.stmt], arms: Arms = ()) -> Iterator[tuple[ast.stmt, Arms]]:
    """Statements that may run when the body does, those of every branch included; of a main guard only its `else`."""
    for statement in body:
        yield statement, arms
        for alternative, block in _blocks(statement):
            yield from _statements(block, (*arms, (id(statement), alternative)))


def _blocks(statement: ast.stmt) -> Iterator[tuple[int, list[ast.stmt]]]:
    """The bodies of a compound statement; of those with different numbers only one runs to its end."""
    if isinstance(statement, ast.If):
        if not _is_main_guard(statement):
            yield 0, statement.body
        yield 1, statement.orelse
    elif isinstance(statement, ast.With):
        yield 0, statement.body
    elif isinstance(statement, ast.For | ast.While):
        yield 0, statement.body
        yield 0, statement.orelse
    elif isinstance(statement, _TRY):
        yield 0, statement.body
        yield 0, statement.orelse
        yield from ((number, handler.body) for number, handler in enumerate(statement.handlers, 1))
        yield 0, statement.finalbody
    elif isinstance(statement, ast.Match):
        yield from ((number, case.body) for number, case in enumerate(statement.cases))


def _is_main_guard(statement: ast.If) -> bool:
    return "__name__" in {node.id for node in ast.walk(statement.test) if isinstance(node, ast.Name)}


def _is_test_case(node: ast.ClassDef) -> bool:
    return any("TestCase" in name for name in dotted_names(node.bases))


def _add(scope: Scope, function: Function, arms: Arms) -> None:
    if _NO_TESTS & {name.rpartition(".")[2] for name in dotted_names(function.decorator_list)}:
        return
    before = scope.tests.get(function.name)
    if before is not None and not _exclude(before.arms, arms):
        scope.overwritten.append((function.name, before.line))
    scope.tests[function.name] = Definition(function, arms)


def _exclude(one: Arms, other: Arms) -> bool:
    """Whether two places lie in different branches of one statement."""
    chosen = dict(one)
    return any(chosen.get(statement, alternative) != alternative for statement, alternative in other)
