"""Read the declarations of one source file from its bytes: every error, each with line and column.

Registration calls count only as expression statements at the top level, under their own name imported
from `miles_ci.declare`, with literal arguments. Every other use of such a name is an error that names the construct,
because a call that the reader cannot see would be a test that never runs.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator

from miles_ci.declare.call import read_call
from miles_ci.declare.hidden import hidden_use
from miles_ci.declare.model import Declaration, FileScan
from miles_ci.declare.vocabulary import METRIC_BOUND, SHIPPED, Vocabulary
from miles_ci.errors import Diagnostic, suggestion
from miles_ci.metric_bound import MetricBound

PARSER_VERSION = 5
MODULE = "miles_ci.declare"
MARKER = b"register_"
FORMER_NAMES = {"register_ci_gate": "register_metric_bound"}

_BLOCKS: dict[type[ast.AST], str] = {
    ast.If: "`if`",
    ast.For: "`for`",
    ast.AsyncFor: "`async for`",
    ast.While: "`while`",
    ast.With: "`with`",
    ast.AsyncWith: "`async with`",
    ast.Try: "`try`",
    getattr(ast, "TryStar", ast.Try): "`try`",  # from Python 3.11 on
    ast.Match: "`match`",
    ast.Lambda: "a lambda",
    ast.Assign: "an assignment",
    ast.AnnAssign: "an assignment",
    ast.AugAssign: "an assignment",
    ast.Return: "`return`",
}


def decode(path: str, data: bytes) -> tuple[str, Diagnostic | None]:
    """The text of a source file without its byte-order mark, or the reason why it is not UTF-8."""
    try:
        return data.decode("utf-8-sig"), None
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        column = error.start - (before.rfind(b"\n") + 1) + 1
        message = f"not valid UTF-8 (byte 0x{data[error.start]:02x}); save the file as UTF-8"
        return "", Diagnostic(path, line, column, "not-utf8", message)


def parse(path: str, text: str) -> ast.Module | Diagnostic:
    """The syntax tree, or a diagnostic; no input makes it raise."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except SyntaxError as error:
        line, column = error.lineno or 1, max(error.offset or 1, 1)
        return Diagnostic(path, line, column, "syntax-error", f"the file does not parse: {error.msg}")
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        return Diagnostic(path, 1, 1, "syntax-error", f"the file does not parse: {type(error).__name__}: {error}"[:200])


