"""How tests that need 1..G devices share one runner with G devices: the schedule, its length, its bound.

The runner follows the same rule: start the longest first (decision 0501); when the head of the queue does not fit,
reserve the earliest moment at which it will, and let a later test jump ahead only if its estimated end is
no later than that moment, so a test of 8 devices never starves. Serial tests run at the end, alone.
All times are integer milliseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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


@dataclass(frozen=True, slots=True)
class Start:
    """A test starts `at_ms` after the shard began and holds `devices` until `end_ms`."""

    id: str
    at_ms: int
    end_ms: int
    devices: int


def start_order(jobs: Sequence[Job]) -> list[Job]:
    """Queue order: longest first, then most devices, then id; serial tests last."""
    return sorted(jobs, key=lambda job: (job.serial, -job.ms, -job.devices, job.id))


def schedule(jobs: Sequence[Job], width: int) -> list[Start]:
    """When each test starts on a runner with `width` devices. Raises `ValueError` for a test that never fits."""
    for job in jobs:
        if job.devices > width:
            raise ValueError(f"{job.id} needs {job.devices} devices, the runner has {width}")
    queue = [job for job in start_order(jobs) if not job.serial]
    starts: list[Start] = []
    running: list[tuple[int, int]] = []
    free, now = width, 0
    while queue:
        while queue and queue[0].devices <= free:
            free = _begin(queue.pop(0), now, free, running, starts)
        if not queue:
            break
        reserved = _reserved_start(queue[0].devices, free, running)
        index = 1
        while index < len(queue) and free:
            job = queue[index]
            if job.devices <= free and now + job.ms <= reserved:
                free = _begin(queue.pop(index), now, free, running, starts)
            else:
                index += 1
        now = running[0][0]
        while running and running[0][0] == now:
            free += heapq.heappop(running)[1]
    end = max((start.end_ms for start in starts), default=0)
    for job in start_order(jobs):
        if job.serial:
            starts.append(Start(job.id, end, end + job.ms, job.devices))
            end += job.ms
    return starts


def _begin(job: Job, now: int, free: int, running: list[tuple[int, int]], starts: list[Start]) -> int:
    heapq.heappush(running, (now + job.ms, job.devices))
    starts.append(Start(job.id, now, now + job.ms, job.devices))
    return free - job.devices


def _reserved_start(devices: int, free: int, running: list[tuple[int, int]]) -> int:
    for end, count in sorted(running):
        free += count
        if free >= devices:
            return end
    raise AssertionError("a test that fits the runner always gets a start")


def makespan(jobs: Sequence[Job], width: int) -> int:
    """Length of `schedule(jobs, width)`, without building it where a shorter way gives the same number."""
    serial = sum(job.ms for job in jobs if job.serial)
    parallel = [job for job in jobs if not job.serial]
    if not parallel:
        return serial
    if width == 1 or all(job.devices == width for job in parallel):
        return serial + sum(job.ms for job in parallel)
    if all(job.devices == 1 for job in parallel):
        loads = [0] * width
        for ms in sorted((job.ms for job in parallel), reverse=True):
            heapq.heapreplace(loads, loads[0] + ms)
        return serial + max(loads)
    return serial + max(start.end_ms for start in schedule(parallel, width))


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
