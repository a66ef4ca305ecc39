"""Calls of `pytest.main` whose result nobody judges: failures inside them are lost."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from miles_ci.run.judge.source_tests import dotted_names

_SHOWS = re.compile(r"(?:\w+\.)*(?:print|pprint|debug|info|warning|error|exception|log|write)")


def thrown_away(tree: ast.Module) -> Iterator[int]:
    """Lines of the calls of `pytest.main`, under any name, whose result is neither kept, nor kept and only printed."""
    spellings = _spellings_of_main(tree)
    unused = set(_shown_only(tree))
    judged = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node not in unused
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node in unused and spellings.intersection(dotted_names([node])):
            yield node.lineno
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            kept = len(names) < len(targets) or not judged.isdisjoint(names)
            if not kept and spellings.intersection(dotted_names([node.value])):
                yield node.lineno


def _spellings_of_main(tree: ast.Module) -> set[str]:
    """`pytest.main`, and what imports and plain assignments of this file call it."""
    found = {"pytest.main"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {f"{item.asname}.main" for item in node.names if item.name == "pytest" and item.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "pytest":
            found |= {item.asname or item.name for item in node.names if item.name == "main"}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and set(dotted_names([node.value])) & found
            and not isinstance(node.value, ast.Call)
        ):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def _shown_only(tree: ast.Module) -> Iterator[ast.AST]:
    """Expressions that stand alone, and everything inside one that only prints or logs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            yield node.value
            if isinstance(node.value, ast.Call) and any(map(_SHOWS.fullmatch, dotted_names([node.value]))):
                for argument in [*node.value.args, *(item.value for item in node.value.keywords)]:
                    yield from ast.walk(argument)
