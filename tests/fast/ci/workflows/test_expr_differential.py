"""Our expression evaluator against GitHub's own package on generated expressions."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from miles_ci.workflows import node_tools
from miles_ci.workflows.expr import ExpressionError, evaluate, to_text
from miles_ci.workflows.expr.values import dump_json

SEED, WANTED = 20_261_130, 2_500
CONTEXTS: dict[str, Any] = {
    "github": {
        "event_name": "pull_request",
        "Actor": "Octo-Cat",
        "event": {
            "pull_request": {"number": 12, "draft": False, "labels": [{"name": "run-ci-all", "id": 7}, {"name": "X"}]},
            "empty": "",
            "nested": [[1, 2], [3], []],
        },
    },
    "needs": {
        "plan": {"result": "success", "outputs": {"count": "0", "shards": "[1,2,3]", "text": "Straße ıI"}},
        "stage": {"result": "skipped", "outputs": {}},
    },
    "matrix": {"n": 1.5, "big": 1e21, "small": 1e-7, "neg": -0.0, "flag": True, "none": None},
}
NUMBERS = [
    "0",
    "1",
    "-1",
    "1.5",
    "0x1F",
    "1e3",
    ".5",
    "-0",
    "1e21",
    "1e-7",
    "123456789.125",
    "NaN",
    "Infinity",
    "+2",
    "0.1",
]
STRINGS = [
    "''",
    "'a'",
    "'A'",
    "'0'",
    "' 1 '",
    "'it''s'",
    "'true'",
    "'1e3'",
    "'0b11'",
    "'success'",
    "'ß'",
    "'always()'",
    "'NaN'",
]
PATHS = [
    "github", "github.event_name", "github.actor", "github.event.pull_request.number", "github.event.pull_request.draft",
    "github.event.pull_request.labels", "github.event.pull_request.labels.*.name", "github.event.nested.*[0]",
    "github.event.pull_request.labels[0]", "github.event.missing.deep", "github['event']['empty']", "github.*",
    "needs.plan.result", "needs.*.result", "needs.plan.outputs.count", "needs.stage.outputs.none", "needs.plan.outputs.text",
    "matrix.n", "matrix.big", "matrix.small", "matrix.neg", "matrix.flag", "matrix.none", "matrix[github.event.empty]",
    "fromJSON(needs.plan.outputs.shards)", "fromJSON(needs.plan.outputs.shards)[1]", "github.event.nested[0].*",
    "github.event.pull_request.labels[true].name", "github.event.nested[null]", "(github.event).pull_request",
]  # fmt: skip
FORMATS = ["'{0}'", "'{0} {1}'", "'{{x}} {0}'", "'}}'", "'{1}{0}'", "'{0'", "'plain'", "'{0:x}'"]


class Generator:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def expression(self, depth: int = 0) -> str:
        pick = self.random.random()
        if depth >= 4 or pick < 0.22:
            return self.random.choice(
                [self.random.choice(kind) for kind in (NUMBERS, STRINGS, PATHS, PATHS, ["true", "false", "null"])]
            )
        one, two = (lambda: self.expression(depth + 1)), (lambda: self.expression(depth + 2))
        if pick < 0.42:
            return f"{two()} {self.random.choice(['==', '!=', '<', '<=', '>', '>='])} {two()}"
        if pick < 0.60:
            return f" {self.random.choice(['&&', '||'])} ".join(one() for _ in range(self.random.randint(2, 4)))
        if pick < 0.68:
            return "!" * self.random.randint(1, 2) + f"({one()})"
        if pick < 0.74:
            return f"({one()})"
        if pick < 0.78:
            return self.random.choice(["success()", "failure()", "cancelled()", "always()"])
        return self.call(two)

    def call(self, part: Any) -> str:
        name = self.random.choice(
            ["contains", "startsWith", "endsWith", "format", "join", "toJSON", "fromJSON", "CONTAINS", "case"]
        )
        if name == "format":
            return f"format({self.random.choice(FORMATS)}, {part()}, {part()})"
        if name == "join":
            return f"join({part()}, {part()})" if self.random.random() < 0.5 else f"join({part()})"
        if name == "toJSON":
            return f"toJSON({part()})"
        if name == "fromJSON":
            return f"fromJSON({self.random.choice(['toJSON(' + part() + ')', part()])})"
        if name == "case":
            return f"case({part()} == {part()}, {part()}, {part()})"
        return f"{name}({part()}, {part()})"


KINDS = {type(None): "Null", bool: "Boolean", float: "Number", str: "String", dict: "Dictionary"}


def ours(expression: str, status: dict[str, bool]) -> dict[str, Any]:
    functions = {name: (lambda value=value: value) for name, value in status.items()}
    try:
        value = evaluate(expression, CONTEXTS, functions)
    except ExpressionError as error:
        return {"error": str(error)}
    kind = "Array" if isinstance(value, list) else KINDS[type(value)]
    return {"kind": kind, "text": to_text(value), "json": json.loads(dump_json(value))}


@pytest.mark.skipif(node_tools.missing() is not None, reason=node_tools.missing() or "")
def test_two_thousand_five_hundred_generated_expressions_agree_with_githubs_evaluator() -> None:
    generator = Generator(SEED)
    expressions = sorted({generator.expression() for _ in range(WANTED * 2)})
    generator.random.shuffle(expressions)
    expressions = [text for text in expressions if len(text) > 6][:WANTED]
    assert len(expressions) == WANTED
    status = {"success": False, "failure": True, "cancelled": False, "always": True}
    cases = [{"expression": text, "contexts": {**CONTEXTS, "__status": status}} for text in expressions]
    differences, errors = [], 0
    for text, theirs in zip(expressions, node_tools.run_node("evaluate.mjs", stdin=cases), strict=True):
        mine = ours(text, status)
        if "error" in theirs or "error" in mine:
            errors += 1
            if ("error" in theirs) != ("error" in mine):
                differences.append((text, theirs, mine))
            continue
        theirs["json"] = json.loads(theirs["json"])
        if theirs != mine:
            differences.append((text, theirs, mine))
    assert not differences, differences[:5]
    assert errors < WANTED * 0.35  # most cases compare values, not refusals


@pytest.mark.skipif(node_tools.missing() is not None, reason=node_tools.missing() or "")
@pytest.mark.parametrize(
    "text",
    [
        "github.",
        "a b",
        "foo(1)",
        "unknown.x",
        "1 +",
        "contains('a')",
        "'open",
        "case(true, 1)",
        "(1",
        "!",
        "a.b[",
        "0x",
        "&",
    ],
)
def test_both_refuse_what_cannot_be_read(text: str) -> None:
    theirs = node_tools.run_node("evaluate.mjs", stdin=[{"expression": text, "contexts": {"github": {}}}])[0]
    assert "error" in theirs
    with pytest.raises(ExpressionError):
        evaluate(text, {"github": {}})
