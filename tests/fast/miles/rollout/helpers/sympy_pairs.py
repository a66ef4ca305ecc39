"""Pairs of answers made as SymPy objects and printed as text, with SymPy's own verdict on the objects.

The objects never pass our grammar, so the verdict is independent of it.
"""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from sympy import Expr, Integer, Rational, Symbol


@dataclass(frozen=True)
class Pair:
    found: str
    wanted: str
    left: Expr
    right: Expr


X, Y, A, N = (Symbol(name) for name in "xyan")
FUNCTIONS = (sympy.sin, sympy.cos, sympy.tan, sympy.exp, sympy.log, sympy.sqrt, sympy.Abs)
REWRITES = (
    sympy.expand,
    sympy.factor,
    sympy.together,
    sympy.simplify,
    sympy.trigsimp,
    sympy.radsimp,
    sympy.cancel,
    sympy.expand_trig,
    sympy.powsimp,
    sympy.nsimplify,
)


def _number(rng: random.Random) -> Expr:
    kind = rng.randrange(10)
    if kind < 5:
        return Integer(rng.randint(-20, 20))
    if kind < 8:
        return Rational(rng.randint(-30, 30), rng.randint(2, 12))
    return rng.choice((sympy.pi, sympy.E, sympy.sqrt(rng.choice((2, 3, 5, 6, 12))), Integer(rng.randint(100, 10**6))))


def _expression(rng: random.Random, depth: int, symbols: tuple[Symbol, ...]) -> Expr:
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(symbols) if symbols and rng.random() < 0.6 else _number(rng)
    kind = rng.randrange(8)
    one = _expression(rng, depth - 1, symbols)
    if kind < 3:
        return one + _expression(rng, depth - 1, symbols)
    if kind < 5:
        return one * _expression(rng, depth - 1, symbols)
    if kind == 5:
        below = _expression(rng, depth - 1, symbols)
        return one / below if below != 0 else one
    if kind == 6:
        return one ** rng.choice((2, 3, -1, -2, Rational(1, 2))) if one != 0 else one
    return rng.choice(FUNCTIONS)(one)


def _changed(rng: random.Random, value: Expr) -> Expr:
    """Another value, near by: what a wrong answer looks like."""
    kind = rng.randrange(6)
    if kind == 0:
        return value + rng.choice((1, -1, Rational(1, 2), Rational(1, 100)))
    if kind == 1:
        return -value if value != 0 else Integer(1)
    if kind == 2:
        return value * rng.choice((2, Rational(1, 2), 10))
    if kind == 3 and value.free_symbols:
        return value.subs(sorted(value.free_symbols, key=str)[0], Y if Y not in value.free_symbols else A)
    if kind == 4:
        return value + _number(rng)
    numbers = sorted((n for n in value.atoms(Integer) if abs(n) > 1), key=int)
    return value.subs(numbers[0], numbers[0] + 1) if numbers else value + 1


def _printed(rng: random.Random, value: Expr) -> str:
    """LaTeX, or plain text with SymPy's names for e and i in ours."""
    if rng.random() < 0.6:
        return sympy.latex(value, ln_notation=rng.random() < 0.5)
    return sympy.sstr(value.subs({})).replace("E", "e").replace("I", "i")


def generate(count: int, *, seed: int) -> Iterator[Pair]:
    """Half of the pairs are rewritten, half are changed. Values that are undefined are left out."""
    rng = random.Random(seed)
    made = 0
    while made < count:
        symbols = rng.choice(((), (), (X,), (X, Y), (A, N)))
        with _time_limit(2.0), contextlib.suppress(Exception):
            left = _expression(rng, rng.choice((1, 2, 2, 3)), symbols)
            if left.has(sympy.nan, sympy.zoo, sympy.oo) or sympy.count_ops(left) > 40:
                continue
            if rng.random() < 0.5:
                right = rng.choice(REWRITES)(left)
            else:
                right = _changed(rng, left)
            if right.has(sympy.nan, sympy.zoo, sympy.oo) or sympy.count_ops(right) > 80:
                continue
            pair = Pair(_printed(rng, left), _printed(rng, right), left, right)
            if max(len(pair.found), len(pair.wanted)) > 1000:
                continue
            made += 1
            yield pair


class _TooLong(BaseException):
    pass


@contextlib.contextmanager
def _time_limit(seconds: float):
    """The body is left when it takes too long (main thread only)."""

    def stop(*_):
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _TooLong:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


def sympy_verdict(pair: Pair, *, limit_s: float) -> bool | None:
    """SymPy's verdict on the objects, None where it comes to none in time."""
    verdict: bool | None = None
    with _time_limit(limit_s), contextlib.suppress(Exception):
        difference = pair.left - pair.right
        if difference == 0 or sympy.simplify(difference) == 0:
            verdict = True
        else:
            verdict = difference.equals(0)
    return verdict
