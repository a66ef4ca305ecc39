"""Tests that look alive in the source and never run: found by comparing the source with what pytest collected.

Of single items (a parameter, a method) the runner knows by itself: `left_out` tells which of those that pytest made were
taken away again, by an option or a conftest. Of the rest there are four kinds: a test function that pytest did not collect (a TestCase under a custom main, a class with `__init__` or of
a name that pytest does not look at, a branch that did not run, a name defined twice), one that is collected and never
executed (a coroutine in a plain TestCase), a `pytest.main` whose result is thrown away, and a file in which nothing is
ever checked. Leaves out: tests that are collected and skipped (see `outcome`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass

from miles_ci.plan.model import Unit
from miles_ci.run.judge.pytest_events import FileEvidence
from miles_ci.run.judge.source_tests import Definition, Scope, dotted_names, heirs_of, scopes_of
from miles_ci.run.judge.thrown_away import thrown_away
from miles_ci.run.judge.unawaited import Unawaited

_CHECKING_NAME = re.compile(
    r"assert|raises|warns|fail|expect|check|verify|validate|compare|match|approx|doctest|given|xfail|abort",
    re.IGNORECASE,
)
_THROWN_AWAY = "its result is thrown away, so failures inside it are lost; use sys.exit(pytest.main(...))"


@dataclass(frozen=True)
class NeverExecuted:
    """`what` names the test or call; `reason` is one sentence."""

    what: str
    line: int
    reason: str

    def text(self) -> str:
        return f"line {self.line}: {self.what}: {self.reason}"


def find(source: str, collected: Iterable[str]) -> list[NeverExecuted]:
    """Tests never executed of one file. `collected`: node ids of this file, those of other parts of a split included."""
    tree = ast.parse(source)
    scopes = list(scopes_of(tree))
    alive = {_qualified(node) for node in collected}
    heirs, unawaited = heirs_of(scopes), Unawaited(tree, scopes)
    found = [NeverExecuted("pytest.main", line, _THROWN_AWAY) for line in thrown_away(tree)]
    for scope in scopes:
        owners = sorted({scope.name, *heirs.get(scope.name, ())})
        for name, test in scope.tests.items():
            where = f"{scope.name}::{name}" if scope.name else name
            living = [owner for owner in owners if (f"{owner}::{name}" if owner else name) in alive]
            reason = unawaited.reason(test, living) if living else _why_dead(scope, test)
            if reason is not None:
                found.append(NeverExecuted(where, test.line, reason))
        found.extend(
            NeverExecuted(name, line, "defined again below with the same name; only the last definition runs")
            for name, line in scope.overwritten
        )
    if alive and not any(_checks(node) for node in ast.walk(tree)):
        found.append(
            NeverExecuted("the file", 1, "holds no assert, no raise and no checking call: its tests cannot fail")
        )
    return sorted(found, key=lambda found: found.line)


def left_out(unit: Unit, evidence: FileEvidence) -> tuple[dict[str, str], dict[str, str]]:
    """(item -> by whom it was left out, item -> the reason for which its declaration allows that), of this unit only:
    items that other parts of a split run, or that nobody asked for, are not missing."""
    missing: dict[str, str] = {}
    allowed: dict[str, str] = {}
    for node, who in evidence.left_out.items():
        if node in unit.deselect or node in evidence.items:
            continue
        if unit.nodes and not any(covers(asked, node) for asked in unit.nodes):
            continue
        inside = node.partition("::")[2]
        reason = next((why for name, why in unit.allow_never_executed if covers(name, inside)), None)
        if reason is None:
            missing[node] = who
        else:
            allowed[node] = f"{who}; {reason}"
    return missing, allowed


def covers(name: str, node: str) -> bool:
    """`test_a` covers `test_a[1]`, `TestA` covers `TestA::test_b`; nothing covers a mere longer name."""
    return node == name or node.startswith((f"{name}[", f"{name}::"))


def _why_dead(scope: Scope, test: Definition) -> str:
    if scope.nested:
        return "defined inside a function or a block that pytest never runs"
    if test.arms:
        return "not collected by pytest: its branch did not run; write it outside, with pytest.mark.skipif and a reason"
    if not scope.usual:
        return (
            "not collected by pytest, which looks at classes named Test* (python_classes): rename the class, or move "
            "a base that other files inherit to helpers/"
        )
    return "not collected by pytest"


def _qualified(node: str) -> str:
    """`a/test_x.py::TestA::test_b[1]` -> `TestA::test_b`"""
    path_end = node.find("::")
    return node[path_end + 2 :].partition("[")[0] if path_end >= 0 else ""


def _checks(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert | ast.Raise):
        return True
    if isinstance(node, ast.keyword):
        return node.arg == "check" or bool(node.arg and _CHECKING_NAME.search(node.arg))
    if isinstance(node, ast.Call):
        return any(_CHECKING_NAME.search(name) for name in dotted_names([node]))
    return False
