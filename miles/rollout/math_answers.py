"""Are two mathematical answers equal? Text, then numbers, then symbolic, the last in a process that can be killed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from fractions import Fraction

_NUMBER = re.compile(r"^[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?$")
_RELATIVE = Fraction(1, 10**6)
# Characters and words of an expression that is worth a symbolic comparison; nothing that could name Python objects.
_EXPRESSION = re.compile(r"^[\d\s+\-*/^().,=a-zA-Z]{1,200}$")
_WORKER = """
import json, sys
from sympy import simplify
from sympy.parsing.sympy_parser import (convert_xor, implicit_multiplication_application, parse_expr,
                                        standard_transformations)
rules = (*standard_transformations, convert_xor, implicit_multiplication_application)
left, right = json.loads(sys.stdin.read())
a, b = (parse_expr(t, transformations=rules) for t in (left, right))
print(int(bool(simplify(a - b) == 0)))
"""


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, braces balanced; None when there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, at = 1, start + len("\\boxed{")
    for end in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[at:end]
    return None


def normalised(answer: str) -> str:
    r"""Plain spelling: no `$`, `\left`, `\text{}`, thousands separators or white space; `\frac{a}{b}` as (a)/(b)."""
    text = answer.strip().strip("$").strip().rstrip(".")
    text = re.sub(r"\\(left|right|!|,|;| )", "", text).replace("{,}", ",")
    text = re.sub(r"\\(text|mathrm|mbox)\{([^{}]*)\}", r"\2", text)
    text = text.replace("\\cdot", "*").replace("\\times", "*").replace("\\pi", "pi").replace("^\\circ", "")
    text = re.sub(r"\\sqrt\{([^{}]+)\}", r"sqrt(\1)", text)
    previous = None
    while previous != text:
        previous, text = text, re.sub(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}", r"((\1)/(\2))", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", text)
    return re.sub(r"\s+", "", text).replace("{", "(").replace("}", ")")


def as_number(text: str) -> Fraction | None:
    """The exact value of a number, a quotient of numbers or a percentage; None for anything else."""
    text = text.strip()
    while text.startswith("(") and text.endswith(")") and _one_pair(text):
        text = text[1:-1]
    if text.endswith("%") or text.endswith("\\%"):
        value = as_number(text.rstrip("%").rstrip("\\"))
        return None if value is None else value / 100
    if _NUMBER.match(text):
        return Fraction(text)
    if text[:1] == "-":
        value = as_number(text[1:])
        return None if value is None else -value
    top, slash, bottom = text.partition("/")
    if slash and "/" not in bottom:
        a, b = as_number(top), as_number(bottom)
        if a is not None and b:
            return a / b
    return None


def _one_pair(text: str) -> bool:
    depth = 0
    for index, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0 and index < len(text) - 1:
            return False
    return True


class MathChecker:
    """`equal(a, b)`. A symbolic comparison that takes longer than `timeout_s` counts as unequal."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def equal(self, found: str, wanted: str) -> bool:
        a, b = normalised(found), normalised(wanted)
        if a == b:
            return a != ""
        x, y = as_number(a), as_number(b)
        if x is not None and y is not None:
            return abs(x - y) <= _RELATIVE * max(abs(x), abs(y)) if x != y else True
        if not (_EXPRESSION.match(a) and _EXPRESSION.match(b)):
            return False
        return self._symbolic(a, b)

    def _symbolic(self, a: str, b: str) -> bool:
        sides = []
        for text in (a, b):
            parts = text.split("=")
            sides.append(parts[-1])
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", _WORKER],
                input=json.dumps(sides),
                capture_output=True,
                text=True,
                timeout=self._timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0 and done.stdout.strip() == "1"
