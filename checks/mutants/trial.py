"""One change, the tests that reach it, and what became of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from checks.mutants.changes import Change
from checks.mutants.copy import Copy
from checks.mutants.plugin import Only
from checks.mutants.reach import Reach

Verdict = Literal["seen", "stopped", "survived", "unreached", "listed"]
# pytest's exit codes: a test failed; collection failed (also: a conftest or plugin does not import).
_SEEN = frozenset({1, 2, 4, 70})
_NO_ITEM = 5


@dataclass(frozen=True)
class Outcome:
    """`seen`: a test failed; `stopped`: by a limit or a signal; `unreached`: no test runs the line; `listed`: a
    survivor with a reason, not run. `items`: how many tests reach it."""

    change: Change
    verdict: Verdict
    items: int
    detail: str


class Trials:
    """Runs changes of one package, whose tests were measured before."""

    def __init__(self, copy: Copy, reach: Reach, *, patience_s: float) -> None:
        self.copy, self.reach, self.patience_s = copy, reach, patience_s

    def control(self, change: Change) -> str | None:
        """The tests of a change without it: what they print when they fail, which makes every verdict worthless."""
        items = self.reach.items(change)
        end = self._tests(items) if items else None
        return None if end is None or end[0] == 0 else end[1]

    def run(self, change: Change) -> Outcome:
        items = self.reach.items(change)
        if not items:
            return Outcome(change, "unreached", 0, "no test runs this line")
        source = (self.copy.root / change.path).read_bytes()
        self.copy.write(change.path, change.applied(source))
        try:
            code, detail = self._tests(items)
        finally:
            self.copy.write(change.path, source)
        if code is None:
            return Outcome(change, "stopped", len(items), detail)
        if code == 0:
            return Outcome(change, "survived", len(items), f"{len(items)} tests pass")
        if code in _SEEN:
            return Outcome(change, "seen", len(items), detail)
        raise RuntimeError(f"{change}: pytest ended with {code}\n{detail}")

    def _tests(self, items: frozenset[str]) -> tuple[int | None, str]:
        """Quick files first. (exit code or None, the failing test or the end of the output)"""
        cost: dict[str, float] = defaultdict(float)
        for item in items:
            cost[item.partition("::")[0]] += self.reach.seconds[item]
        files = sorted(cost, key=lambda file: (cost[file], file))
        only = Only(items, self.reach.seconds, patience_s=self.patience_s)
        # Loading is no part of what was measured, tracing is; a machine may be busy, so only processor time is tight.
        seconds = sum(cost.values())

        def work() -> int:
            import pytest

            return int(pytest.main(["-q", "-x", "--tb=line", "-p", "no:cacheprovider", *files], plugins=[only]))

        end = self.copy.run(work, cpu_s=self.patience_s + 4 * seconds, wall_s=60 + 4 * self.patience_s + 10 * seconds)
        if end.code is None:
            return None, end.how
        if end.code == _NO_ITEM:
            return 1, "its tests are gone"
        failed = [line for line in end.output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return end.code, failed[0][:200] if failed else end.output[-1500:]
