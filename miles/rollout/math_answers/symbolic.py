"""Trees as SymPy objects, built node by node, and SymPy's own verdict. For what exact and numeric values leave open.

SymPy is imported by the first call: most answers never need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles.rollout.math_answers.tree import (
    MAX_BITS,
    MAX_FACTORIAL,
    Call,
    Constant,
    Node,
    Number,
    Power,
    Product,
    Sum,
    Unreadable,
    Variable,
)

if TYPE_CHECKING:
    import sympy

_SAME_NAME = (
    "sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh coth sech csch asinh acosh atanh exp log sqrt "
    "sign floor ceiling re im arg conjugate gamma binomial gcd lcm"
)
_OTHER_NAME = {"abs": "Abs", "min": "Min", "max": "Max"}


def build(node: Node) -> sympy.Expr:
    """The SymPy object of a scalar tree. `Unreadable` where a power or factorial would be too large to compute."""
    import sympy

    match node:
        case Number(value):
            return sympy.Rational(value.numerator, value.denominator)
        case Constant(name):
            return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "oo": sympy.oo}[name]
        case Variable(name):
            return sympy.Symbol(name)
        case Sum(terms):
            return sympy.Add(*map(build, terms))
        case Product(factors):
            return sympy.Mul(*map(build, factors))
        case Power(base, exponent):
            return _power(sympy, build(base), build(exponent))
        case Call(name, arguments):
            return _call(sympy, name, [build(a) for a in arguments])
        case _:
            raise Unreadable(f"a {type(node).__name__.lower()} inside an expression")


def _power(sympy: Any, base: Any, exponent: Any) -> Any:
    if exponent.is_number and exponent.is_finite:
        # Bits of the result where base and exponent are numbers; of the exponent alone where the base is not.
        rationals = base.atoms(sympy.Rational) if base.is_number else ()
        bits = max((abs(int(n)).bit_length() for r in rationals for n in (r.p, r.q)), default=1)
        if abs(sympy.N(exponent, 15)) * bits > MAX_BITS:
            raise Unreadable("a power too large to compute")
    return sympy.Pow(base, exponent)


def _call(sympy: Any, name: str, values: list[Any]) -> Any:
    if name in ("factorial", "gamma", "binomial") and any(v.is_number and not abs(v) <= MAX_FACTORIAL for v in values):
        raise Unreadable("a factorial too large to compute")
    if name == "factorial":
        return sympy.factorial(values[0])
    if name == "root":
        value, index = values
        if value.is_number and value.is_negative and index.is_Integer and index % 2:
            return -sympy.root(-value, index)
        return sympy.root(value, index)
    if name in _SAME_NAME.split():
        return getattr(sympy, name)(*values)
    return getattr(sympy, _OTHER_NAME[name])(*values)


def equal(a: Node, b: Node) -> bool:
    """SymPy's verdict; undefined values equal nothing."""
    import sympy

    left, right = build(a), build(b)
    if left.has(sympy.nan, sympy.zoo) or right.has(sympy.nan, sympy.zoo):
        return False
    if left == right:
        return True
    difference = sympy.simplify(left - right)
    return bool(difference == 0 or difference.equals(0))
