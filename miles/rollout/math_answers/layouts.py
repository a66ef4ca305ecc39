"""Small rules of the grammar that look at finished parts: numbers, mixed numbers, brackets, relations, matrices."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from miles.rollout.math_answers.tree import (
    MAX_DIGITS,
    SCALARS,
    Call,
    Constant,
    Group,
    Node,
    Number,
    Power,
    Product,
    Quantity,
    Relation,
    Sum,
    Unreadable,
    Variable,
    negative,
    variables,
)

if TYPE_CHECKING:
    from miles.rollout.math_answers.grammar import Parser

_MATRICES = frozenset(("matrix", "pmatrix", "bmatrix", "Bmatrix", "vmatrix", "smallmatrix"))


def number(text: str) -> Number:
    """Digits, a decimal, or a decimal with an exponent of at most three digits."""
    return Number(Fraction(text), any(c in text for c in ".eE"))


def percent(node: Number) -> Number:
    return Number(node.value / 100, node.decimal)


def repeating(text: str, repeated: str) -> Number:
    """0.1 and 6 repeated: 1/6."""
    whole, point, start = text.partition(".")
    if not point or not repeated.isdigit() or not (whole + start).isdigit():
        raise Unreadable("repeated digits stand behind a point")
    shift = 10 ** len(start)
    return Number(Fraction(int(whole + start), shift) + Fraction(int(repeated), shift * (10 ** len(repeated) - 1)))


def in_base(text: str, base: str) -> Number:
    """1010_2, with digits of that base."""
    if not (text.isdigit() and base.isdigit() and len(base) <= 2 and 2 <= int(base) <= 36 and len(text) <= MAX_DIGITS):
        raise Unreadable(f"{text[:20]} with a subscript")
    try:
        return Number(Fraction(int(text, int(base))))
    except ValueError:
        raise Unreadable(f"{text[:20]} in base {base}") from None


def mixed(whole: Node, part: Node) -> Number | None:
    """3 and 1/2 side by side are 3 + 1/2; None where the parts are no whole number and proper fraction."""
    fraction = _proper(part)
    if isinstance(whole, Number) and whole.value.denominator == 1 and not whole.decimal and fraction is not None:
        return Number(whole.value + fraction)
    return None


def _proper(node: Node) -> Fraction | None:
    if isinstance(node, Product) and len(node.factors) == 2:
        top, below = node.factors
        if isinstance(top, Number) and isinstance(below, Power) and isinstance(below.base, Number):
            a, b = top.value, below.base.value
            if a.denominator == b.denominator == 1 and 0 < a < b:
                return a / b
    return None


def sum_of(terms: list[Node], both: Node | None) -> Node:
    """The sum; with ± the set of both values."""
    if both is not None:
        values = tuple(_sum([*terms, part]) for part in (both, negative(both)))
        return Group("±", "±", values)
    return _sum(terms)


def _sum(terms: list[Node]) -> Node:
    if len(terms) == 1:
        return terms[0]
    units = {t.unit for t in terms if isinstance(t, Quantity)}
    if len(units) == 1 and all(isinstance(t, Quantity) for t in terms):
        return Quantity(_sum([t.value for t in terms if isinstance(t, Quantity)]), units.pop())
    _require_scalars(terms)
    return Sum(tuple(terms))


def product_of(factors: list[Node]) -> Node:
    if len(factors) == 1:
        return factors[0]
    last = factors[-1]
    if isinstance(last, Quantity) and all(isinstance(f, SCALARS) for f in factors[:-1]):
        return Quantity(product_of([*factors[:-1], last.value]), last.unit)
    _require_scalars(factors)
    return Product(tuple(factors))


def _require_scalars(nodes: Sequence[Node]) -> None:
    for node in nodes:
        if not isinstance(node, SCALARS):
            raise Unreadable(f"arithmetic with a {type(node).__name__.lower()}")
        if isinstance(node, Power) and not isinstance(node.base, SCALARS):
            raise Unreadable(f"a power of a {type(node.base).__name__.lower()}")


def bracketed(opening: str, closing: str, items: list[Node]) -> Node:
    """One value in brackets is itself; several are a tuple, an interval, a list or a set."""
    if opening in ("lfloor", "lceil"):
        if len(items) != 1:
            raise Unreadable("rounding several values")
        return Call("floor" if opening == "lfloor" else "ceiling", (items[0],))
    if opening in ("{", r"\{"):
        # One value in plain braces is LaTeX's grouping; \{5\} is a set.
        return items[0] if len(items) == 1 and opening == "{" else Group("{", "}", tuple(items))
    if len(items) == 1 and (opening, closing) in (("(", ")"), ("[", "]")):
        return items[0]
    if len(items) != 2 and (opening, closing) not in (("(", ")"), ("[", "]")):
        raise Unreadable("an interval has two ends")
    return Group(opening, closing, tuple(items))


_OPEN = {"<": "(", "<=": "["}
_CLOSE = {"<": ")", "<=": "]"}
_FLIPPED = {">": "<", ">=": "<=", "<": ">", "<=": ">="}


def relation(parts: list[Node], operators: list[str]) -> Node:
    """An equation, or an inequality of one variable as an interval."""
    if not operators:
        return parts[0]
    if operators == ["in"]:
        return parts[1]
    if len(operators) == 1:
        operator, (left, right) = operators[0], parts
        if operator not in _FLIPPED:
            return Relation(operator, left, right)
        if isinstance(right, Variable) and not isinstance(left, Variable):
            left, right, operator = right, left, _FLIPPED[operator]
        if not isinstance(left, Variable) or not isinstance(right, SCALARS) or variables(right):
            if operator.startswith(">"):
                left, right, operator = right, left, _FLIPPED[operator]
            return Relation(operator, left, right)
        if operator.startswith(">"):
            return Group(_OPEN[_FLIPPED[operator]], ")", (right, Constant("oo")))
        return Group("(", _CLOSE[operator], (negative(Constant("oo")), right))
    if set(operators) == {"="}:
        # x = 1 + 1 = 2: the last value is the answer.
        return Relation("=", parts[0], parts[-1])
    if len(operators) == 2 and isinstance(parts[1], Variable):
        if all(o.startswith(">") for o in operators):
            parts, operators = parts[::-1], [_FLIPPED[o] for o in operators[::-1]]
        if all(o in _OPEN for o in operators):
            return Group(_OPEN[operators[0]], _CLOSE[operators[1]], (parts[0], parts[2]))
    raise Unreadable("a chain of relations")


def matrix(parser: Parser, edge: str) -> Group:
    r"""\begin{pmatrix} a & b \\ c & d \end{pmatrix}"""
    kind = edge.partition(" ")[2]
    if not edge.startswith("begin") or kind not in _MATRICES:
        raise Unreadable(edge)
    rows: list[Node] = []
    with parser.deeper():
        row = [parser.sum()]
        while parser.now != ("edge", f"end {kind}"):
            if parser.now.text == "&":
                parser.next()
            elif parser.now == ("command", "\\"):
                parser.next()
                rows.append(Group("matrix", "matrix", tuple(row)))
                row = []
                if parser.now == ("edge", f"end {kind}"):
                    break
            else:
                raise Unreadable(f"{parser.now.text!r} in a matrix")
            row.append(parser.sum())
        parser.next()
    if row:
        rows.append(Group("matrix", "matrix", tuple(row)))
    return Group("matrix", "matrix", tuple(rows))
