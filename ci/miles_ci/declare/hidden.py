"""Uses of a registration function other than calling it by its name: behind each one a call could hide.

Leaves out: names put together at run time, which no reader of the source can know.
"""

from __future__ import annotations

import ast

from miles_ci.declare.vocabulary import Vocabulary

_LOOKUPS = frozenset({"getattr", "attrgetter", "methodcaller", "__getattribute__", "get", "pop", "setdefault"})
_NAMESPACES = frozenset({"globals", "locals", "vars"})


def hidden_use(node: ast.AST, vocabulary: Vocabulary) -> tuple[str, str] | None:
    """(registration function, what is done with it), or None. The function of a call is the caller's to judge."""
    if isinstance(node, ast.Name) and vocabulary.claims(node.id):
        how = "read without being called" if isinstance(node.ctx, ast.Load) else "bound to something else"
        return node.id, how
    if isinstance(node, ast.Attribute) and vocabulary.claims(node.attr):
        how = "read as an attribute" if isinstance(node.ctx, ast.Load) else "replaced"
        return node.attr, how
    if isinstance(node, ast.Call) and _last_name(node.func) in _LOOKUPS:
        if _last_name(node.func) in ("get", "pop", "setdefault") and not _is_namespace(_owner(node.func)):
            return None
        return _named(node.args, vocabulary)
    if isinstance(node, ast.Subscript) and _is_namespace(node.value):
        return _named([node.slice], vocabulary)
    return None


def _named(nodes: list[ast.expr], vocabulary: Vocabulary) -> tuple[str, str] | None:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and vocabulary.claims(node.value):
            return node.value, "looked up by its name"
    return None


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _owner(node: ast.expr) -> ast.expr | None:
    return node.value if isinstance(node, ast.Attribute) else None


def _is_namespace(node: ast.expr | None) -> bool:
    """`globals()`, `vars(module)`, `module.__dict__`"""
    if isinstance(node, ast.Call):
        return _last_name(node.func) in _NAMESPACES
    return isinstance(node, ast.Attribute) and node.attr == "__dict__"
