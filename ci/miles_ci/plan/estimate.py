"""How long each test of a suite will take, and where the number comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from miles_ci.plan.durations import Durations
from miles_ci.select.registrations import Registration

DEFAULT_CPU_MS, DEFAULT_DEVICE_MS = 5_000, 300_000
OBSERVED, DECLARED, SUITE_MEAN, DEFAULT = "observed", "declared", "suite-mean", "default"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Integer milliseconds, at least 1, and the source: observed, declared, suite-mean or default."""

    ms: int
    source: str


def estimate(registrations: Iterable[Registration], durations: Durations, hardware: str) -> dict[str, Estimate]:
    """Estimates of the tests of one suite on one hardware model, by path.

    Observed (at least 3 runs) before declared; a test with neither gets the mean of the known tests of the
    suite, and when nothing is known 5 s on CPU and 300 s on GPU.
    """
    known: dict[str, Estimate] = {}
    unknown: list[Registration] = []
    for item in registrations:
        learned = durations.get(item.path, item.suite, hardware)
        if learned is not None:
            known[item.path] = Estimate(learned.ms, OBSERVED)
        elif item.declaration.est_time is not None:
            known[item.path] = Estimate(max(1, round(item.declaration.est_time * 1000)), DECLARED)
        else:
            unknown.append(item)
    if not unknown:
        return known
    if known:
        fallback = Estimate(max(1, sum(value.ms for value in known.values()) // len(known)), SUITE_MEAN)
    else:
        fallback = Estimate(DEFAULT_CPU_MS if unknown[0].backend == "cpu" else DEFAULT_DEVICE_MS, DEFAULT)
    for item in unknown:
        known[item.path] = fallback
    return known
