"""How tests that need 1..G devices share one runner with G devices: the schedule, its length, its bound.

The runner follows the same rule: start the longest first (decision 0501); when the head of the queue does
not fit, reserve the earliest moment at which it will, and let a later test jump ahead only if its estimated
end is no later than that moment, so a test of 8 devices never starves. Serial tests run at the end, alone.
All times are integer milliseconds.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Job(Protocol):
    """What a schedule needs to know of a test."""

    @property
    def id(self) -> str: ...
    @property
    def ms(self) -> int: ...
    @property
    def devices(self) -> int: ...
    @property
    def serial(self) -> bool: ...


AnyJob = TypeVar("AnyJob", bound=Job)


@dataclass(frozen=True, slots=True)
class Start:
    """A test starts `at_ms` after the shard began and holds `devices` until `end_ms`."""

    id: str
    at_ms: int
    end_ms: int
    devices: int


def start_key(job: Job) -> tuple[bool, int, int, str]:
    """Sort key of the queue: longest first, then most devices, then id; serial tests last."""
    return (job.serial, -job.ms, -job.devices, job.id)


def start_order(jobs: Iterable[AnyJob]) -> list[AnyJob]:
    """The order in which the planner expects them to start."""
    return sorted(jobs, key=start_key)


def schedule(jobs: Sequence[Job], width: int) -> list[Start]:
    """When each test starts on a runner with `width` devices, in order of start.

    Raises `ValueError` for a test that never fits.
    """
    ordered = sorted(jobs, key=start_key)
    for job in ordered:
        if job.devices > width:
            raise ValueError(f"{job.id} needs {job.devices} devices, the runner has {width}")
    parallel = [job for job in ordered if not job.serial]
    begun: list[tuple[int, int]] = []
    end = run_queue([job.ms for job in parallel], [job.devices for job in parallel], width, begun)
    starts = [Start(parallel[index].id, at, at + parallel[index].ms, parallel[index].devices) for index, at in begun]
    for job in ordered[len(parallel) :]:
        starts.append(Start(job.id, end, end + job.ms, job.devices))
        end += job.ms
    return starts


def run_queue(ms: Sequence[int], devices: Sequence[int], width: int, begun: list[tuple[int, int]] | None = None) -> int:
    """The end of the last of the queued tests, which are given in start order (longest first).

    `begun` receives (index, start) of each. The queue is kept by device count: in each class the tests stand
    longest first, so the first one short enough to jump ahead is found by bisection.
    """
    classes: dict[int, list[int]] = {}
    for index, count in enumerate(devices):
        classes.setdefault(count, []).append(index)
    # In a class, negated durations ascend: what `bisect` needs.
    negated = {count: [-ms[index] for index in members] for count, members in classes.items()}
    running: list[tuple[int, int]] = []
    free, now, last, waiting = width, 0, 0, len(ms)
    blocked: int | None = None
    while waiting:
        limit: int | None = None
        while True:
            if limit is None:
                head = min(members[0] for members in classes.values() if members) if blocked is None else blocked
                count, position, blocked = devices[head], 0, None
                if count > free:
                    blocked = head
                    # The head waits; from here on only tests that end before its reserved start may begin.
                    limit = _reserved_start(count, free, running) - now
                    continue
            else:
                found = _first_within(limit, free, classes, negated)
                if found is None:
                    break
                head, count, position = found
            del classes[count][position], negated[count][position]
            end = now + ms[head]
            last = max(last, end)
            heapq.heappush(running, (end, count))
            free -= count
            waiting -= 1
            if begun is not None:
                begun.append((head, now))
            if not waiting or not free:
                break
        now = running[0][0]
        while running and running[0][0] == now:
            free += heapq.heappop(running)[1]
    return last


def _first_within(
    limit: int, free: int, classes: dict[int, list[int]], negated: dict[int, list[int]]
) -> tuple[int, int, int] | None:
    """(index, devices, position in its class) of the first queued test that fits the free devices and time."""
    best: tuple[int, int, int] | None = None
    for count, members in classes.items():
        if count > free or not members:
            continue
        position = bisect_left(negated[count], -limit)
        if position < len(members) and (best is None or members[position] < best[0]):
            best = (members[position], count, position)
    return best


def _reserved_start(devices: int, free: int, running: list[tuple[int, int]]) -> int:
    for end, count in sorted(running):
        free += count
        if free >= devices:
            return end
    raise AssertionError("a test that fits the runner always gets a start")


def makespan(ms: Sequence[int], devices: Sequence[int], width: int) -> int:
    """The end of a queue in start order, without a schedule where a shorter way gives the same number."""
    if not ms:
        return 0
    fewest, most = min(devices), max(devices)
    if width == 1 or 2 * fewest > width:
        return sum(ms)
    if most == 1:
        loads = [0] * width
        for duration in ms:
            heapq.heapreplace(loads, loads[0] + duration)
        return max(loads)
    return run_queue(ms, devices, width)


def length(jobs: Sequence[Job], width: int) -> int:
    """How long a runner takes for these tests, serial ones at the end."""
    parallel = sorted((job for job in jobs if not job.serial), key=start_key)
    serial = sum(job.ms for job in jobs if job.serial)
    return serial + makespan([job.ms for job in parallel], [job.devices for job in parallel], width)


def area(jobs: Sequence[Job], width: int) -> int:
    """Device-milliseconds; a serial test holds the whole runner."""
    return sum(job.ms * (width if job.serial else job.devices) for job in jobs)


def lower_bound(jobs: Sequence[Job], width: int, shards: int) -> int:
    """No division over `shards` runners can be shorter: longest test, area, and tests that exclude each other."""
    if not jobs:
        return 0
    longest = max(job.ms for job in jobs)
    exclusive = sum(job.ms for job in jobs if job.serial or 2 * job.devices > width)
    return max(longest, -(-area(jobs, width) // (shards * width)), -(-exclusive // shards))


class Filling:
    """A lower bound of one shard's length that is cheap to keep up to date while tests are added."""

    __slots__ = ("area", "exclusive", "longest", "whole", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self.area = 0
        self.exclusive = 0
        self.whole = 0
        self.longest = 0

    def bound_with(self, ms: int, devices: int) -> int:
        """The bound after adding a test: area, tests that exclude each other, and the longest test of few
        devices on top of those that take the whole runner (they can never overlap it)."""
        area = self.area + ms * devices
        exclusive = self.exclusive + (ms if 2 * devices > self.width else 0)
        if devices == self.width:
            tail = self.whole + ms + self.longest
        else:
            tail = self.whole + max(self.longest, ms)
        return max(-(-area // self.width), exclusive, tail)

    def add(self, ms: int, devices: int) -> None:
        self.area += ms * devices
        if 2 * devices > self.width:
            self.exclusive += ms
        if devices == self.width:
            self.whole += ms
        else:
            self.longest = max(self.longest, ms)
