"""Predict queues: pull requests arrive, nightly and weekly runs start by their crons, pools serve them.

A discrete-event simulation. A run asks for the shards of its plan; a GPU shard waits for the CPU suite that
it waits for (hosted CPU runners are not counted), then queues first-come-first-served at its pool and holds one
runner for setup + load x noise. Same seed, same numbers. Times are seconds.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from miles_ci.errors import UsageError
from miles_ci.plan.model import Plan
from miles_ci.registry.model import Fleet

NOISE_SIGMA = 0.15


@dataclass(frozen=True, slots=True)
class Demand:
    """One shard of a run: how long it waits for the suite it needs, which pool it needs, for how long."""

    suite: str
    pool: str
    delay_s: float
    service_s: float
    gpus: int


@dataclass(frozen=True)
class Load:
    """What the simulation assumes. `label_share` is the chance that a pull request asks for a domain label."""

    arrivals_per_hour: float = 4.0
    hours: float = 168.0
    seeds: int = 5
    label_share: float = 0.15
    label_sets: int = 32
    cadences: tuple[str, ...] = ("regular", "nightly", "weekly")


@dataclass(frozen=True, slots=True)
class PoolReport:
    """Queue and use of one pool over all seeds. `utilisation` is busy over available runner time."""

    pool: str
    runners: int
    jobs: int
    wait_p50_s: float
    wait_p95_s: float
    utilisation: float


@dataclass(frozen=True)
class SimulationReport:
    """All pools, GPU-hours per week and cadence, and the wall time of a pull request's GPU part."""

    load: Load
    pools: tuple[PoolReport, ...]
    gpu_hours_per_week: dict[str, float]
    pr_wall_p50_s: float
    pr_wall_p95_s: float
    runs: int


def demands(plan: Plan, fleet: Fleet) -> tuple[Demand, ...]:
    """The GPU shards of a plan. The needed suite's delay is the time of its longest CPU shard."""
    needed_time: dict[str, float] = {}
    for suite in plan.suites:
        if suite.backend == "cpu" and suite.shards:
            needed_time[suite.suite] = (suite.setup_ms + suite.makespan_ms) / 1000
    found = []
    for shard in plan.shards:
        if shard.pool is None:
            continue
        suite_model = fleet.suites[shard.suite]
        delay = needed_time.get(suite_model.needs or "", 0.0) if not plan.bypass_fastfail else 0.0
        service = suite_model.setup_seconds + shard.load_ms / 1000
        found.append(Demand(shard.suite, shard.pool, delay, service, fleet.pools[shard.pool].gpus_per_runner))
    return tuple(found)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


# About a minute.
MAX_RUNS = 200_000


@dataclass
class _Tally:
    waits: dict[str, list[float]] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    gpu_seconds: dict[str, float] = field(default_factory=dict)
    walls: list[float] = field(default_factory=list)
    runs: int = 0


def _check(load: Load) -> None:
    """`UsageError` for the first option out of its range, with what was given."""
    ranges = (
        ("--arrivals", load.arrivals_per_hour, load.arrivals_per_hour >= 0, "must be 0 or more"),
        ("--hours", load.hours, 0 < load.hours <= 10_000, "must be more than 0 and at most 10000"),
        ("--seeds", load.seeds, 1 <= load.seeds <= 1000, "must be between 1 and 1000"),
        ("--label-share", load.label_share, 0 <= load.label_share <= 1, "must be between 0 and 1"),
    )
    for option, value, good, wanted in ranges:
        if not good:
            raise UsageError(f"simulate: {option} {value:g}: {wanted}")


def simulate(fleet: Fleet, plan_for: Callable[[str, tuple[str, ...]], Plan], load: Load) -> SimulationReport:
    """Run the simulation. `plan_for(cadence, labels)` gives the plan of a run; it is called once per label set."""
    _check(load)
    if load.arrivals_per_hour * load.hours * load.seeds > MAX_RUNS:
        raise UsageError(
            f"simulate: {load.arrivals_per_hour:g} runs per hour for {load.hours:g} h, {load.seeds} times, are more than "
            f"{MAX_RUNS:,} runs; lower --arrivals, --hours or --seeds"
        )
    cache: dict[tuple[str, tuple[str, ...]], tuple[Demand, ...]] = {}

    def demands_of(cadence: str, labels: tuple[str, ...]) -> tuple[Demand, ...]:
        key = (cadence, labels)
        if key not in cache:
            cache[key] = demands(plan_for(cadence, labels), fleet)
        return cache[key]

    tally = _Tally()
    for seed in range(load.seeds):
        arrivals = list(_arrivals(fleet, load, random.Random(f"miles-ci-{seed}")))
        _serve(
            fleet, [(at, cadence, demands_of(cadence, labels)) for at, cadence, labels in arrivals], load, seed, tally
        )
    horizon = load.hours * 3600 * load.seeds
    pools = tuple(
        PoolReport(
            name,
            pool.count,
            len(tally.waits.get(name, [])),
            percentile(tally.waits.get(name, []), 0.5),
            percentile(tally.waits.get(name, []), 0.95),
            tally.busy.get(name, 0.0) / (horizon * pool.count),
        )
        for name, pool in fleet.pools.items()
        if pool.disabled is None
    )
    per_week = 168 / (load.hours * load.seeds) / 3600
    hours = {cadence: tally.gpu_seconds.get(cadence, 0.0) * per_week for cadence in load.cadences}
    return SimulationReport(load, pools, hours, percentile(tally.walls, 0.5), percentile(tally.walls, 0.95), tally.runs)


