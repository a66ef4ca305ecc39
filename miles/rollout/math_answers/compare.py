"""The verdict on two answers: structure first, then each pair of values by the cheapest way that is conclusive."""

from __future__ import annotations

from miles.rollout.math_answers import exact, numeric, symbolic
from miles.rollout.math_answers.boxed import TOLERANCE, close, plain, quick_verdict
from miles.rollout.math_answers.grammar import parse
from miles.rollout.math_answers.tree import (
    MINUS_ONE,
    SCALARS,
    Constant,
    Group,
    Node,
    Number,
    Product,
    Quantity,
    Relation,
    Sum,
    Unreadable,
    Variable,
    Words,
    negative,
    renamed,
    variables,
    walk,
)


def equal(found: str, wanted: str) -> bool:
    """Whether two answers say the same. What the grammar does not read is compared as text."""
    quick = quick_verdict(found, wanted)
    if quick is not None:
        return quick
    try:
        a, b = parse(found), parse(wanted)
    except Unreadable:
        return _text(found) == _text(wanted) != ""
    if isinstance(a, Words) or isinstance(b, Words):
        return _text(found) == _text(wanted) != ""
    try:
        return same(a, b)
    except Unreadable:
        return False


def _text(answer: str) -> str:
    """The bare words: style commands, brackets around a choice letter and white space go."""
    text = plain(answer)
    for command in ("text", "mathrm", "mbox", "textbf", "mathbf", "textrm", "textit"):
        text = text.replace(f"\\{command}{{", "{")
    text = text.replace("{", "").replace("}", "")
    return text[1:-1] if text[:1] == "(" and text[-1:] == ")" else text


def same(a: Node, b: Node) -> bool:
    """Equality of trees."""
    if isinstance(a, Quantity) or isinstance(b, Quantity):
        units = {node.unit for node in (a, b) if isinstance(node, Quantity)}
        # An answer without a unit leaves it to the question.
        return len(units) == 1 and same(_bare(a), _bare(b))
    if isinstance(a, Relation) != isinstance(b, Relation):
        # "x = 5" for "5".
        relation, other = (a, b) if isinstance(a, Relation) else (b, a)
        assert isinstance(relation, Relation)
        return relation.operator == "=" and isinstance(relation.left, Variable) and same(relation.right, other)
    if isinstance(a, Relation) and isinstance(b, Relation):
        return _same_relation(a, b)
    if isinstance(a, Group) or isinstance(b, Group):
        return isinstance(a, Group) and isinstance(b, Group) and _same_group(a, b)
    return _same_value(a, b)


def _bare(node: Node) -> Node:
    return node.value if isinstance(node, Quantity) else node


def _same_group(a: Group, b: Group) -> bool:
    if a.unordered and b.unordered and (a.opening == "U") == (b.opening == "U"):
        return _same_set(a.items, b.items)
    if (a.opening, a.closing, len(a.items)) != (b.opening, b.closing, len(b.items)):
        return False
    return all(same(x, y) for x, y in zip(a.items, b.items, strict=True))


def _same_set(a: tuple[Node, ...], b: tuple[Node, ...]) -> bool:
    """Each has a partner: repeated elements count once, as in a set."""
    left = [value for node in a for value in _flat(node)]
    right = [value for node in b for value in _flat(node)]
    return all(any(same(x, y) for y in right) for x in left) and all(any(same(x, y) for x in left) for y in right)


def _flat(node: Node) -> list[Node]:
    """x = 1 and x = 2 as elements are 1 and 2; both values of ± are two elements."""
    if isinstance(node, Relation) and node.operator == "=" and isinstance(node.left, Variable):
        return _flat(node.right)
    if isinstance(node, Group) and node.opening == "±":
        return [value for item in node.items for value in _flat(item)]
    return [node]


def _same_relation(a: Relation, b: Relation) -> bool:
    if a.operator != b.operator:
        return False
    if same(a.left, b.left) and same(a.right, b.right):
        return True
    sides = (a.left, a.right, b.left, b.right)
    if a.operator not in ("=", "!=") or not all(isinstance(side, SCALARS) for side in sides):
        return False
    if same(a.left, b.right) and same(a.right, b.left):
        return True
    # One equation is a multiple of the other when f(x) g(y) = f(y) g(x) for all x and y.
    f, g = (Sum((side.left, negative(side.right))) for side in (a, b))
    zero = Number(MINUS_ONE.value * 0)
    if not variables(f) or not variables(g) or same(f, zero) or same(g, zero):
        return False
    return same(Product((f, renamed(g, "'"))), Product((renamed(f, "'"), g)))


def _same_value(a: Node, b: Node) -> bool:
    if a == b:
        return True
    infinite = [any(part == Constant("oo") for part in walk(node)) for node in (a, b)]
    if any(infinite):
        return all(infinite) and symbolic.equal(a, b)
    decimal = _is_decimal(a) or _is_decimal(b)
    try:
        return close(exact.rational(a), exact.rational(b), decimal=decimal)
    except exact.Inexact:
        pass
    try:
        if decimal and not (variables(a) | variables(b)):
            return numeric.near(a, b, float(TOLERANCE))
        try:
            return exact.identical(a, b)
        except exact.Inexact:
            return numeric.identical(a, b)
    except numeric.Inconclusive:
        return symbolic.equal(a, b)


def _is_decimal(node: Node) -> bool:
    """A decimal, with its sign: what a rounded value looks like."""
    if isinstance(node, Product) and len(node.factors) == 2 and node.factors[0] == MINUS_ONE:
        node = node.factors[1]
    return isinstance(node, Number) and node.decimal
