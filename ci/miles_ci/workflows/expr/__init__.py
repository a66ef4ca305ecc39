"""The GitHub Actions expression language: `evaluate("needs.a.result == 'success'", contexts=...)`.

`parse` gives a tree whose unknown functions and contexts were already refused, `compile_tree` turns it into a
closure, `status_functions` names the status functions a tree really calls (a comment or a string literal does
not count). Left out: template strings around expressions, which `miles_ci.workflows.model` handles.
"""

from miles_ci.workflows.expr.evaluate import Env, compile_tree, evaluate, interpolate
from miles_ci.workflows.expr.syntax import (
    STATUS_FUNCTIONS,
    ExpressionError,
    Node,
    context_paths,
    parse,
    status_functions,
)
from miles_ci.workflows.expr.values import is_truthy, to_text

__all__ = [
    "STATUS_FUNCTIONS",
    "Env",
    "ExpressionError",
    "Node",
    "compile_tree",
    "context_paths",
    "evaluate",
    "interpolate",
    "is_truthy",
    "parse",
    "status_functions",
    "syntax",
    "to_text",
    "values",
]