class _Reader:
    def __init__(self, path: str, text: str, tree: ast.Module, vocabulary: Vocabulary) -> None:
        self.path = path
        self.vocabulary = vocabulary
        self.lines = text.split("\n")
        self.tree = tree
        self.errors: list[Diagnostic] = []
        self.imported: set[str] = set()
        self.declarations: list[Declaration] = []
        self.metric_bounds: list[MetricBound] = []

    def place(self, node: ast.AST) -> tuple[int, int]:
        """1-based line and column in characters (AST columns are UTF-8 bytes)."""
        line, offset = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        source = self.lines[line - 1] if line <= len(self.lines) else ""
        return line, len(source.encode()[:offset].decode(errors="replace")) + 1

    def error(self, node: ast.AST, code: str, message: str) -> None:
        line, column = self.place(node)
        self.errors.append(Diagnostic(self.path, line, column, code, message))

    def read(self) -> FileScan:
        top_calls: list[tuple[str, ast.Call]] = []
        called: set[ast.AST] = set()
        for node, enclosing in _walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                if node.module == MODULE and node.level == 0:
                    self._import_from(node, enclosing)
                else:
                    self._import_from_elsewhere(node)
            elif isinstance(node, ast.Call):
                if isinstance(node.func, ast.Name | ast.Attribute):
                    called.add(node.func)
                name = self._registration_name(node, enclosing)
                if name is not None:
                    top_calls.append((name, node))
            use = None if node in called else hidden_use(node, self.vocabulary)
            if use is not None:
                name, how = use
                message = f"{name} is {how}: what is called so is not seen; call {name}(...) directly at the top level"
                self.error(node, "hidden-use", message)
        for name, call in top_calls:
            if name not in self.imported:
                self.error(call, "not-imported", f"{name} is not imported: add `from miles_ci.declare import {name}`")
            self._declare(name, call)
        self._duplicates()
        # A registration shadowed by a definition in the same file would be read but never be ours.
        for node in self.tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if self.vocabulary.claims(node.name):
                self.error(node, "shadowed", f"{node.name} is defined here; it must come from miles_ci.declare")
        return FileScan(tuple(self.declarations), tuple(self.metric_bounds), tuple(sorted(set(self.errors))))

    def _import_from(self, node: ast.ImportFrom, enclosing: str | None) -> None:
        for alias in node.names:
            if alias.name == "*":
                self.error(
                    node, "star-import", "`from miles_ci.declare import *` hides what is declared: import by name"
                )
            elif self.vocabulary.knows(alias.name):
                if alias.asname is not None and alias.asname != alias.name:
                    message = f"aliased import `{alias.name} as {alias.asname}`: import it under its own name"
                    self.error(alias, "aliased-import", message)
                    self.imported.add(alias.name)
                elif enclosing is not None:
                    self.error(
                        node, "nested-import", f"import of {alias.name} inside {enclosing}: move it to the top level"
                    )
                    self.imported.add(alias.name)
                else:
                    self.imported.add(alias.name)
            elif alias.name.startswith(MARKER.decode()):
                former = FORMER_NAMES.get(alias.name)
                hint = f"; it is called {former} now" if former else suggestion(alias.name, self.vocabulary.fields)
                self.error(alias, "unknown-import", f"{MODULE} has no {alias.name}{hint}")

    def _import_from_elsewhere(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if self.vocabulary.claims(alias.name) and alias.asname not in (None, alias.name):
                message = f"aliased import `{alias.name} as {alias.asname}`: import it from {MODULE} under its own name"
                self.error(alias, "aliased-import", message)

    def _registration_name(self, node: ast.Call, enclosing: str | None) -> str | None:
        """The function that a call names if it is a well-placed registration; errors otherwise."""
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if self.vocabulary.claims(called) and not self.vocabulary.knows(called):
            self.error(node, "unknown-registration", self._unknown(called))
            return None
        if isinstance(node.func, ast.Attribute) and self.vocabulary.knows(node.func.attr):
            message = (
                f"attribute call of {node.func.attr}: import it by name from miles_ci.declare and call it directly"
            )
            self.error(node, "attribute-call", message)
            return None
        if not (isinstance(node.func, ast.Name) and self.vocabulary.knows(node.func.id)):
            return None
        if enclosing is not None:
            message = f"{node.func.id} called inside {enclosing}: declarations stand at the top level of the file"
            self.error(node, "nested-call", message)
            return None
        return node.func.id

    def _unknown(self, name: str) -> str:
        near = suggestion(name, self.vocabulary.fields)
        return f"{name} registers nothing: this project has no such function{near} (backends stand in registry.yaml)"

    def _declare(self, name: str, call: ast.Call) -> None:
        fields, places, est_span = read_call(name, call, self.vocabulary, self.error, self.place)
        if fields is None:
            return
        line, column = self.place(call)
        if name == METRIC_BOUND:
            self.metric_bounds.append(MetricBound(path=self.path, line=line, column=column, **fields))
        else:
            self.declarations.append(
                Declaration(
                    path=self.path,
                    backend=self.vocabulary.backend_of[name],
                    line=line,
                    column=column,
                    est_span=est_span,
                    places=places,
                    **fields,
                )
            )

    def _duplicates(self) -> None:
        seen: dict[tuple[str, str], int] = {}
        for declaration in self.declarations:
            key = (declaration.backend, declaration.suite)
            first = seen.setdefault(key, declaration.line)
            if first != declaration.line:
                message = f"second registration for {key[0]} in {key[1]} (first in line {first}); keep one"
                self.errors.append(
                    Diagnostic(self.path, declaration.line, declaration.column, "duplicate-registration", message)
                )
        metrics: dict[str, int] = {}
        for bound in self.metric_bounds:
            key_text = f"{bound.metric} {bound.steps}"
            first = metrics.setdefault(key_text, bound.line)
            if first != bound.line:
                message = (
                    f"second bound on '{bound.metric}' with steps {bound.steps!r} (first in line {first}); keep one"
                )
                self.errors.append(Diagnostic(self.path, bound.line, bound.column, "duplicate-bound", message))


def _walk(tree: ast.Module) -> Iterator[tuple[ast.AST, str | None]]:
    """Every node with the construct that encloses it (None: a statement of the module itself)."""
    stack: list[tuple[ast.AST, str | None]] = []
    for statement in reversed(tree.body):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            stack.append((statement.value, None))
        else:
            stack.append((statement, None))
    while stack:
        node, enclosing = stack.pop()
        yield node, enclosing
        inner = enclosing
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"function `{node.name}`"
        elif isinstance(node, ast.ClassDef):
            inner = f"class `{node.name}`"
        elif type(node) in _BLOCKS:
            inner = _BLOCKS[type(node)]
        elif isinstance(node, ast.expr) and enclosing is None:
            inner = "another expression"
        stack.extend((child, inner) for child in reversed(list(ast.iter_child_nodes(node))))


def read_source(path: str, data: bytes, vocabulary: Vocabulary = SHIPPED) -> FileScan:
    """Declarations, metric_bounds and errors of one file. Never raises for bad content."""
    text, problem = decode(path, data)
    if problem is not None:
        return FileScan(errors=(problem,))
    tree = parse(path, text)
    if isinstance(tree, Diagnostic):
        return FileScan(errors=(tree,))
    try:
        return _Reader(path, text, tree, vocabulary).read()
    except RecursionError:
        return FileScan(errors=(Diagnostic(path, 1, 1, "syntax-error", "expressions are nested too deeply to read"),))


def defines_tests(path: str, data: bytes) -> tuple[int, int, str] | Diagnostic | None:
    """Place and name of the first test function or test method in a file, if it has one."""
    text, problem = decode(path, data)
    if problem is not None:
        return problem
    tree = parse(path, text)
    if isinstance(tree, Diagnostic):
        return tree
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    for node in tree.body:
        bodies = [node] if isinstance(node, functions) else node.body if isinstance(node, ast.ClassDef) else []
        for item in bodies:
            if isinstance(item, functions) and item.name.startswith("test_"):
                return item.lineno, item.col_offset + 1, item.name
    return None
