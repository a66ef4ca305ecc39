"""Evaluate an AST node that must be a literal, or say which construct it is instead."""

from __future__ import annotations

import ast
from typing import Any


class NotLiteral(Exception):
    """A node that is no literal. `construct` is a noun phrase: "an f-string", "the name 'X'"."""

    def __init__(self, construct: str, node: ast.AST) -> None:
        super().__init__(construct)
        self.construct = construct
        self.node = node


_CONSTRUCTS: dict[type[ast.AST], str] = {
    ast.JoinedStr: "an f-string",
    ast.Attribute: "an attribute",
    ast.Subscript: "a subscript",
    ast.Starred: "a starred expression",
    ast.ListComp: "a comprehension",
    ast.SetComp: "a comprehension",
    ast.DictComp: "a comprehension",
    ast.GeneratorExp: "a generator expression",
    ast.Lambda: "a lambda",
    ast.IfExp: "a conditional expression",
    ast.BoolOp: "a boolean expression",
    ast.Compare: "a comparison",
    ast.NamedExpr: "an assignment expression",
    ast.Await: "an await",
    ast.Set: "a set (order would be lost; use a list)",
}


def construct_of(node: ast.AST) -> str:
    """A noun phrase for an expression that is no literal."""
    if isinstance(node, ast.Name):
        return f"the name '{node.id}'"
    if isinstance(node, ast.Call):
        return f"a call of '{node.func.id}'" if isinstance(node.func, ast.Name) else "a call"
    if isinstance(node, ast.BinOp):
        text = any(
            isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in (node.left, node.right)
        )
        return "a concatenation" if text and isinstance(node.op, ast.Add) else "an arithmetic expression"
    return _CONSTRUCTS.get(type(node), f"a {type(node).__name__} expression")


def literal(node: ast.AST) -> Any:
    """The value of constants, signed numbers, and lists, tuples and dicts of literals."""
    if isinstance(node, ast.Constant):
        if node.value is Ellipsis or isinstance(node.value, bytes | complex):
            raise NotLiteral(f"the literal {node.value!r}"[:60], node)
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = literal(node.operand)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NotLiteral("a signed non-number", node)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.List):
        return [literal(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(literal(item) for item in node.elts)
    if isinstance(node, ast.Dict):
        result: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                raise NotLiteral("a ** unpacking", value)
            name = literal(key)
            if not isinstance(name, str):
                raise NotLiteral("a dict key that is no string", key)
            if name in result:
                raise NotLiteral(f"a dict with the key '{name}' twice", key)
            result[name] = literal(value)
        return result
    raise NotLiteral(construct_of(node), node)
