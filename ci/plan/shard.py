"""Divide tests among shards: longest processing time first, then moves and swaps off the longest shard.

Deterministic: depends on ids, durations and device counts only, not on input order or the hash seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ci.plan.slots import Filling, Job, area, lower_bound, makespan, start_order

MAX_EVALUATIONS = 20_000
# An evaluation costs as much as it has tests to schedule: with thousands of tests in a shard the division
# is even long before 20,000 evaluations, and a plan must stay under half a second.
MAX_SCHEDULED = 100_000

J = TypeVar("J", bound=Job)


@dataclass(frozen=True)
class Division(Generic[J]):
    """Shards in order, each with its tests in start order; lengths and bound in milliseconds."""

    shards: tuple[tuple[J, ...], ...]
    loads: tuple[int, ...]
    lower_bound: int

    @property
    def makespan(self) -> int:
        return max(self.loads, default=0)

    @property
    def ratio(self) -> float:
        """Makespan over lower bound; 1.0 is the best possible."""
        return self.makespan / self.lower_bound if self.lower_bound else 1.0


def shard_count(
    jobs: Sequence[Job],
    *,
    width: int,
    target_ms: int,
    setup_ms: int,
    min_shards: int,
    max_shards: int,
    slots: int | None = None,
    units: int | None = None,
) -> int:
    """How many shards the work deserves: ceil(area / (width x (target - setup))), within all limits.

    `slots` are the runners that exist (None: not counted), `units` how many pieces the tests can form.
    Raises `ValueError` when the target leaves no time after the setup.
    """
    if target_ms <= setup_ms:
        raise ValueError(f"target wall time {target_ms} ms leaves nothing after setup {setup_ms} ms")
    pieces = len(jobs) if units is None else units
    if pieces == 0:
        return 0
    wanted = -(
        -sum(job.ms * (width if job.serial else job.devices) for job in jobs) // (width * (target_ms - setup_ms))
    )
    ceiling = min(max_shards, pieces, slots if slots is not None else max_shards)
    return max(1, min(max(wanted, min_shards), ceiling))


def divide(jobs: Sequence[J], *, width: int, shards: int) -> Division[J]:
    """Put each test in exactly one of `shards` shards (fewer when there are fewer tests), none empty."""
    count = min(shards, len(jobs))
    if count == 0:
        return Division((), (), 0)
    bound = lower_bound(jobs, width, count)
    groups = _longest_first(jobs, width, count)
    _Improver(groups, width, bound).run()
    ordered = [start_order(group) for group in groups]
    # Shard numbers carry no meaning; a fixed order keeps plans comparable.
    ordered.sort(key=lambda group: group[0].id)
    return Division(
        tuple(tuple(group) for group in ordered),  # type: ignore[arg-type]
        tuple(makespan(group, width) for group in ordered),
        bound,
    )


def _longest_first(jobs: Sequence[J], width: int, count: int) -> list[list[J]]:
    """Largest k x est first, each to the shard whose length it raises least."""
    groups: list[list[J]] = [[] for _ in range(count)]
    fillings = [Filling(width) for _ in range(count)]
    ordered = sorted(jobs, key=lambda job: (-job.ms * (width if job.serial else job.devices), job.id))
    for position, job in enumerate(ordered):
        devices = width if job.serial else job.devices
        empty = [index for index in range(count) if not groups[index]]
        # The last tests fill what is still empty: no shard may ask for a runner and have nothing to run.
        candidates = empty if len(ordered) - position <= len(empty) else range(count)
        best = min(candidates, key=lambda i: (fillings[i].bound_with(job.ms, devices), fillings[i].area, i))
        groups[best].append(job)
        fillings[best].add(job.ms, devices)
    return groups


class _Improver(Generic[J]):
    """Repeatedly take the longest shard and find a move or swap that shortens it."""

    def __init__(self, groups: list[list[J]], width: int, bound: int) -> None:
        self.groups = groups
        self.width = width
        self.bound = bound
        self.loads = [makespan(group, width) for group in groups]
        self.areas = [area(group, width) for group in groups]
        # Lengths add up when every test takes the whole runner; then a trial needs no schedule.
        self.additive = all(job.serial or job.devices == width for group in groups for job in group)
        self.evaluations = 0
        self.scheduled = 0

    def run(self) -> None:
        while len(self.groups) > 1 and self._within_budget():
            worst = max(range(len(self.groups)), key=lambda index: (self.loads[index], -index))
            if self.loads[worst] <= self.bound or not self._improve(worst):
                return

    def _within_budget(self) -> bool:
        return self.evaluations < MAX_EVALUATIONS and self.scheduled < MAX_SCHEDULED

    def _improve(self, worst: int) -> bool:
        """Apply the best exchange with the first shard that offers one; False when none does."""
        others = sorted(
            (index for index in range(len(self.groups)) if index != worst), key=lambda i: (self.loads[i], i)
        )
        for other in others:
            if self.loads[other] >= self.loads[worst]:
                break
            found = self._exchange(worst, other)
            if found is not None:
                self.groups[worst], self.groups[other] = found[0], found[1]
                for index in (worst, other):
                    self.areas[index] = area(self.groups[index], self.width)
                self.loads[worst], self.loads[other] = found[2], found[3]
                return True
            if not self._within_budget():
                return False
        return False

    def _exchange(self, worst: int, other: int) -> tuple[list[J], list[J], int, int] | None:
        """The best exchange when lengths simply add up, else the first that shortens the pair."""
        best: tuple[int, J, J | None, int, int] | None = None
        limit = self.loads[worst]
        mine = sorted(self.groups[worst], key=lambda job: (-job.ms, job.id))
        theirs: list[J | None] = [None, *sorted(self.groups[other], key=lambda job: (-job.ms, job.id))]
        for take in theirs:
            for give in mine:
                if not self._within_budget():
                    break
                if (take is None and len(mine) == 1) or not self._promising(worst, other, give, take):
                    continue
                new_worst, new_other = self._trial(worst, other, give, take)
                longest = max(new_worst, new_other)
                if longest < limit:
                    best, limit = (longest, give, take, new_worst, new_other), longest
                    if not self.additive:
                        break
            if best is not None and not self.additive:
                break
        if best is None:
            return None
        left, right = self._after(worst, other, best[1], best[2])
        return left, right, best[3], best[4]

    def _promising(self, worst: int, other: int, give: J, take: J | None) -> bool:
        """Whether areas alone leave room for a gain: the other shard must not become as long as this one."""
        gained = self._area(give) - (self._area(take) if take else 0)
        if self.additive:
            return gained > 0 and self.loads[other] + give.ms - (take.ms if take else 0) < self.loads[worst]
        return self.areas[other] + gained < self.loads[worst] * self.width and (gained > 0 or take is not None)

    def _area(self, job: J) -> int:
        return job.ms * (self.width if job.serial else job.devices)

    def _after(self, worst: int, other: int, give: J, take: J | None) -> tuple[list[J], list[J]]:
        left = [job for job in self.groups[worst] if job is not give] + ([take] if take else [])
        right = [job for job in self.groups[other] if job is not take] + [give]
        return left, right

    def _trial(self, worst: int, other: int, give: J, take: J | None) -> tuple[int, int]:
        self.evaluations += 1
        if self.additive:
            difference = give.ms - (take.ms if take else 0)
            return self.loads[worst] - difference, self.loads[other] + difference
        left, right = self._after(worst, other, give, take)
        self.scheduled += len(left) + len(right)
        return makespan(left, self.width), makespan(right, self.width)
