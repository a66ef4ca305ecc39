"""The expression language by example; agreement with GitHub's own package is in test_expr_differential.py."""

from __future__ import annotations

from typing import Any

import pytest

from miles_ci.workflows.expr import (
    Env,
    ExpressionError,
    context_paths,
    evaluate,
    interpolate,
    parse,
    status_functions,
    to_text,
)

CONTEXTS = {
    "github": {"event": {"labels": [{"name": "A"}, {"name": "b"}], "n": 3}, "Ref": "x"},
    "needs": {"a": {"result": "success"}},
}


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("'a' && 'b' || 'c'", "b"), ("'' && 'b' || 'c'", "c"), ("1 == '1'", True), ("'ABC' == 'abc'", True), ("null == 0", True), ("true == 1", True), ("'x' == 0", False),
        ("github.event.labels.*.name", ["A", "b"]), ("contains(github.event.labels.*.name, 'B')", True), ("github.REF", "x"), ("github['event'].n", 3.0), ("github.none.deeper", None),
        ("startsWith('Hello', 'he')", True), ("endsWith('x.PY', '.py')", True), ("format('{0}-{{{1}}}', 1, 'b')", "1-{b}"), ("join(github.event.labels.*.name, '+')", "A+b"),
        ("toJSON(fromJSON('[1, {\"a\": null}]'))", '[\n  1,\n  {\n    "a": null\n  }\n]'), ("'it''s ''two'''", "it's 'two'"), ("!github.none", True), ("0x10", 16.0),
        ("1e21 == 1000000000000000000000", True), ("NaN == NaN", False), ("case(false, 'a', true, 'b', 'c')", "b"), ("github.event.labels[5]", None), ("github.event.labels[1.9].name", "b"),
    ],
)  # fmt: skip
def test_values(source: str, value: Any) -> None:
    assert evaluate(source, CONTEXTS) == value


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.1 + 0.2, "0.3"),
        (1.0, "1"),
        (-0.0, "0"),
        (1e21, "1e+21"),
        (1e-7, "1e-7"),
        (123456.5, "123456.5"),
        (float("inf"), "Infinity"),
    ],
)
def test_numbers_become_text_as_in_a_browser(number: float, text: str) -> None:
    assert to_text(number) == text


@pytest.mark.parametrize(
    "source",
    [
        "",
        "a.b",
        "x(",
        "fromJSON('')",
        "fromJSON('{')",
        "format('{1}', 'a')",
        "format('{')",
        "success()",
        "1 = 1",
        "a & b",
        "'x",
        "a..b",
        "(" * 51 + "1" + ")" * 51,
        "'" + "x" * 21_000 + "'",
    ],
)
def test_what_is_wrong_is_an_error(source: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(source, CONTEXTS)


def test_the_error_names_symbol_position_and_what_is_available() -> None:
    with pytest.raises(
        ExpressionError, match=r"unknown context \(available here: github, needs\) 'secrets' at position 5"
    ):
        evaluate("1 ||secrets.X", CONTEXTS)


def test_status_functions_and_paths_are_read_from_the_tree() -> None:
    tree = parse(
        "!cancelled() && needs.plan.outputs['x'] == 'always()' && github.event[needs.a.result]", functions=["cancelled"]
    )
    assert status_functions(tree) == {"cancelled"}
    assert context_paths(tree) == {
        ("needs", "plan", "outputs", "x"),
        ("github", "event", "*"),
        ("needs", "a", "result"),
    }


def test_a_lone_expression_keeps_its_kind_and_mixed_text_becomes_a_string() -> None:
    env = Env({"inputs": {"n": 3.0, "s": "a}}b"}})
    assert interpolate("${{ inputs.n }}", env) == 3.0
    assert interpolate("x-${{ inputs.n }}-${{ '}}' }}", env) == "x-3-}}"
    assert interpolate(7, env) == 7
