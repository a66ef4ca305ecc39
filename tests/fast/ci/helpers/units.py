"""A planned unit with only the fields that a test is about."""

from __future__ import annotations

from typing import Any

from miles_ci.plan.model import TEST, Unit


def unit(id: str, path: str, est_s: float = 1.0, timeout_s: int = 60, **fields: Any) -> Unit:
    known = {"suite": "s", "kind": TEST, "est_source": "declared", "devices": 0}
    return Unit(id=id, path=path, ms=round(est_s * 1000), timeout_s=timeout_s, **{**known, **fields})
