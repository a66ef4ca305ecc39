"""Answer text to tokens, in one pass of a linear pattern. Bounds are checked before anything is built."""

from __future__ import annotations

import re
from typing import NamedTuple

from miles.rollout.math_answers.tree import MAX_DIGITS, MAX_TEXT, MAX_TOKENS, Unreadable
from miles.rollout.math_answers.words import CHARACTERS, CONSTANTS, FUNCTION_WORDS, GREEK, OPERATORS, UNITS

_PATTERN = re.compile(
    r"""
      (?P<space>\s+|\\[,;:!>\ ]|~|\\(?:quad|qquad|displaystyle|textstyle|left|right|limits|nolimits
          |[bB]igg?[lr]?)(?![A-Za-z])\.?)
    | \\(?P<style>text|mathrm|mbox|textbf|textit|textrm|mathbf|mathit|operatorname\*?|mathbb|mathcal)
          \s*\{(?P<inner>[^{}\\]*)\}
    | \\(?P<edge>begin|end)\s*\{(?P<room>[a-z]+\*?)\}
    | (?P<number>(?:\d+(?:\.\d+|\.(?=\s*\\overline))?|\.\d+)(?:[eE][+-]?\d{1,3}(?![\d.]))?)
    | (?P<comma>\{,\})
    | \\(?P<command>[A-Za-z]+|[{}%$|\#&_\\])
    | (?P<word>[A-Za-z]+)
    | (?P<sign>\*\*|<=|>=|!=|[-+*/^_(){}\[\]|,;=<>!%'.:&$°])
    """,
    re.VERBOSE,
)
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,|\{,\}|\\,|\\!,)\d{3})+(?![\d])")
_FRACTIONS = frozenset(("frac", "dfrac", "tfrac", "cfrac", "binom", "dbinom", "tbinom"))
# A run of more letters than these that names nothing is a word, not a product.
_MOST_LETTERS = 3


class Token(NamedTuple):
    """kind: number, variable, name (function), constant, unit, text, command, edge, op or end."""

    kind: str
    text: str


END = Token("end", "")


def tokenise(text: str) -> list[Token]:
    """Tokens and an end mark. Raises `Unreadable` for characters, sizes or words that are no mathematics."""
    if len(text) > MAX_TEXT:
        raise Unreadable(f"{len(text)} characters, at most {MAX_TEXT}")
    text = _without_thousands(text.translate(CHARACTERS))
    tokens: list[Token] = []
    at = single = 0
    while at < len(text):
        found = _PATTERN.match(text, at)
        if found is None:
            raise Unreadable(f"unexpected {text[at]!r}")
        at = found.end()
        kind = found.lastgroup
        if kind == "space":
            continue
        if len(tokens) > MAX_TOKENS:
            raise Unreadable(f"more than {MAX_TOKENS} parts")
        if kind == "number":
            digits = found["number"]
            if len(digits) > MAX_DIGITS:
                raise Unreadable(f"a number of {len(digits)} digits, at most {MAX_DIGITS}")
            # \frac12 is one half: each argument without braces is one digit.
            if single:
                at = found.start() + 1
                digits = text[found.start()]
                if not digits.isdigit():
                    raise Unreadable(f"unexpected {digits!r}")
            tokens.append(Token("number", digits))
        elif kind == "comma":
            raise Unreadable("a separator outside a number")
        else:
            tokens += _tokens_of(found, tokens)
        last = tokens[-1]
        single = 2 if last.kind == "command" and last.text in _FRACTIONS else max(single - 1, 0)
        if last == Token("op", "{"):
            single = 0
    tokens.append(END)
    return tokens


def _without_thousands(text: str) -> str:
    """1,000 is a number outside brackets, where a comma could separate values."""
    out, depth, at = [], 0, 0
    for found in _THOUSANDS.finditer(text):
        before = text[at : found.start()]
        depth += sum(before.count(c) for c in "([") - sum(before.count(c) for c in ")]")
        depth += before.count("\\{") - before.count("\\}")
        number = found.group()
        plain_commas = "," in number.replace("{,}", "").replace("\\,", "").replace("\\!,", "")
        out.append(before)
        out.append(number if plain_commas and depth > 0 else re.sub(r"[^\d]", "", number))
        at = found.end()
    return "".join(out) + text[at:]


def _tokens_of(found: re.Match[str], before: list[Token]) -> list[Token]:
    if found["style"] is not None:
        return [_styled(found["style"], found["inner"].strip())]
    if found["edge"] is not None:
        return [Token("edge", f"{found['edge']} {found['room']}")]
    if found["command"] is not None:
        return [_command(found["command"])]
    if found["word"] is not None:
        return _words(found["word"], before)
    return [Token("op", "^" if found["sign"] == "**" else found["sign"])]


def _styled(style: str, inner: str) -> Token:
    if style == "mathbb":
        return Token("command", f"mathbb {inner}")
    if inner in CONSTANTS:
        return Token("constant", CONSTANTS[inner])
    if inner in FUNCTION_WORDS:
        return Token("name", inner)
    if len(inner) == 1 and inner.isalpha() and style != "text":
        return Token("variable", inner)
    return Token("text", inner)


def _command(name: str) -> Token:
    if name in OPERATORS:
        return Token("op", OPERATORS[name])
    if name in ("{", "}", "%", "$", "|"):
        return Token("op", {"{": r"\{", "}": r"\}", "%": "%", "$": r"\$", "|": "|"}[name])
    if name in CONSTANTS and name not in ("e", "i", "inf"):
        return Token("constant", CONSTANTS[name])
    if name in FUNCTION_WORDS and name not in ("gamma", "Gamma", "sqrt"):
        return Token("name", name)
    if name in GREEK:
        return Token("variable", name)
    return Token("command", name)


def _words(word: str, before: list[Token]) -> list[Token]:
    """A function, a constant, a unit behind a value, or a product of letters and functions."""
    behind_value = bool(before) and (before[-1].kind in ("number", "unit") or before[-1].text in ("}", ")"))
    if behind_value and word in UNITS:
        return [Token("unit", word)]
    tokens, letters, at = [], 0, 0
    while at < len(word):
        size = next((n for n in range(len(word) - at, 1, -1) if _known(word[at : at + n])), 1)
        part = word[at : at + size]
        if part in CONSTANTS:
            tokens.append(Token("constant", CONSTANTS[part]))
        elif size > 1:
            tokens.append(Token("name", part))
        else:
            tokens.append(Token("variable", part))
        letters += size == 1
        at += size
    if letters > _MOST_LETTERS:
        raise Unreadable(f"{word!r} is a word")
    return tokens


def _known(part: str) -> bool:
    return part in FUNCTION_WORDS or (part in CONSTANTS and len(part) > 1)
