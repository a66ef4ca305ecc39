"""Which registration functions a project has: one for each backend, and the bound on a metric.

`cpu`, `cuda` and `rocm` are always there; `backends` of registry.yaml adds others, and with each its
`register_<backend>_ci`. Whatever else looks like such a name is a misspelling, never somebody else's function.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from miles_ci.declare.fields import BOUND_FIELDS, CPU_FIELDS, GPU_FIELDS, Checker
from miles_ci.errors import nearest

SHIPPED_BACKENDS = ("cpu", "cuda", "rocm")
METRIC_BOUND = "register_metric_bound"
LOOKS_LIKE_ONE = re.compile(r"register_\w*_ci")


def function_of(backend: str) -> str:
    return f"register_{backend}_ci"


@dataclass(frozen=True)
class Vocabulary:
    """The functions that a declaration may call, by the backends of the project."""

    backends: tuple[str, ...] = SHIPPED_BACKENDS

    @classmethod
    def adding(cls, backends: Sequence[str]) -> Vocabulary:
        return cls((*SHIPPED_BACKENDS, *sorted(set(backends) - set(SHIPPED_BACKENDS))))

    @cached_property
    def fields(self) -> Mapping[str, Mapping[str, Checker]]:
        """Function -> its fields."""
        calls = {function_of(name): CPU_FIELDS if name == "cpu" else GPU_FIELDS for name in self.backends}
        return {**calls, METRIC_BOUND: BOUND_FIELDS}

    @cached_property
    def backend_of(self) -> Mapping[str, str]:
        """Function -> backend, for those that register a test."""
        return {function_of(name): name for name in self.backends}

    def knows(self, name: str) -> bool:
        return name in self.fields

    def claims(self, name: str) -> bool:
        """Known, or so alike that it can only be meant as one."""
        if name in self.fields or LOOKS_LIKE_ONE.fullmatch(name) is not None:
            return True
        return name.startswith("reg") and nearest(name, list(self.fields), limit=2) is not None

    @staticmethod
    def positional(name: str) -> tuple[str, ...]:
        return ("metric",) if name == METRIC_BOUND else ("est_time", "suite")


SHIPPED = Vocabulary()