def _arrivals(fleet: Fleet, load: Load, chance: random.Random) -> Iterable[tuple[float, str, tuple[str, ...]]]:
    """(time, cadence, labels) of all runs, in order. The simulated week begins on Monday 00:00 UTC."""
    found: list[tuple[float, str, tuple[str, ...]]] = []
    end = load.hours * 3600
    if "regular" in load.cadences and load.arrivals_per_hour > 0:
        names = sorted(fleet.labels.domain)
        sets = [
            tuple(f"run-ci-{name}" for name in names if chance.random() < load.label_share)
            for _ in range(load.label_sets)
        ]
        at = chance.expovariate(load.arrivals_per_hour / 3600)
        while at < end:
            found.append((at, "regular", chance.choice(sets)))
            at += chance.expovariate(load.arrivals_per_hour / 3600)
    for cadence, item in fleet.cadences.items():
        if cadence in load.cadences:
            for cron in item.crons:
                found.extend((at, cadence, ()) for at in cron_times(cron, end))
    return sorted(found)


def cron_times(cron: str, end_s: float) -> list[float]:
    """Seconds from Monday 00:00 at which a weekly-repeating cron fires; day and month fields must be `*`."""
    minute, hour, day, month, weekday = cron.split(" ")
    if day != "*" or month != "*":
        raise UsageError(f"simulate: cron '{cron}' names days of the month, which a repeating week does not have")
    found = []
    for day_index in range(math.ceil(end_s / 86_400)):
        # Cron counts from Sunday = 0, the simulated week from Monday = 0.
        if (day_index + 1) % 7 not in _values(weekday, 0, 6):
            continue
        for at_hour in sorted(_values(hour, 0, 23)):
            for at_minute in sorted(_values(minute, 0, 59)):
                at = day_index * 86_400 + at_hour * 3600 + at_minute * 60
                if at < end_s:
                    found.append(float(at))
    return found


def _values(text: str, low: int, high: int) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        start = low if first == "*" else int(first)
        stop = high if first == "*" or (step and not last) else int(last or first)
        found.update(range(start, stop + 1, int(step or 1)))
    return found


def _serve(
    fleet: Fleet, runs: list[tuple[float, str, tuple[Demand, ...]]], load: Load, seed: int, tally: _Tally
) -> None:
    """First come, first served at every pool; a shard comes when what it needs has passed."""
    chance = random.Random(f"miles-ci-service-{seed}")
    queue: list[tuple[float, int, int, Demand]] = []
    order = 0
    for number, (at, _, wanted) in enumerate(runs):
        for demand in wanted:
            heapq.heappush(queue, (at + demand.delay_s, order, number, demand))
            order += 1
    free = {name: [0.0] * pool.count for name, pool in fleet.pools.items()}
    finished: dict[int, float] = {}
    end = load.hours * 3600
    while queue:
        ready, _, number, demand = heapq.heappop(queue)
        runners = free[demand.pool]
        start = max(ready, runners[0])
        service = demand.service_s * math.exp(chance.gauss(0, NOISE_SIGMA))
        heapq.heapreplace(runners, start + service)
        tally.waits.setdefault(demand.pool, []).append(start - ready)
        busy = max(0.0, min(start + service, end) - min(start, end))
        tally.busy[demand.pool] = tally.busy.get(demand.pool, 0.0) + busy
        cadence = runs[number][1]
        tally.gpu_seconds[cadence] = tally.gpu_seconds.get(cadence, 0.0) + service * demand.gpus
        finished[number] = max(finished.get(number, 0.0), start + service)
    tally.runs += len(runs)
    tally.walls.extend(stop - runs[number][0] for number, stop in finished.items() if runs[number][1] == "regular")
