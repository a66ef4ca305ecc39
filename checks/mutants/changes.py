"""Every small change that can be made to a source file, each as a replacement of a piece of its text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

_COMPARISONS: dict[type[ast.cmpop], tuple[bytes, bytes]] = {
    ast.Lt: (b"<", b"<="), ast.LtE: (b"<=", b"<"), ast.Gt: (b">", b">="), ast.GtE: (b">=", b">"),
    ast.Eq: (b"==", b"!="), ast.NotEq: (b"!=", b"=="), ast.Is: (b"is", b"is not"), ast.IsNot: (b"is not", b"is"),
    ast.In: (b"in", b"not in"), ast.NotIn: (b"not in", b"in"),
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], tuple[bytes, bytes]] = {
    ast.Add: (b"+", b"-"), ast.Sub: (b"-", b"+"), ast.Mult: (b"*", b"/"), ast.Div: (b"/", b"*"),
    ast.FloorDiv: (b"//", b"*"), ast.Mod: (b"%", b"*"), ast.Pow: (b"**", b"*"),
    ast.BitAnd: (b"&", b"|"), ast.BitOr: (b"|", b"&"), ast.LShift: (b"<<", b">>"), ast.RShift: (b">>", b"<<"),
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Change:
    """Bytes `start` to `end` of the file become `after`. `lines`: first and last of the statement, of a compound one
    down to its body; `at_import`: it runs when the file is imported. `within`: dotted name of the function or class around it; `text`: its line."""

    path: str
    start: int
    end: int
    after: str
    before: str
    line: int
    lines: tuple[int, int]
    at_import: bool
    within: str
    text: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]

    @property
    def identity(self) -> tuple[str, str, str, str, str]:
        """What names this change while lines above it come and go."""
        return (self.path, self.within, self.text, self.before, self.after)

    def __str__(self) -> str:
        before = self.before if len(self.before) <= 80 else f"{self.before[:77]}..."
        return f"{self.path}:{self.line} {self.within}: `{before}` -> `{self.after}`"


def changes_of(path: str, source: bytes) -> list[Change]:
    """In order of place. Raises `SyntaxError` for a file that does not compile."""
    return sorted(set(_Reader(path, source).read()))


class _Reader:
    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.lines = source.split(b"\n")
        self.offsets = [0]
        for line in self.lines:
            self.offsets.append(self.offsets[-1] + len(line) + 1)
        self.names: list[str] = []
        self.statement = (1, 1)
        self.functions = 0

    def read(self) -> Iterator[Change]:
        yield from self._block(ast.parse(self.source).body)

    def _block(self, body: list[ast.stmt]) -> Iterator[Change]:
        for position, statement in enumerate(body):
            text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not (position == 0 and text):
                yield from self._statement(statement)

    def _statement(self, node: ast.stmt) -> Iterator[Change]:
        body = getattr(node, "body", None)
        self.statement = (node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.names.append(node.name)
            if not isinstance(node, ast.ClassDef):
                for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                    yield from self._expression(default)
            self.functions += not isinstance(node, ast.ClassDef)
            yield from self._block(node.body)
            self.functions -= not isinstance(node, ast.ClassDef)
            self.names.pop()
            return
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_for_types(node):
            return
        yield from self._left_out(node)
        if isinstance(node, ast.Raise | ast.Assert):
            # The words of an error are not changed.
            return
        if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
            yield from self._operator(node.target, node.value, *_ARITHMETIC[type(node.op)])
        if isinstance(node, ast.If | ast.While):
            yield from self._turned(node.test)
        # Expressions before blocks: they belong to this statement.
        fields = sorted(
            ast.iter_fields(node), key=lambda field: field[0] in ("body", "orelse", "handlers", "finalbody")
        )
        for name, value in fields:
            if name in ("annotation", "type_comment"):
                continue
            for item in value if isinstance(value, list) else [value]:
                yield from self._part(item)

    def _part(self, item: object) -> Iterator[Change]:
        if isinstance(item, ast.stmt):
            yield from self._statement(item)
        elif isinstance(item, ast.expr):
            yield from self._expression(item)
        elif isinstance(item, ast.ExceptHandler):
            yield from self._block(item.body)
        elif isinstance(item, ast.match_case):
            yield from self._part(item.guard)
            yield from self._block(item.body)
        elif isinstance(item, ast.withitem):
            yield from self._expression(item.context_expr)

    def _left_out(self, node: ast.stmt) -> Iterator[Change]:
        if isinstance(node, ast.Expr):
            gone = isinstance(node.value, ast.Call | ast.Await)
        elif isinstance(node, ast.Assign):
            gone = any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
        else:
            gone = isinstance(node, ast.Raise | ast.Assert | ast.Delete | ast.AugAssign)
        if gone:
            yield self._replace(node, "pass")
        if isinstance(node, ast.Continue | ast.Break):
            yield self._replace(node, "break" if isinstance(node, ast.Continue) else "continue")
        if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            yield self._replace(node, "return None")

    def _expression(self, node: ast.AST) -> Iterator[Change]:
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.Compare):
            for operator, (left, right) in zip(node.ops, pairwise([node.left, *node.comparators]), strict=True):
                yield from self._operator(left, right, *_COMPARISONS[type(operator)])
        elif isinstance(node, ast.BoolOp):
            words = (b"and", b"or") if isinstance(node.op, ast.And) else (b"or", b"and")
            for left, right in pairwise(node.values):
                yield from self._operator(left, right, *words)
            for value in node.values:
                yield self._replace(value, "True" if isinstance(node.op, ast.And) else "False")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            start = self._start(node)
            length, after = (3, "") if isinstance(node.op, ast.Not) else (1, "+")
            yield self._change(node, start, start + length, after)
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node):
            yield from self._operator(node.left, node.right, *_ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, bool):
                yield self._replace(node, str(not node.value))
            elif isinstance(node.value, int):
                yield self._replace(node, str(node.value + 1))
            elif isinstance(node.value, float):
                yield self._replace(node, repr(node.value * 2 or 1.0))
        if isinstance(node, ast.IfExp):
            yield from self._turned(node.test)
        if isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield from self._turned(test)
        for name, value in ast.iter_fields(node):
            if name == "annotation":
                continue
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.expr | ast.comprehension | ast.keyword | ast.Slice):
                    yield from self._expression(item)

    def _turned(self, test: ast.expr) -> Iterator[Change]:
        """A condition without an operator of its own, turned round."""
        if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
            yield self._replace(test, f"(not ({self.source[self._start(test) : self._end(test)].decode()}))")

    def _operator(self, left: ast.AST, right: ast.AST, before: bytes, after: bytes) -> Iterator[Change]:
        """The operator between two expressions. One with a comment before it is left alone."""
        gap = self.source[self._end(left) : self._start(right)]
        place = gap.find(before)
        if place >= 0 and b"#" not in gap:
            start = self._end(left) + place
            yield self._change(left, start, start + len(before), after.decode())

    def _replace(self, node: ast.AST, after: str) -> Change:
        return self._change(node, self._start(node), self._end(node), after)

    def _change(self, node: ast.AST, start: int, end: int, after: str) -> Change:
        first = node.lineno  # type: ignore[attr-defined]
        return Change(
            path=self.path,
            start=start,
            end=end,
            after=after,
            before=self.source[start:end].decode(),
            line=first,
            lines=self.statement,
            at_import=self.functions == 0,
            within=".".join(self.names) or "module",
            text=self.lines[first - 1].strip().decode(),
        )

    def _start(self, node: ast.AST) -> int:
        return self.offsets[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self.offsets[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]


def _is_for_types(node: ast.stmt) -> bool:
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in sides
    )
