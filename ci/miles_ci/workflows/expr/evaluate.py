"""Evaluation: a tree becomes a closure over `Env` (contexts and status functions)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_ci.workflows.expr.syntax import (
    Call,
    Compare,
    Context,
    ExpressionError,
    Index,
    Literal,
    Logical,
    Node,
    Not,
    parse,
)
from miles_ci.workflows.expr.values import (
    Filtered,
    dump_json,
    equals,
    fold,
    greater,
    is_primitive,
    is_truthy,
    normalise,
    parse_json,
    to_number,
    to_text,
)

Evaluated = Callable[["Env"], Any]
_FIELD = re.compile(r"\{\{|\}\}|\{(\d+)[^}]*\}|[{}]")
_TEMPLATE = re.compile(r"\$\{\{((?:[^'}]|'(?:[^']|'')*'|\}(?!\}))*)\}\}")


@dataclass(frozen=True)
class Env:
    """Contexts by lower-case name (values already normalised) and functions by lower-case name."""

    contexts: Mapping[str, Any] = field(default_factory=dict)
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


def compile_tree(node: Node) -> Evaluated:
    if isinstance(node, Literal):
        value = node.value
        return lambda env: value
    if isinstance(node, Context):
        name = node.name.lower()
        return lambda env: env.contexts.get(name)
    if isinstance(node, Not):
        operand = compile_tree(node.operand)
        return lambda env: not is_truthy(operand(env))
    if isinstance(node, Logical):
        return _logical(node)
    if isinstance(node, Compare):
        return _compare(node)
    if isinstance(node, Index):
        target = compile_tree(node.target)
        if node.key is None:
            return lambda env: _star(target(env))
        key = compile_tree(node.key)
        return lambda env: _item(target(env), key(env))
    return _call(node)


def _logical(node: Logical) -> Evaluated:
    args = [compile_tree(arg) for arg in node.args]
    stop_on = node.operator == "||"

    def run(env: Env) -> Any:
        value: Any = None
        for arg in args:
            value = arg(env)
            if is_truthy(value) == stop_on:
                break
        return value

    return run


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": equals,
    "!=": lambda a, b: not equals(a, b),
    ">": greater,
    "<": lambda a, b: greater(b, a),
    ">=": lambda a, b: equals(a, b) or greater(a, b),
    "<=": lambda a, b: equals(a, b) or greater(b, a),
}


def _compare(node: Compare) -> Evaluated:
    left, right, test = compile_tree(node.left), compile_tree(node.right), _COMPARE[node.operator]
    return lambda env: test(left(env), right(env))


def _call(node: Call) -> Evaluated:
    args, name = [compile_tree(arg) for arg in node.args], node.name

    def run(env: Env) -> Any:
        function = env.functions.get(name) or _BUILT_IN.get(name)
        if function is None:
            raise ExpressionError(f"function {name} has no meaning here")
        return function(*[arg(env) for arg in args])

    return run


def _lookup(mapping: dict[str, Any], key: str) -> tuple[bool, Any]:
    if key in mapping:
        return True, mapping[key]
    lowered = key.lower()
    for name, value in mapping.items():
        if name.lower() == lowered:
            return True, value
    return False, None


def _position(key: Any) -> int | None:
    number = to_number(key)
    return None if not math.isfinite(number) or number < 0 else math.floor(number)


def _item(target: Any, key: Any) -> Any:
    if isinstance(target, Filtered):
        out = Filtered()
        for item in target:
            if isinstance(item, dict) and is_primitive(key):
                found, value = _lookup(item, to_text(key))
                if found:
                    out.append(value)
            elif isinstance(item, list):
                at = _position(key)
                if at is not None and at < len(item):
                    out.append(item[at])
        return out
    if isinstance(target, list):
        at = _position(key)
        return target[at] if at is not None and at < len(target) else None
    if isinstance(target, dict) and is_primitive(key):
        return _lookup(target, to_text(key))[1]
    return None


def _star(target: Any) -> Filtered:
    if isinstance(target, Filtered):
        out = Filtered()
        for item in target:
            out.extend(item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
        return out
    if isinstance(target, dict):
        return Filtered(target.values())
    return Filtered(target if isinstance(target, list) else ())


def _contains(search: Any, item: Any) -> bool:
    if is_primitive(search):
        return is_primitive(item) and to_text(item).lower() in to_text(search).lower()
    return isinstance(search, list) and any(equals(item, member) for member in search)


def _affix(method: str) -> Callable[[Any, Any], bool]:
    def test(text: Any, part: Any) -> bool:
        if not (is_primitive(text) and is_primitive(part)):
            return False
        return bool(getattr(fold(to_text(text)), method)(fold(to_text(part))))

    return test


def _format(template: Any, *args: Any) -> str:
    def fill(found: re.Match[str]) -> str:
        if found[0] in ("{{", "}}"):
            return found[0][0]
        if found[1] is None:
            raise ExpressionError(f"invalid format string: {to_text(template)}")
        if int(found[1]) >= len(args):
            raise ExpressionError(f"format string names more arguments than were given: {to_text(template)}")
        return to_text(args[int(found[1])])

    return _FIELD.sub(fill, to_text(template))


def _join(values: Any, separator: Any = ",") -> str:
    if is_primitive(values):
        return to_text(values)
    if not isinstance(values, list):
        return ""
    return (to_text(separator) if is_primitive(separator) else ",").join(to_text(value) for value in values)


def _from_json(text: Any) -> Any:
    try:
        return parse_json(to_text(text))
    except ValueError as error:
        raise ExpressionError(f"fromJSON: {error}") from error


def _case(*args: Any) -> Any:
    for at in range(0, len(args) - 1, 2):
        if not isinstance(args[at], bool):
            raise ExpressionError("case: a predicate must be true or false")
        if args[at]:
            return args[at + 1]
    return args[-1]


_BUILT_IN: dict[str, Callable[..., Any]] = {
    "case": _case,
    "contains": _contains,
    "endswith": _affix("endswith"),
    "format": _format,
    "fromjson": _from_json,
    "join": _join,
    "startswith": _affix("startswith"),
    "tojson": dump_json,
}


def evaluate(
    source: str,
    contexts: Mapping[str, Any] | None = None,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    *,
    allowed: Collection[str] | None = None,
) -> Any:
    """Evaluate one expression against plain JSON-like contexts. Raises `ExpressionError`."""
    names = {name.lower(): normalise(value) for name, value in (contexts or {}).items()}
    calls = {name.lower(): function for name, function in (functions or {}).items()}
    tree = parse(source, contexts=names if allowed is None else allowed, functions=calls)
    return compile_tree(tree)(Env(names, calls))


def expressions_in(text: str) -> list[str]:
    """The expressions of a template string, without their `${{ }}`."""
    return [found[1].strip() for found in _TEMPLATE.finditer(text)]


def interpolate(text: Any, env: Env, *, contexts: Collection[str] | None = None) -> Any:
    """A template: a lone expression keeps its kind, mixed text becomes a string, other values stay."""
    if not isinstance(text, str):
        return text
    whole = _TEMPLATE.fullmatch(text.strip())
    if whole:
        return compile_tree(parse(whole[1].strip(), contexts=contexts, functions=env.functions))(env)

    def fill(found: re.Match[str]) -> str:
        return to_text(compile_tree(parse(found[1].strip(), contexts=contexts, functions=env.functions))(env))

    return _TEMPLATE.sub(fill, text)
