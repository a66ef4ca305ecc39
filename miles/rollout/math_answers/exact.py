"""Exact verdicts without SymPy: rational constants, and rational functions as identities modulo large primes."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

from miles.rollout.math_answers.tree import (
    MAX_BITS,
    MAX_FACTORIAL,
    Call,
    Node,
    Number,
    Power,
    Product,
    Sum,
    Variable,
)

# Two rational functions of degree d that differ agree at a point with probability d / prime at most.
PRIMES = (2**61 - 1, 2**89 - 1)
MAX_DEGREE = 10**6
MAX_EXPONENT = 2**60


class Inexact(Exception):
    """The tree holds more than rational arithmetic, or is too large for it."""


def rational(node: Node) -> Fraction:
    """The value of a constant. `Inexact` for irrational parts, divisions by 0 and numbers above `MAX_BITS`."""
    match node:
        case Number(value):
            return value
        case Sum(terms):
            total = Fraction(0)
            for term in terms:
                total = _bounded(total + rational(term))
            return total
        case Product(factors):
            total = Fraction(1)
            for factor in factors:
                total = _bounded(total * rational(factor))
            return total
        case Power(base, exponent):
            return _power(rational(base), rational(exponent))
        case Call(name, arguments):
            return _call(name, [rational(a) for a in arguments])
        case _:
            raise Inexact


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise Inexact
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        return _root_power(base, exponent)
    n = exponent.numerator
    if abs(n) * max(_bits(base) - 1, 1) > MAX_BITS or (base == 0 and n <= 0):
        raise Inexact
    return base**n


def _root_power(base: Fraction, exponent: Fraction) -> Fraction:
    """4^(1/2) and 9^(3/2); only square roots, whose branch nobody doubts."""
    if exponent.denominator != 2 or base <= 0 or _bits(base) * abs(exponent.numerator) > MAX_BITS:
        raise Inexact
    top, below = math.isqrt(base.numerator), math.isqrt(base.denominator)
    if top * top != base.numerator or below * below != base.denominator:
        raise Inexact
    return Fraction(top, below) ** exponent.numerator


def _call(name: str, values: list[Fraction]) -> Fraction:
    whole = all(v.denominator == 1 for v in values)
    first = values[0]
    if name == "abs":
        return abs(first)
    if name == "sqrt":
        return _root_power(first, Fraction(1, 2)) if first else first
    if name in ("floor", "ceiling"):
        return Fraction(math.floor(first) if name == "floor" else math.ceil(first))
    if name in ("min", "max"):
        return min(values) if name == "min" else max(values)
    if name in ("gcd", "lcm") and whole:
        integers = [v.numerator for v in values]
        return _bounded(Fraction(math.gcd(*integers) if name == "gcd" else math.lcm(*integers)))
    if name == "factorial" and whole and 0 <= first <= MAX_FACTORIAL:
        return Fraction(math.factorial(first.numerator))
    if name == "binomial" and whole and 0 <= values[1] <= first <= MAX_FACTORIAL:
        return Fraction(math.comb(first.numerator, values[1].numerator))
    raise Inexact


def identical(a: Node, b: Node) -> bool:
    """Whether two rational functions are the same. `Inexact` where either is no rational function.

    Both are evaluated at points that depend on the variables' names alone, modulo each of `PRIMES`.
    """
    return all(_modular(a, p)[0] == _modular(b, p)[0] for p in PRIMES)


def _modular(node: Node, p: int) -> tuple[int, int]:
    """(value modulo p, bound of the degree)."""
    match node:
        case Number(value):
            return value.numerator * _inverse(value.denominator % p, p) % p, 0
        case Variable(name):
            return int.from_bytes(hashlib.blake2b(f"{name} {p}".encode(), digest_size=16).digest()) % p, 1
        case Sum(terms):
            parts = [_modular(t, p) for t in terms]
            return sum(v for v, _ in parts) % p, _within(sum(d for _, d in parts))
        case Product(factors):
            total, degree = 1, 0
            for factor in factors:
                residue, d = _modular(factor, p)
                total, degree = total * residue % p, degree + d
            return total, _within(degree)
        case Power(base, exponent):
            n = rational(exponent)
            residue, degree = _modular(base, p)
            if n.denominator != 1 or abs(n) > MAX_EXPONENT or (residue == 0 and n <= 0):
                raise Inexact
            degree = _within(degree * abs(n.numerator))
            return pow(residue if n > 0 else _inverse(residue, p), abs(n.numerator), p), degree
        case Call():
            return _modular(Number(rational(node)), p)
        case _:
            raise Inexact


def _within(degree: int) -> int:
    if degree > MAX_DEGREE:
        raise Inexact
    return degree


def _inverse(value: int, p: int) -> int:
    if value % p == 0:
        raise Inexact
    return pow(value, -1, p)
