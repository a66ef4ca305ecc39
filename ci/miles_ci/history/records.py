"""Rows of the history store: plain frozen data, the same for every implementation of the store."""

from __future__ import annotations

import math
from dataclasses import dataclass

CANDIDATE = "candidate"
TRUSTED = "trusted"


@dataclass(frozen=True)
class DurationRow:
    """One attempt of one test file (or of one node id, `path::name`) on one hardware model.

    `duration_ms` is wall time of the test itself, `recorded_at` UTC seconds since the epoch. The key is
    (test, suite, hardware, run_id, attempt): writing a row twice keeps the first.
    """

    test: str
    suite: str
    backend: str
    hardware: str
    num_gpus: int
    duration_ms: int
    outcome: str
    run_id: str
    recorded_at: float
    attempt: int = 1
    commit: str = ""

    def __post_init__(self) -> None:
        if not self.test or not self.suite or not self.run_id:
            raise ValueError("a duration row needs test, suite and run_id")
        if self.duration_ms < 0:
            raise ValueError(f"{self.test}: duration_ms is {self.duration_ms}, must be >= 0")
        if not math.isfinite(self.recorded_at):
            raise ValueError(f"{self.test}: recorded_at is {self.recorded_at}, must be finite")


@dataclass(frozen=True)
class MetricIdentity:
    """Which series of measurements a value belongs to; a change of any field starts a new series."""

    test: str
    backend: str
    suite: str
    hardware: str
    num_gpus: int
    metric: str
    steps: str
    spec_digest: str

    def columns(self) -> tuple[str | int, ...]:
        return (
            self.test,
            self.backend,
            self.suite,
            self.hardware,
            self.num_gpus,
            self.metric,
            self.steps,
            self.spec_digest,
        )


@dataclass(frozen=True)
class MetricValue:
    """One finite value of one series from one run; `state` is `candidate` or `trusted`.

    `position` is the place in a series of several values (`steps="all"` or a list), 0 otherwise. The key is
    (identity, run_id, position).
    """

    identity: MetricIdentity
    value: float
    run_id: str
    recorded_at: float
    state: str = CANDIDATE
    position: int = 0
    commit: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"{self.identity.metric}: {self.value} is not finite and is never stored")
        if self.state not in (CANDIDATE, TRUSTED):
            raise ValueError(f"{self.identity.metric}: state {self.state!r} is neither candidate nor trusted")
