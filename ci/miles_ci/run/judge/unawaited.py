"""Test methods that `unittest` calls and nobody executes: it throws the coroutine or generator they return away.

Only classes that surely end in `unittest.TestCase` are judged: other frameworks have a TestCase that awaits. Outside of
`unittest` pytest itself fails such functions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from miles_ci.run.judge.source_tests import FUNCTION, Definition, Scope, dotted_names

_PLAIN, _ISOLATED = "TestCase", "IsolatedAsyncioTestCase"
# Whoever defines one of these decides itself how a test method is called.
_OWN_WAYS = frozenset({"run", "__call__", "_callTestMethod", "__init_subclass__", "__getattribute__"})


class Unawaited:
    """Judges the collected methods of one file."""

    def __init__(self, tree: ast.Module, scopes: Iterable[Scope]) -> None:
        self._classes = {scope.name: scope for scope in scopes if scope.name}
        self._spellings = _spellings(tree)

    def reason(self, test: Definition, owners: Iterable[str]) -> str | None:
        """Why the body never runs in one of the classes that pytest collected it in, or None."""
        function = test.function
        generator = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(function))
        coroutine = isinstance(function, ast.AsyncFunctionDef)
        if not (generator or coroutine) or not all(map(_is_neutral, dotted_names(function.decorator_list))):
            return None
        kinds = {self._kind(owner) for owner in owners}
        if generator and kinds & {_PLAIN, _ISOLATED}:
            return "a generator: unittest never runs it; take the yield out"
        if coroutine and _PLAIN in kinds:
            return "a coroutine that unittest never awaits; derive its class from unittest.IsolatedAsyncioTestCase"
        return None

    def _kind(self, name: str) -> str | None:
        """`TestCase`, `IsolatedAsyncioTestCase`, or None for anything that is not surely one of them."""
        found: set[str] = set()
        waiting, seen = [name], set()
        while waiting:
            current = waiting.pop()
            if current in seen:
                continue
            seen.add(current)
            if current in self._spellings:
                found.add(self._spellings[current])
            elif current not in self._classes:
                if "TestCase" in current or "Async" in current:
                    return None
            else:
                scope = self._classes[current]
                if scope.node is None or _calls_its_own_way(scope.node):
                    return None
                waiting.extend(scope.bases)
        return _ISOLATED if _ISOLATED in found else _PLAIN if found else None


def _calls_its_own_way(node: ast.ClassDef) -> bool:
    names = {item.name for item in node.body if isinstance(item, FUNCTION)}
    return bool(node.decorator_list or node.keywords or names & _OWN_WAYS)


def _spellings(tree: ast.Module) -> dict[str, str]:
    """What imports and plain assignments of this file call unittest's classes."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                if item.name == "unittest":
                    found |= {f"{item.asname or item.name}.{kind}": kind for kind in (_PLAIN, _ISOLATED)}
        elif isinstance(node, ast.ImportFrom) and node.module == "unittest":
            found |= {item.asname or item.name: item.name for item in node.names if item.name in (_PLAIN, _ISOLATED)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
            kind = found.get(ast.unparse(node.value))
            if kind is not None:
                found |= {target.id: kind for target in node.targets if isinstance(target, ast.Name)}
    return found


def _is_neutral(decorator: str) -> bool:
    """Leaves a coroutine function one, and does not skip it; of any other decorator nothing is known."""
    last = decorator.rpartition(".")[2]
    if decorator.startswith("pytest.mark."):
        return "skip" not in last
    return "patch" in decorator.split(".") or last == "expectedFailure"


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function without those of functions inside it."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from _own_nodes(node)
