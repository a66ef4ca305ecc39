r"""Find an answer in a completion, and the cheap verdicts that need no worker: same spelling, plain numbers."""

from __future__ import annotations

import re
from fractions import Fraction

from miles.rollout.math_answers.tree import MAX_DIGITS, MAX_TEXT

# One in a million, where one side is written as a decimal: 0.333333 for 1/3.
TOLERANCE = Fraction(1, 10**6)
_MARK = re.compile(r"\\f?boxed\s*\{")
_NUMBER = re.compile(r"([+-]?)(\d+)(?:\.(\d+))?")
_IGNORED = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[!,;: ]|\s+")


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` (or `\fbox`), braces balanced; None when there is none."""
    last = None
    for last in _MARK.finditer(text):  # noqa: B007 - the last match is what counts
        pass
    if last is None:
        return None
    depth, escaped = 1, False
    for end in range(last.end(), len(text)):
        character = text[end]
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[last.end() : end]
    return None


def plain(answer: str) -> str:
    """One spelling for what is only spacing: no dollar signs around, no white space, no full stop at the end."""
    text = _IGNORED.sub("", answer.strip().strip("$")).rstrip(".")
    return text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\u2212", "-")


def plain_number(text: str) -> tuple[Fraction, bool] | None:
    """(value, written as a decimal) of a bare number of bounded length; None for anything else."""
    found = _NUMBER.fullmatch(text) if len(text) <= MAX_DIGITS and text.isascii() else None
    if found is None:
        return None
    sign, whole, after = found.groups()
    value = Fraction(int(whole + (after or "")), 10 ** len(after or ""))
    return (-value if sign == "-" else value), after is not None


def close(a: Fraction, b: Fraction, *, decimal: bool) -> bool:
    """Exactly equal; within `TOLERANCE` of the larger where one of the two is a decimal."""
    return a == b or (decimal and abs(a - b) <= TOLERANCE * max(abs(a), abs(b)))


def quick_verdict(found: str, wanted: str) -> bool | None:
    """The verdict where no grammar is needed; None: ask the judge. Linear in the texts."""
    if len(found) > MAX_TEXT or len(wanted) > MAX_TEXT:
        return found.strip() == wanted.strip() != ""
    a, b = plain(found), plain(wanted)
    if not a or not b:
        return False
    if a == b:
        return True
    x, y = plain_number(a), plain_number(b)
    return None if x is None or y is None else close(x[0], y[0], decimal=x[1] or y[1])
