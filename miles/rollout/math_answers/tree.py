"""What the grammar builds: a small tree of bounded depth and size, and the bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

MAX_TEXT = 4000
MAX_TOKENS = 800
MAX_DIGITS = 1000
MAX_DEPTH = 40
# Powers and factorials are computed exactly only below these.
MAX_BITS = 20_000
MAX_FACTORIAL = 1000


class Unreadable(ValueError):
    """The text is outside the grammar, or beyond one of its bounds."""


@dataclass(frozen=True, slots=True)
class Number:
    """`decimal`: written with a point or an exponent, so a rounded value may be meant."""

    value: Fraction
    decimal: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """pi, e, i or oo (infinity)."""

    name: str


@dataclass(frozen=True, slots=True)
class Variable:
    name: str


@dataclass(frozen=True, slots=True)
class Sum:
    terms: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Product:
    factors: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Power:
    base: Node
    exponent: Node


@dataclass(frozen=True, slots=True)
class Call:
    """A named function of `functions.FUNCTIONS`."""

    name: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Several values: `(` `)` a tuple or open interval, `[` `]` a list or closed one, `{` `}` or bare a set.

    `U`: a union, `matrix`: a row or the rows of one, `±`: both values.
    """

    opening: str
    closing: str
    items: tuple[Node, ...]

    @property
    def unordered(self) -> bool:
        return self.opening in "{U±"


@dataclass(frozen=True, slots=True)
class Relation:
    """left operator right; `=`, `!=`, or one that could not be written as an interval."""

    operator: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value and what is written behind it: cm, degree, dollar."""

    value: Node
    unit: str


@dataclass(frozen=True, slots=True)
class Words:
    text: str


Node = Number | Constant | Variable | Sum | Product | Power | Call | Group | Relation | Quantity | Words
SCALARS = (Number, Constant, Variable, Sum, Product, Power, Call)

MINUS_ONE = Number(Fraction(-1))


def negative(node: Node) -> Node:
    if isinstance(node, Number):
        return Number(-node.value, node.decimal)
    if isinstance(node, Quantity):
        return Quantity(negative(node.value), node.unit)
    return Product((MINUS_ONE, node))


def children(node: Node) -> tuple[Node, ...]:
    match node:
        case Sum(terms):
            return terms
        case Product(factors):
            return factors
        case Power(base, exponent):
            return (base, exponent)
        case Call(_, arguments):
            return arguments
        case Group(_, _, items):
            return items
        case Relation(_, left, right):
            return (left, right)
        case Quantity(value, _):
            return (value,)
        case _:
            return ()


def walk(node: Node) -> Iterator[Node]:
    yield node
    for child in children(node):
        yield from walk(child)


def variables(node: Node) -> frozenset[str]:
    return frozenset(part.name for part in walk(node) if isinstance(part, Variable))


def renamed(node: Node, suffix: str) -> Node:
    """The same scalar tree over other variables: each name with `suffix`."""
    match node:
        case Variable(name):
            return Variable(name + suffix)
        case Sum(terms):
            return Sum(tuple(renamed(t, suffix) for t in terms))
        case Product(factors):
            return Product(tuple(renamed(f, suffix) for f in factors))
        case Power(base, exponent):
            return Power(renamed(base, suffix), renamed(exponent, suffix))
        case Call(name, arguments):
            return Call(name, tuple(renamed(a, suffix) for a in arguments))
        case _:
            return node
