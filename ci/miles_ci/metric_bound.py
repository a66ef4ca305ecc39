"""A bound that a measured number must keep: one type from the declaration through the plan to the verdict."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SPEC = ("metric", "steps", "magnitude", "rel_up", "abs_up", "rel_down", "abs_down", "limit", "warmup")


@dataclass(frozen=True, slots=True)
class MetricBound:
    """What `register_metric_bound` declares. Relative bounds are fractions, absolute ones are in the metric's unit.

    `path`, `line` and `column` say where, and decide nothing: two bounds with the same spec are equal.
    """

    metric: str
    steps: str | tuple[int, ...] = "last"
    magnitude: bool = True
    rel_up: float = 0.0
    abs_up: float = 0.0
    rel_down: float = 0.0
    abs_down: float = 0.0
    limit: float | None = None
    warmup: int = 5
    path: str = field(default="", compare=False)
    line: int = field(default=1, compare=False)
    column: int = field(default=1, compare=False)

    def spec(self) -> dict[str, object]:
        """What decides the verdict, as JSON: everything except the place in the source."""
        values = {name: getattr(self, name) for name in SPEC}
        return {**values, "steps": self.steps if isinstance(self.steps, str) else list(self.steps)}

    @classmethod
    def from_spec(cls, entry: Mapping[str, Any]) -> MetricBound:
        """The inverse of `spec`. `TypeError` or `KeyError` for an entry that is none."""
        values = {name: entry[name] for name in SPEC}
        if set(entry) != set(SPEC):
            raise TypeError(f"a metric bound has no field {min(set(entry) - set(SPEC))!r}")
        return cls(
            **{**values, "steps": values["steps"] if isinstance(values["steps"], str) else tuple(values["steps"])}
        )

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of the spec; part of the identity of a trusted history."""
        text = json.dumps(self.spec(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
