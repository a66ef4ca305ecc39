"""Tokens and tree of GitHub Actions expressions.

Grammar, loosest first: `||`, `&&`, `== !=`, `< <= > >=`, `!`, index (`.name`, `.*`, `[expr]`), call, literal.
Functions, their number of arguments and context names are checked while parsing, as GitHub does: what is not
available in a place is an error there, not a null.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from miles_ci.workflows.expr.values import parse_number

MAX_DEPTH = 50
MAX_LENGTH = 21_000

STATUS_FUNCTIONS = frozenset({"success", "failure", "cancelled", "always"})
# Name in lower case -> (fewest, most) arguments.
FUNCTIONS: dict[str, tuple[int, int]] = {
    "case": (3, 255),
    "contains": (2, 2),
    "endswith": (2, 2),
    "format": (1, 255),
    "fromjson": (1, 1),
    "join": (1, 2),
    "startswith": (2, 2),
    "tojson": (1, 1),
}
_SPECIAL = {"success": (0, 255), "failure": (0, 255), "cancelled": (0, 0), "always": (0, 0), "hashfiles": (1, 255)}

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_NUMBER = re.compile(r"[^\s(\[)\],!<>=&|]+")
_STRING = re.compile(r"'(?:[^']|'')*'")
_OPERATOR = re.compile(r"==|!=|<=|>=|&&|\|\||[()\[\].,*!<>]")
_KEYWORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "NaN": math.nan, "Infinity": math.inf}


class ExpressionError(ValueError):
    """The expression cannot be read or evaluated; the text names the symbol and its position."""


@dataclass(frozen=True)
class Literal:
    value: Any


@dataclass(frozen=True)
class Context:
    name: str


@dataclass(frozen=True)
class Index:
    """`target[key]`; `key` None is the star."""

    target: Node
    key: Node | None


@dataclass(frozen=True)
class Call:
    name: str
    args: tuple[Node, ...]


@dataclass(frozen=True)
class Not:
    operand: Node


@dataclass(frozen=True)
class Compare:
    operator: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Logical:
    operator: str
    args: tuple[Node, ...]


Node = Literal | Context | Index | Call | Not | Compare | Logical


@dataclass(frozen=True)
class _Token:
    kind: str  # word, value, op, end
    text: str
    value: Any
    at: int


def _tokens(source: str) -> list[_Token]:
    out: list[_Token] = []
    at = 0
    while at < len(source):
        char = source[at]
        if char in " \t\r\n":
            at += 1
            continue
        previous = out[-1] if out else None
        after_operand = previous is not None and (previous.kind == "word" or previous.text in (")", "]", "*"))
        token: _Token | None = None
        if char == "'":
            found = _STRING.match(source, at)
            if found:
                token = _Token("value", found[0], found[0][1:-1].replace("''", "'"), at)
        elif char.isdigit() or char in "+-" or (char == "." and not after_operand):
            found = _NUMBER.match(source, at)
            value = parse_number(found[0]) if found else math.nan
            if found and not math.isnan(value):
                token = _Token("value", found[0], value, at)
        elif found := _WORD.match(source, at):
            ends = source[found.end() : found.end() + 1]
            if not ends or ends in "([)],.!<>=&|" or ends.isspace():
                if found[0] in _KEYWORDS and not (previous and previous.text == "." and previous.kind == "op"):
                    token = _Token("value", found[0], _KEYWORDS[found[0]], at)
                else:
                    token = _Token("word", found[0], None, at)
        elif found := _OPERATOR.match(source, at):
            token = _Token("op", found[0], None, at)
        if token is None:
            raise ExpressionError(f"unexpected symbol {source[at : at + 20]!r} at position {at + 1} of: {source}")
        out.append(token)
        at += len(token.text)
    out.append(_Token("end", "", None, at))
    return out


class _Parser:
    def __init__(self, source: str, contexts: Collection[str] | None, functions: Collection[str]) -> None:
        self.source, self.tokens, self.at, self.depth = source, _tokens(source), 0, 0
        self.contexts = None if contexts is None else {name.lower() for name in contexts}
        self.functions = FUNCTIONS | {name.lower(): _SPECIAL.get(name.lower(), (0, 255)) for name in functions}

    def fail(self, token: _Token, why: str = "unexpected symbol") -> ExpressionError:
        shown = token.text or "end of expression"
        return ExpressionError(f"{why} {shown!r} at position {token.at + 1} of: {self.source}")

    def take(self, *texts: str) -> _Token | None:
        token = self.tokens[self.at]
        if token.kind == "op" and token.text in texts:
            self.at += 1
            return token
        return None

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise self.fail(self.tokens[self.at])

    def expression(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.fail(self.tokens[self.at], f"more than {MAX_DEPTH} levels at")
        node = self.chain("||", lambda: self.chain("&&", self.equality))
        self.depth -= 1
        return node

    def chain(self, operator: str, operand: Any) -> Node:
        args = [operand()]
        while self.take(operator):
            args.append(operand())
        return args[0] if len(args) == 1 else Logical(operator, tuple(args))

    def equality(self) -> Node:
        node = self.comparison()
        while token := self.take("==", "!="):
            node = Compare(token.text, node, self.comparison())
        return node

    def comparison(self) -> Node:
        node = self.unary()
        while token := self.take("<", "<=", ">", ">="):
            node = Compare(token.text, node, self.unary())
        return node

    def unary(self) -> Node:
        bangs = 0
        while self.take("!"):
            bangs += 1
        if self.depth + bangs > MAX_DEPTH:
            raise self.fail(self.tokens[self.at], f"more than {MAX_DEPTH} levels at")
        node = self.indexed()
        for _ in range(bangs):
            node = Not(node)
        return node

    def indexed(self) -> Node:
        node, can_index = self.primary()
        while can_index:
            if self.take("["):
                key = None if self.take("*") else self.expression()
                self.expect("]")
                node = Index(node, key)
            elif self.take("."):
                if self.take("*"):
                    node = Index(node, None)
                    continue
                token = self.tokens[self.at]
                if token.kind != "word":
                    raise self.fail(token)
                self.at += 1
                node = Index(node, Literal(token.text))
            else:
                break
        return node

    def primary(self) -> tuple[Node, bool]:
        token = self.tokens[self.at]
        self.at += 1
        if token.kind == "value":
            return Literal(token.value), False
        if token.kind == "word":
            if self.take("("):
                return self.call(token), True
            if self.contexts is not None and token.text.lower() not in self.contexts:
                known = ", ".join(sorted(self.contexts)) or "none"
                raise self.fail(token, f"unknown context (available here: {known})")
            return Context(token.text), True
        if token.text == "(":
            node = self.expression()
            self.expect(")")
            return node, True
        raise self.fail(token)

    def call(self, name: _Token) -> Node:
        args: list[Node] = []
        while not self.take(")"):
            if args:
                self.expect(",")
            args.append(self.expression())
        bounds = self.functions.get(name.text.lower())
        if bounds is None:
            raise self.fail(name, "unknown function (or not available here)")
        if not bounds[0] <= len(args) <= bounds[1] or (name.text.lower() == "case" and len(args) % 2 == 0):
            raise self.fail(name, f"wrong number of arguments ({len(args)}) for")
        return Call(name.text.lower(), tuple(args))


def parse(source: str, *, contexts: Collection[str] | None = None, functions: Collection[str] = ()) -> Node:
    """Read one expression without its `${{ }}`.

    `contexts` are the names available in this place (None: any), `functions` what is available beside the
    built-in ones (status functions, hashFiles). Raises `ExpressionError`.
    """
    if len(source) > MAX_LENGTH:
        raise ExpressionError(f"expression of {len(source)} characters; GitHub allows {MAX_LENGTH}")
    parser = _Parser(source, contexts, functions)
    if parser.tokens[0].kind == "end":
        raise ExpressionError("empty expression")
    node = parser.expression()
    if parser.tokens[parser.at].kind != "end":
        raise parser.fail(parser.tokens[parser.at])
    return node


def children(node: Node) -> Iterator[Node]:
    if isinstance(node, Index):
        yield node.target
        if node.key is not None:
            yield node.key
    elif isinstance(node, Call | Logical):
        yield from node.args
    elif isinstance(node, Not):
        yield node.operand
    elif isinstance(node, Compare):
        yield node.left
        yield node.right


def walk(node: Node) -> Iterator[Node]:
    yield node
    for child in children(node):
        yield from walk(child)


def status_functions(node: Node) -> set[str]:
    """Status functions the tree calls; text in strings does not count because it is not in the tree."""
    return {part.name for part in walk(node) if isinstance(part, Call) and part.name in STATUS_FUNCTIONS}


def context_paths(node: Node) -> set[tuple[str, ...]]:
    """Context accesses as lower-case paths, e.g. ('needs', 'plan', 'result'); '*' for a computed part."""
    found: set[tuple[str, ...]] = set()

    def visit(part: Node) -> tuple[str, ...] | None:
        if isinstance(part, Context):
            return (part.name.lower(),)
        if isinstance(part, Index):
            base = visit_inner(part.target)
            if part.key is not None and not isinstance(part.key, Literal):
                add(part.key)
            if base is None:
                return None
            key = part.key.value if isinstance(part.key, Literal) else "*"
            return (*base, key.lower() if isinstance(key, str) else str(key))
        return None

    def visit_inner(part: Node) -> tuple[str, ...] | None:
        path = visit(part)
        if path is None:
            add(part)
        return path

    def add(part: Node) -> None:
        path = visit(part)
        if path is not None:
            found.add(path)
            return
        if not isinstance(part, Index):
            for child in children(part):
                add(child)

    add(node)
    return found
