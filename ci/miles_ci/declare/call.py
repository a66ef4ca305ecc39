"""Read one registration call: bind its arguments, evaluate the literals, apply the field rules."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from miles_ci.declare.fields import GPU_ONLY, NONE_ALLOWED, FieldError
from miles_ci.declare.literals import NotLiteral, literal
from miles_ci.declare.model import Place, Span
from miles_ci.declare.vocabulary import METRIC_BOUND, Vocabulary
from miles_ci.errors import suggestion

Report = Callable[[ast.AST, str, str], None]
CallFields = tuple[dict[str, Any] | None, Mapping[str, Place], Span | None]


def read_call(
    name: str, call: ast.Call, vocabulary: Vocabulary, report: Report, place: Callable[[ast.AST], Place]
) -> CallFields:
    """Field values (None when any error was reported), where each stands, and the span of `est_time`."""
    before = _Counter(report)
    bound = _bind(name, call, vocabulary, before)
    values: dict[str, Any] = {}
    places: dict[str, Place] = {}
    est_span: Span | None = None
    for field, node in bound.items():
        places[field] = place(node)
        try:
            value = literal(node)
        except NotLiteral as error:
            # The construct itself is the finding, except where the field has no literal to point at.
            before(error.node, "not-literal", f"{field}: {error.construct} is not allowed; write a literal")
            continue
        if value is None and field in NONE_ALLOWED:
            continue
        try:
            values[field] = vocabulary.fields[name][field](value)
        except FieldError as error:
            before(node, error.code, f"{field}: {error}")
            continue
        if field == "est_time":
            est_span = (
                node.lineno,
                node.col_offset,
                getattr(node, "end_lineno", None) or node.lineno,
                getattr(node, "end_col_offset", None) or node.col_offset,
            )
    _require(name, call, bound, values, before)
    return (None if before.count else values), places, est_span


class _Counter:
    """Reports, and knows whether it has."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.count = 0

    def __call__(self, node: ast.AST, code: str, message: str) -> None:
        self.count += 1
        self._report(node, code, message)


def _bind(name: str, call: ast.Call, vocabulary: Vocabulary, report: Report) -> dict[str, ast.expr]:
    bound: dict[str, ast.expr] = {}
    positional, known = vocabulary.positional(name), vocabulary.fields[name]
    for index, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred):
            report(argument, "not-literal", "a starred argument is not allowed; write each argument out")
            break
        if index >= len(positional):
            message = f"{name} takes {len(positional)} positional argument(s): {', '.join(positional)}"
            report(argument, "too-many-arguments", message)
            break
        bound[positional[index]] = argument
    for keyword in call.keywords:
        if keyword.arg is None:
            report(keyword, "not-literal", "a ** argument is not allowed; write each argument out")
        elif keyword.arg in bound:
            report(keyword, "duplicate-field", f"{keyword.arg} is given twice")
        elif keyword.arg in known:
            bound[keyword.arg] = keyword.value
        elif keyword.arg in GPU_ONLY and name == "register_cpu_ci":
            report(
                keyword,
                "forbidden-field",
                f"{keyword.arg} is not allowed on register_cpu_ci: CPU suites have no devices",
            )
        else:
            report(keyword, "unknown-field", f"{name} has no field '{keyword.arg}'{suggestion(keyword.arg, known)}")
    return bound


def _require(name: str, call: ast.Call, bound: dict[str, ast.expr], values: dict[str, Any], report: Report) -> None:
    if name == METRIC_BOUND:
        if "metric" not in bound:
            report(call, "missing-field", "metric is required")
        for side in ("up", "down"):
            if not any(f"{kind}_{side}" in bound for kind in ("rel", "abs")):
                report(call, "missing-field", f"a bound is required on both sides: give rel_{side} or abs_{side}")
        return
    if "suite" not in bound:
        report(call, "missing-field", "suite is required (second positional argument or suite=…)")
    if name != "register_cpu_ci" and "hardware" not in bound:
        report(call, "missing-field", "hardware is required: name models or architectures in order of preference")
