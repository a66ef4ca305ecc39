r"""Recursive descent from tokens to a tree. Plain and LaTeX spelling, e.g. `3x^2/4`, `\frac{3x^2}{4}`.

answer   = relation {("," | ";" | "and" | "or") relation}
relation = union {("=" | "<" | "<=" | ...) union}
union    = sum {"\cup" sum}
sum      = ["+" | "-"] term {("+" | "-" | "\pm") term}
term     = factor {["*" | "/"] factor}              a missing sign is a product
factor   = {"+" | "-"} atom {postfix} ["^" factor]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

from miles.rollout.math_answers import layouts
from miles.rollout.math_answers.tokens import Token, tokenise
from miles.rollout.math_answers.tree import (
    MAX_DEPTH,
    MINUS_ONE,
    Call,
    Constant,
    Group,
    Node,
    Number,
    Power,
    Product,
    Quantity,
    Unreadable,
    Variable,
    Words,
    negative,
)
from miles.rollout.math_answers.words import ALIASES, ARITY, INVERSES, SAME_UNIT

_RELATIONS = frozenset(("=", "<", ">", "<=", ">=", "!=", "in"))
_HUNDREDTH = Number(Fraction(1, 100))
_TEN = Number(Fraction(10))
_MOST_POSTFIX = 3
_FRACTIONS = frozenset(("frac", "dfrac", "tfrac", "cfrac"))


def parse(text: str) -> Node:
    """The tree of an answer. `Unreadable` for everything outside the grammar or its bounds."""
    text = text.strip().strip("$").rstrip(".")
    tokens = tokenise(text)
    if len(tokens) == 2 and tokens[0].kind == "text":
        return Words(tokens[0].text)
    parser = Parser(tokens)
    node = parser.answer()
    parser.expect("end")
    return node


class Parser:
    """One pass over the tokens; `depth` bounds the recursion, `bars` tells a closing `|` from an opening one."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._bars = 0

    # Tokens

    @property
    def now(self) -> Token:
        return self._tokens[self._at]

    def next(self) -> Token:
        token = self._tokens[self._at]
        if token.kind != "end":
            self._at += 1
        return token

    def is_op(self, *texts: str) -> bool:
        return self.now.kind == "op" and self.now.text in texts

    def take(self, *texts: str) -> str | None:
        """The operator, if it is one of these, else None."""
        return self.next().text if self.is_op(*texts) else None

    def expect(self, text: str) -> None:
        if text == "end" and self.now.kind == "end":
            return
        if self.take(text) is None:
            raise Unreadable(f"expected {text!r}, found {self.now.text!r}")

    @contextmanager
    def deeper(self) -> Iterator[None]:
        self._depth += 1
        bars, self._bars = self._bars, 0
        if self._depth > MAX_DEPTH:
            raise Unreadable(f"more than {MAX_DEPTH} levels")
        yield
        self._depth, self._bars = self._depth - 1, bars

    # From the loosest binding to the tightest

    def answer(self) -> Node:
        items = self.items()
        return items[0] if len(items) == 1 else Group("{", "}", tuple(items))

    def items(self) -> list[Node]:
        items = [self.relation()]
        while self.take(",", ";") or (self.now.kind == "text" and self.now.text in ("and", "or") and self.next()):
            if self.now.kind == "text" and self.now.text in ("and", "or"):
                self.next()
            items.append(self.relation())
        return items

    def relation(self) -> Node:
        parts, operators = [self.union()], []
        while self.now.kind == "op" and self.now.text in _RELATIONS:
            operators.append(self.next().text)
            parts.append(self.union())
        return layouts.relation(parts, operators)

    def union(self) -> Node:
        items = [self.sum()]
        while self.take("U") or (isinstance(items[-1], Group) and self.now == ("variable", "U") and self.next()):
            items.append(self.sum())
        return items[0] if len(items) == 1 else Group("U", "U", tuple(items))

    def sum(self) -> Node:
        with self.deeper():
            terms: list[Node] = []
            both: Node | None = None
            sign = self.take("+", "-", "±") or "+"
            while True:
                term = self.term()
                if sign == "±":
                    if both is not None:
                        raise Unreadable("two signs ±")
                    both = term
                else:
                    terms.append(term if sign == "+" else negative(term))
                following = self.take("+", "-", "±")
                if following is None:
                    return layouts.sum_of(terms, both)
                sign = following

    def term(self) -> Node:
        factors = [self.factor()]
        while True:
            if (operator := self.take("*", "/", ":")) is not None:
                factor = self.factor()
                factors.append(factor if operator == "*" else Power(factor, MINUS_ONE))
            elif self._starts_factor():
                before = self._tokens[self._at - 1]
                if self.now.kind == "number":
                    # 3 1/2 is a mixed number; other numbers side by side mean nothing.
                    factors[-1] = self._mixed(factors[-1], before)
                    continue
                fraction = before.kind == "number" and self.now.kind == "command" and self.now.text in _FRACTIONS
                factor = self.factor()
                whole_and_part = layouts.mixed(factors[-1], factor) if fraction else None
                if whole_and_part is None:
                    factors.append(factor)
                else:
                    factors[-1] = whole_and_part
            else:
                break
        return layouts.product_of(factors)

    def factor(self) -> Node:
        minus = False
        while (sign := self.take("+", "-")) is not None:
            minus ^= sign == "-"
        node = self._postfixed(self.atom())
        if self.is_op("^"):
            self.next()
            node = self._powered(node)
        return negative(node) if minus else node

    def _powered(self, base: Node) -> Node:
        with self.deeper():
            if self.take("{"):
                if self.take("°"):
                    self.expect("}")
                    return Quantity(base, "degree")
                exponent = self.sum()
                self.expect("}")
                # {2}^{3}^{2} has no meaning in LaTeX; 2^{3}! is (2^3)!.
                return self._postfixed(Power(base, exponent))
            if self.take("°"):
                return Quantity(base, "degree")
            return Power(base, self.factor())

    def _postfixed(self, node: Node) -> Node:
        for _ in range(_MOST_POSTFIX + 1):
            if self.take("!"):
                node = Call("factorial", (node,))
            elif self.take("%"):
                node = Product((node, _HUNDREDTH)) if not isinstance(node, Number) else layouts.percent(node)
            elif self.take("°"):
                node = Quantity(node, "degree")
            elif self.now.kind in ("unit", "text") and self.now.text not in ("and", "or"):
                node = self._with_unit(node)
            else:
                return node
        raise Unreadable("too many signs behind a value")

    def _with_unit(self, node: Node) -> Node:
        words = []
        while self.now.kind in ("unit", "text") and self.now.text not in ("and", "or"):
            words.append(self.next().text)
        unit = " ".join(" ".join(words).split())
        # A power of a unit: cm^2.
        if unit and self.is_op("^") and self._tokens[self._at + 1].kind in ("number", "op"):
            self.next()
            braces = self.take("{")
            unit += f"^{self.next().text}"
            if braces:
                self.expect("}")
        if not unit:
            return node
        if unit == "percent":
            return layouts.percent(node) if isinstance(node, Number) else Product((node, _HUNDREDTH))
        return Quantity(node, SAME_UNIT.get(unit, unit))

    def _mixed(self, whole: Node, before: Token) -> Node:
        top = Number(Fraction(int(self.next().text))) if self.now.text.isdigit() else None
        if top is None or before.kind != "number" or not self.take("/") or not self.now.text.isdigit():
            raise Unreadable("two numbers side by side")
        below = int(self.next().text)
        mixed = layouts.mixed(whole, layouts.product_of([top, Power(Number(Fraction(below)), MINUS_ONE)]))
        if mixed is None:
            raise Unreadable("two numbers side by side")
        return mixed

    def _starts_factor(self) -> bool:
        kind, text = self.now
        if kind in ("number", "variable", "name", "constant"):
            # (1, 2) U (3, 4)
            return not (text == "U" and self._tokens[self._at - 1].text in (")", "]", "}"))
        if kind == "command":
            return text != "\\"
        if kind == "edge":
            return text.startswith("begin")
        return kind == "op" and (text in ("(", "[", "{", r"\{", "lfloor", "lceil") or (text == "|" and not self._bars))

    # Atoms

    def atom(self) -> Node:
        kind, text = self.next()
        if kind == "number":
            return self._number(text)
        if kind == "variable":
            return Variable(text + self._subscript())
        if kind == "constant":
            return Constant(text)
        if kind == "name":
            return self._function(text)
        if kind == "command":
            return self._command(text)
        if kind == "edge":
            return layouts.matrix(self, text)
        if kind == "op":
            return self._bracketed(text)
        raise Unreadable(f"unexpected {text!r}" if text else "the answer ends too early")

    def _number(self, text: str) -> Node:
        if self.is_op("_"):
            self.next()
            return layouts.in_base(text, self._subscript_text())
        if self.now == ("command", "overline"):
            self.next()
            self.expect("{")
            repeated = self.next().text
            self.expect("}")
            return layouts.repeating(text, repeated)
        return layouts.number(text)

    def _subscript(self) -> str:
        return f"_{self._subscript_text()}" if self.take("_") else ""

    def _subscript_text(self) -> str:
        if not self.take("{"):
            return self.next().text
        parts = []
        while not self.take("}"):
            if self.now.kind not in ("number", "variable", "text"):
                raise Unreadable(f"a subscript with {self.now.text!r}")
            parts.append(self.next().text)
        return "".join(parts)

    def _bracketed(self, text: str) -> Node:
        if text == r"\$":
            return Quantity(self._postfixed(self.atom()), "dollar")
        if text == "|":
            return self._absolute()
        closing = {"(": (")", "]"), "[": ("]", ")"), "{": ("}",), r"\{": (r"\}",), "lfloor": ("rfloor",)}
        closing["lceil"] = ("rceil",)
        if text not in closing:
            raise Unreadable(f"unexpected {text!r}")
        with self.deeper():
            if text == r"\{" and self.take(r"\}"):
                return Group("{", "}", ())
            items = self.items()
            closed = self.take(*closing[text])
            if closed is None:
                raise Unreadable(f"{text!r} is not closed")
        return layouts.bracketed(text, closed, items)

    def _absolute(self) -> Node:
        with self.deeper():
            self._bars = 1
            inner = self.sum_in_bars()
            self.expect("|")
        return Call("abs", (inner,))

    def sum_in_bars(self) -> Node:
        """A sum whose `|` closes: `deeper` inside `sum` would forget that a bar is open."""
        terms, sign = [], self.take("+", "-") or "+"
        while True:
            term = self.term()
            terms.append(term if sign == "+" else negative(term))
            following = self.take("+", "-")
            if following is None:
                return layouts.sum_of(terms, None)
            sign = following

    def _command(self, text: str) -> Node:
        if text in _FRACTIONS:
            top, below = self.argument(), self.argument()
            return layouts.product_of([top, Power(below, MINUS_ONE)])
        if text in ("binom", "dbinom", "tbinom"):
            return Call("binomial", (self.argument(), self.argument()))
        if text == "sqrt":
            return self._root()
        if text in ("boxed", "fbox", "hbox", "displaystyle", "overline", "bar", "vec", "mathopen", "mathclose"):
            if text in ("overline", "bar", "vec"):
                raise Unreadable(f"\\{text}")
            return self.argument()
        if text in ("emptyset", "varnothing"):
            return Group("{", "}", ())
        if text in ("mathbb R", "mathbb {R}"):
            return Group("(", ")", (negative(Constant("oo")), Constant("oo")))
        raise Unreadable(f"\\{text} is not known")

    def argument(self) -> Node:
        """`{...}`, or the one atom that follows."""
        with self.deeper():
            if self.take("{"):
                node = self.answer()
                self.expect("}")
                return node
            if self.now.kind == "op" and self.now.text != "(":
                raise Unreadable(f"unexpected {self.now.text!r}")
            return self.atom()

    def _root(self) -> Node:
        if self.take("["):
            index = self.sum()
            self.expect("]")
            return Call("root", (self.argument(), index))
        return Call("sqrt", (self.argument(),))

    def _function(self, text: str) -> Node:
        name = ALIASES.get(text, text)
        base: Node | None = _TEN if name == "lg" else None
        name = "log" if name == "lg" else name
        power: Node | None = None
        while self.is_op("^", "_"):
            if self.next().text == "_":
                if name != "log" or base is not None:
                    raise Unreadable(f"{name} with a subscript")
                base = self.argument()
            else:
                with self.deeper():
                    sign = self.take("-")
                    power = self.argument()
                    power = negative(power) if sign else power
        if power == MINUS_ONE and name in INVERSES:
            name, power = INVERSES[name], None
        arguments = self._arguments()
        if base is not None:
            arguments.append(base)
        least, most = ARITY[name]
        if not least <= len(arguments) <= most:
            raise Unreadable(f"{name} of {len(arguments)} values")
        # One form for both spellings, so that values too large to compute are the same too.
        call = Power(Constant("e"), arguments[0]) if name == "exp" else Call(name, tuple(arguments))
        return call if power is None else Power(call, power)

    def _arguments(self) -> list[Node]:
        """In brackets; or, as in \\sin 2x, the product that follows up to a bracket or another function."""
        for opening, closing in (("(", ")"), ("[", "]"), ("{", "}")):
            if self.is_op(opening):
                with self.deeper():
                    self.next()
                    items = self.items()
                    self.expect(closing)
                return items
        if self.is_op("|"):
            return [self.atom()]
        with self.deeper():
            minus = self.take("-")
            factors = [self.factor()]
            while self.now.kind in ("variable", "constant") or self.now.text in ("frac", "sqrt"):
                factors.append(self.factor())
            node = layouts.product_of(factors)
            return [negative(node) if minus else node]
