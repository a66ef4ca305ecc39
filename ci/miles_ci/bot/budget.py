"""GitHub's secondary limits, kept on our side: points a minute, content writes, requests an hour."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from miles_ci.errors import CiError, ExitCode

MINUTE, HOUR = 60.0, 3600.0


class BudgetExhausted(CiError):
    """An hourly limit is reached; waiting would outlast the job."""

    exit_code = ExitCode.INFRA


@dataclass
class Window:
    """A sliding window of weighted events."""

    limit: int
    span_s: float
    events: deque[tuple[float, int]] = field(default_factory=deque)

    def wait_for(self, weight: int, now: float) -> float:
        """Seconds until `weight` more fits."""
        while self.events and self.events[0][0] <= now - self.span_s:
            self.events.popleft()
        used, at = sum(cost for _, cost in self.events), 0
        wait = 0.0
        while used + weight > self.limit and at < len(self.events):
            wait = self.events[at][0] + self.span_s - now
            used -= self.events[at][1]
            at += 1
        return max(wait, 0.0)


@dataclass
class Budget:
    """`spend` waits for the minute windows and refuses when an hour is used up."""

    clock: Callable[[], float]
    sleep: Callable[[float], None]
    points: Window = field(default_factory=lambda: Window(900, MINUTE))
    writes: Window = field(default_factory=lambda: Window(80, MINUTE))
    writes_hour: Window = field(default_factory=lambda: Window(500, HOUR))
    requests_hour: Window = field(default_factory=lambda: Window(1000, HOUR))

    def spend(self, method: str) -> None:
        is_write = method != "GET"
        costs = [(self.points, 5 if is_write else 1), (self.requests_hour, 1)]
        costs += [(self.writes, 1), (self.writes_hour, 1)] if is_write else []
        for window, weight in costs:
            wait = window.wait_for(weight, self.clock())
            if wait > 0 and window.span_s == HOUR:
                raise BudgetExhausted(
                    f"GitHub: {window.limit} requests of this kind in an hour are used up; next in {wait:.0f} s"
                )
            if wait > 0:
                self.sleep(wait)
        for window, weight in costs:
            window.events.append((self.clock(), weight))
