"""What a worker process of reward kind `task` runs for reasoning-gym data sets: their own scorers, without `eval`.

Some of those scorers give the answer's text to `eval` or to SymPy's `parse_expr`, which is `eval` too. In this
process both names mean readers of literals and of mathematics.
"""

from __future__ import annotations

import ast
import builtins
import operator
import sys
from collections.abc import Callable
from typing import Any

from miles.rollout.math_answers.grammar import parse
from miles.rollout.math_answers.symbolic import build
from miles.rollout.math_answers.tree import MAX_TEXT, SCALARS, Unreadable

_MAX_BITS = 4096
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.invert}


def make(dataset: str, params: dict[str, Any]) -> Callable[[str, str, dict[str, Any]], float]:
    """(completion, answer, metadata with the data set's entry) -> its score."""
    import reasoning_gym

    made: Any = reasoning_gym.create_dataset(dataset, seed=0, size=1, **params)
    replace_evaluation(made)

    def judge(completion: str, answer: str, metadata: dict[str, Any]) -> float:
        del answer
        return float(made.score_answer(answer=completion, entry=metadata["entry"]))

    return judge


def replace_evaluation(dataset: Any) -> None:
    """`eval`, `exec` and `parse_expr` in the modules of a data set's scorer, and SymPy's text reader everywhere."""
    import sympy
    import sympy.parsing.sympy_parser
    import sympy.physics.units  # reads its own names as text when it is imported

    for base in type(dataset).__mro__:
        module = sys.modules[base.__module__]
        if module is not builtins and module.__name__.startswith("reasoning_gym"):
            module.__dict__.update(eval=literal, exec=_refused)
            if "parse_expr" in module.__dict__ and module.__dict__["parse_expr"] is sympy.parse_expr:
                module.__dict__["parse_expr"] = expression
    sympy.parse_expr = sympy.parsing.sympy_parser.parse_expr = expression
    sympy.parsing.sympy_parser.eval_expr = _refused


def _refused(*_: Any, **__: Any) -> Any:
    raise ValueError("text is not executed")


def expression(text: str, local_dict: dict[str, Any] | None = None, **_: Any) -> Any:
    """In place of SymPy's `parse_expr`: a SymPy object by our own grammar."""
    tree = parse(text)
    if not isinstance(tree, SCALARS):
        raise Unreadable("no expression")
    built = build(tree)
    symbols = {symbol: (local_dict or {}).get(symbol.name, symbol) for symbol in built.free_symbols}
    return built.subs(symbols, simultaneous=True) if symbols else built


def literal(text: str, *_: Any) -> Any:
    """In place of `eval`: numbers, text, lists and their like, and bounded arithmetic on numbers."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"{len(text)} characters, at most {MAX_TEXT}")
    return _value(ast.parse(text.strip(), mode="eval").body)


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.List(items):
            return [_value(item) for item in items]
        case ast.Tuple(items):
            return tuple(_value(item) for item in items)
        case ast.Set(items):
            return {_value(item) for item in items}
        case ast.Dict(keys, values) if None not in keys:
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.UnaryOp(op, operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_number(operand))
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            a, b = _number(left), _number(right)
            if isinstance(op, ast.LShift | ast.RShift) and not 0 <= b <= _MAX_BITS:
                raise ValueError("a shift too far")
            return _bounded(_BINARY[type(op)](a, b))
        case _:
            raise ValueError(f"{type(node).__name__} is no literal")


def _number(node: ast.AST) -> Any:
    value = _value(node)
    if not isinstance(value, int | float):
        raise ValueError("arithmetic on what is no number")
    return value


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError("a number too large")
    return value
