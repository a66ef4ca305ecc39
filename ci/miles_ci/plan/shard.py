"""Divide tests among shards: longest processing time first, then moves and swaps off the longest shard.

Deterministic: depends on ids, durations and device counts only, not on input order or the hash seed.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from miles_ci.plan.slots import Filling, Job, area, lower_bound, makespan, start_key

MAX_EVALUATIONS = 20_000
# Where a trial needs a schedule, it costs as much as it has tests, so their number bounds the search too, and
# it ends 1 % above the bound: estimates are never that good, and a plan must stay under half a second.
MAX_SCHEDULED = 20_000
CLOSE_ENOUGH = 1.01

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
    wanted = -(-area(jobs, width) // (width * (target_ms - setup_ms)))
    ceiling = min(max_shards, pieces, slots if slots is not None else max_shards)
    return max(1, min(max(wanted, min_shards), ceiling))


def divide(jobs: Sequence[J], *, width: int, shards: int) -> Division[J]:
    """Put each test in exactly one of `shards` shards (fewer when there are fewer tests), none empty."""
    count = min(shards, len(jobs))
    if count == 0:
        return Division((), (), 0)
    ordered = sorted(jobs, key=start_key)
    bound = lower_bound(ordered, width, count)
    table = _Table(ordered, width)
    groups = _longest_first(table, count)
    search = _Search(table, groups, bound)
    search.run()
    # Shard numbers carry no meaning; by the first test's place in the queue they are at least stable.
    final = sorted(zip(search.groups, search.loads, strict=True), key=lambda pair: pair[0][0])
    return Division(
        tuple(tuple(ordered[index] for index in group) for group, _ in final), tuple(load for _, load in final), bound
    )


class _Table:
    """The tests as columns; a test is its index in start order, so a sorted group is a queue."""

    def __init__(self, ordered: Sequence[Job], width: int) -> None:
        self.width = width
        self.ms = [job.ms for job in ordered]
        self.serial = [job.serial for job in ordered]
        self.devices = [width if job.serial else job.devices for job in ordered]
        self.area = [ms * devices for ms, devices in zip(self.ms, self.devices, strict=True)]
        self.ids = [job.id for job in ordered]
        # Lengths simply add up when no two tests can overlap; then a trial needs no schedule.
        self.additive = all(2 * devices > width for devices in self.devices)
        self.any_serial = any(self.serial)

    def length(self, group: Sequence[int]) -> int:
        extra = 0
        if self.any_serial:
            extra = sum(self.ms[index] for index in group if self.serial[index])
            group = [index for index in group if not self.serial[index]]
        return extra + makespan([self.ms[i] for i in group], [self.devices[i] for i in group], self.width)


def _longest_first(table: _Table, count: int) -> list[list[int]]:
    """Largest devices x est first, each to the shard whose length it raises least."""
    groups: list[list[int]] = [[] for _ in range(count)]
    fillings = [Filling(table.width) for _ in range(count)]
    order = sorted(range(len(table.ms)), key=lambda index: (-table.area[index], table.ids[index]))
    empty = count
    for position, index in enumerate(order):
        ms, devices = table.ms[index], table.devices[index]
        # The last tests fill what is still empty: no shard may ask for a runner and have nothing to run.
        must_fill = len(order) - position <= empty
        best, best_key = -1, (0, 0)
        for shard, filling in enumerate(fillings):
            if must_fill and groups[shard]:
                continue
            key = (filling.bound_with(ms, devices), filling.area)
            if best < 0 or key < best_key:
                best, best_key = shard, key
        empty -= not groups[best]
        groups[best].append(index)
        fillings[best].add(ms, devices)
    for group in groups:
        group.sort()
    return groups


class _Search:
    """Repeatedly take the longest shard and find a move or swap that shortens it."""

    def __init__(self, table: _Table, groups: list[list[int]], bound: int) -> None:
        self.table = table
        self.groups = groups
        self.goal = bound if table.additive else int(bound * CLOSE_ENOUGH)
        self.loads = [table.length(group) for group in groups]
        self.areas = [sum(table.area[index] for index in group) for group in groups]
        self.evaluations = 0
        self.scheduled = 0

    def run(self) -> None:
        while len(self.groups) > 1 and self._within_budget():
            worst = max(range(len(self.groups)), key=lambda index: (self.loads[index], -index))
            if self.loads[worst] <= self.goal or not self._improve(worst):
                return

    def _within_budget(self) -> bool:
        return self.evaluations < MAX_EVALUATIONS and self.scheduled < MAX_SCHEDULED

    def _improve(self, worst: int) -> bool:
        """Apply an exchange with the shortest shard that offers one; False when none does."""
        for other in sorted(range(len(self.groups)), key=lambda index: (self.loads[index], index)):
            if self.loads[other] >= self.loads[worst]:
                return False
            found = self._exchange(worst, other)
            if found is not None:
                give, take, new_worst, new_other = found
                self.groups[worst], self.groups[other] = self._after(worst, other, give, take)
                self.loads[worst], self.loads[other] = new_worst, new_other
                gained = self.table.area[give] - (0 if take is None else self.table.area[take])
                self.areas[worst] -= gained
                self.areas[other] += gained
                return True
            if not self._within_budget():
                return False
        return False

    def _exchange(self, worst: int, other: int) -> tuple[int, int | None, int, int] | None:
        """The best exchange when lengths simply add up, else the first that shortens the pair."""
        best: tuple[int, int | None, int, int] | None = None
        limit = self.loads[worst]
        for take in (None, *self.groups[other]):
            for give in self.groups[worst]:
                if not self._within_budget():
                    return best
                if (take is None and len(self.groups[worst]) == 1) or not self._promising(worst, other, give, take):
                    continue
                new_worst, new_other = self._trial(worst, other, give, take)
                if max(new_worst, new_other) < limit:
                    best, limit = (give, take, new_worst, new_other), max(new_worst, new_other)
                    if not self.table.additive:
                        return best
        return best

    def _promising(self, worst: int, other: int, give: int, take: int | None) -> bool:
        """Whether areas alone leave room for a gain: the other shard must not become as long as this one."""
        table = self.table
        gained = table.area[give] - (0 if take is None else table.area[take])
        if table.additive:
            shift = table.ms[give] - (0 if take is None else table.ms[take])
            return 0 < shift < self.loads[worst] - self.loads[other]
        return self.areas[other] + gained < self.loads[worst] * table.width and (gained > 0 or take is not None)

    def _after(self, worst: int, other: int, give: int, take: int | None) -> tuple[list[int], list[int]]:
        left = [index for index in self.groups[worst] if index != give]
        right = [index for index in self.groups[other] if index != take]
        insort(right, give)
        if take is not None:
            insort(left, take)
        return left, right

    def _trial(self, worst: int, other: int, give: int, take: int | None) -> tuple[int, int]:
        self.evaluations += 1
        if self.table.additive:
            shift = self.table.ms[give] - (0 if take is None else self.table.ms[take])
            return self.loads[worst] - shift, self.loads[other] + shift
        left, right = self._after(worst, other, give, take)
        self.scheduled += len(left) + len(right)
        return self.table.length(left), self.table.length(right)
