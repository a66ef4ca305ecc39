"""Values at high precision (mpmath), at complex points, so that identities can be told from near misses.

A difference counts only above the noise of its own computation; agreement is confirmed with many more digits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from mpmath import mp

from miles.rollout.math_answers.tree import Call, Constant, Node, Number, Power, Product, Sum, Variable, variables

DIGITS = 40
CONFIRMED_DIGITS = 160
# Digits that a chain of roundings may lose.
GUARD = 10
MAX_MAGNITUDE = 4000  # bits: larger values, and what cancels out of them, are left to SymPy
MAX_ARGUMENT = 10**6


class Inconclusive(Exception):
    """No verdict from values: undefined at the points, or beyond the bounds."""


_SAME_NAME = (
    "sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh coth sech csch asinh acosh atanh "
    "exp sign re im arg sqrt"
)
_DIRECT: dict[str, Callable[[Any], Any]] = {name: getattr(mp, name) for name in _SAME_NAME.split()}
_DIRECT |= {"abs": mp.fabs, "conjugate": mp.conj}
_BOUNDED = frozenset(("exp", "sinh", "cosh", "factorial", "gamma", "binomial", "sin", "cos", "tan"))


class _Evaluation:
    """One tree at one point; `largest` is the magnitude (bits) of the largest value on the way."""

    def __init__(self, point: int) -> None:
        self._point = point
        self.largest = 0

    def value(self, node: Node) -> Any:
        result = self._value(node)
        if not mp.isfinite(result):
            raise Inconclusive
        if result != 0:
            self.largest = max(self.largest, int(mp.mag(result)))
            if self.largest > MAX_MAGNITUDE:
                raise Inconclusive
        return result

    def _value(self, node: Node) -> Any:
        match node:
            case Number(value):
                return mp.mpf(value.numerator) / value.denominator
            case Constant("pi"):
                return +mp.pi
            case Constant("e"):
                return +mp.e
            case Constant("i"):
                return mp.j
            case Variable(name):
                return _coordinate(name, self._point)
            case Sum(terms):
                total = mp.mpf(0)
                for term in terms:
                    total += self.value(term)
                return total
            case Product(factors):
                total = mp.mpf(1)
                for factor in factors:
                    total *= self.value(factor)
                return total
            case Power(base, exponent):
                return self._power(self.value(base), self.value(exponent))
            case Call(name, arguments):
                return self._call(name, [self.value(a) for a in arguments])
            case _:
                raise Inconclusive

    def _power(self, base: Any, exponent: Any) -> Any:
        if abs(exponent) > MAX_ARGUMENT or (base == 0 and (exponent == 0 or mp.re(exponent) < 0)):
            raise Inconclusive
        if base != 0 and abs(exponent) * abs(int(mp.mag(base))) > MAX_MAGNITUDE + MAX_ARGUMENT:
            raise Inconclusive
        return mp.power(base, exponent)

    def _call(self, name: str, values: list[Any]) -> Any:
        first = values[0]
        if name in _BOUNDED and abs(first) > MAX_ARGUMENT:
            raise Inconclusive
        if name == "log":
            return mp.log(first) if len(values) == 1 else mp.log(first) / mp.log(values[1])
        if name == "root":
            return self._root(first, values[1])
        if name in ("floor", "ceiling"):
            return _rounded(first, name)
        if name in ("factorial", "gamma"):
            return mp.factorial(first) if name == "factorial" else mp.gamma(first)
        if name == "binomial":
            return mp.binomial(first, values[1])
        if name in ("min", "max"):
            if any(mp.im(v) != 0 for v in values):
                raise Inconclusive
            return min(values) if name == "min" else max(values)
        if name not in _DIRECT:
            raise Inconclusive
        return _DIRECT[name](first)

    def _root(self, value: Any, index: Any) -> Any:
        """An odd root of a negative number is the real one."""
        if index == 0:
            raise Inconclusive
        if mp.im(value) == 0 and mp.re(value) < 0 and mp.im(index) == 0 and mp.isint(index) and int(index) % 2:
            return -self._power(-value, 1 / mp.mpf(index))
        return self._power(value, 1 / mp.mpmathify(index))


def _rounded(value: Any, name: str) -> Any:
    if mp.im(value) != 0:
        raise Inconclusive
    value = mp.re(value)
    nearest = mp.nint(value)
    if abs(value - nearest) < mp.mpf(10) ** (-mp.dps // 2):
        return nearest
    return mp.floor(value) if name == "floor" else mp.ceil(value)


def _coordinate(name: str, point: int) -> Any:
    """A fixed complex or negative number for a variable: branches of roots and logarithms must agree too."""
    digest = hashlib.blake2b(f"{name} {point}".encode(), digest_size=16).digest()
    a, b = (mp.mpf(int.from_bytes(part)) / 2**64 for part in (digest[:8], digest[8:]))
    if point == 0:
        return mp.mpf(1) / 3 + 2 * a
    if point == 1:
        return mp.mpc(a * 4 - 2, b * 4 - 2)
    return -(mp.mpf(1) / 3 + 2 * a)


def _difference(a: Node, b: Node, point: int, digits: int) -> tuple[bool, int]:
    """(agree within the noise, magnitude of the largest value in bits) at one point."""
    with mp.workdps(digits):
        try:
            left, right = _Evaluation(point), _Evaluation(point)
            difference = abs(left.value(a) - right.value(b))
        except (ArithmeticError, ValueError, TypeError, NotImplementedError, mp.NoConvergence) as error:
            raise Inconclusive from error
        largest = max(left.largest, right.largest, 0)
        return difference <= mp.ldexp(mp.mpf(10) ** (GUARD - digits), largest), largest


def identical(a: Node, b: Node) -> bool:
    """Whether two scalar trees have the same values everywhere that is looked at. `Inconclusive` where none has."""
    points = (0, 1, 2) if variables(a) | variables(b) else (0,)
    conclusive = 0
    for point in points:
        try:
            agree, largest = _difference(a, b, point, DIGITS)
            if agree or largest > 3 * DIGITS:
                agree, _ = _difference(a, b, point, CONFIRMED_DIGITS + 2 * largest // 3)
        except Inconclusive:
            continue
        if not agree:
            return False
        conclusive += 1
    if conclusive == 0 or (len(points) > 1 and conclusive < 2):
        raise Inconclusive
    return True


def near(a: Node, b: Node, tolerance: float) -> bool:
    """Whether two constants differ by at most `tolerance` of the larger. `Inconclusive` where one has no value."""
    with mp.workdps(DIGITS):
        try:
            x, y = _Evaluation(0).value(a), _Evaluation(0).value(b)
        except (ArithmeticError, ValueError, TypeError, NotImplementedError, mp.NoConvergence) as error:
            raise Inconclusive from error
        return bool(abs(x - y) <= mp.mpf(tolerance) * max(abs(x), abs(y)))
