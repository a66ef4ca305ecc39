"""Division over shards and the schedule within one: bounds, optima, determinism, no test lost."""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_ci.plan import shard as shard_module
from miles_ci.plan.durations import Observation, learn
from miles_ci.plan.shard import divide, shard_count
from miles_ci.plan.slots import Filling, area, length, lower_bound, schedule, start_key
from tests.fast.ci.helpers.trees import REPOSITORY


@dataclass(frozen=True, slots=True)
class Unit:
    id: str
    ms: int
    devices: int = 1
    serial: bool = False


def units(sizes: Sequence[int], devices: int = 1) -> list[Unit]:
    return [Unit(f"t{index:03}", ms, devices) for index, ms in enumerate(sizes)]


def lognormal(seed: int, count: int = 400, *, mixed: bool = False) -> list[Unit]:
    chance = random.Random(seed)
    return [
        Unit(
            f"t{index:03}",
            round(1000 * chance.lognormvariate(math.log(60), 1.2)),
            chance.choice((1, 2, 4, 8)) if mixed else 1,
        )
        for index in range(count)
    ]


jobs = st.lists(
    st.tuples(st.integers(1, 1000), st.sampled_from([1, 1, 2, 3, 4, 8]), st.booleans()), min_size=1, max_size=24
).map(lambda rows: [Unit(f"t{i:02}", ms, k, serial and ms % 5 == 0) for i, (ms, k, serial) in enumerate(rows)])


@given(jobs=jobs, width=st.sampled_from([8, 10]))
@settings(max_examples=150)
def test_a_schedule_never_overbooks_and_starts_every_test_once(jobs: list[Unit], width: int) -> None:
    starts = schedule(jobs, width)
    assert sorted(start.id for start in starts) == sorted(job.id for job in jobs)
    alone = {job.id for job in jobs if job.serial}
    for moment in {start.at_ms for start in starts}:
        running = [start for start in starts if start.at_ms <= moment < start.end_ms]
        assert sum(start.devices for start in running) <= width
        assert len(running) == 1 or not alone & {start.id for start in running}
    assert length(jobs, width) == max(start.end_ms for start in starts)
    assert length(jobs, width) >= lower_bound(jobs, width, 1)


@given(jobs=jobs)
def test_the_head_of_the_queue_is_never_delayed_by_one_that_jumps_ahead(jobs: list[Unit]) -> None:
    """Whatever starts while an earlier test waits ends before that one starts."""
    starts = {start.id: start for start in schedule([job for job in jobs if not job.serial], 8)}
    order = sorted((job for job in jobs if not job.serial), key=start_key)
    for index, job in enumerate(order):
        waited_until = starts[job.id].at_ms
        for later in order[index + 1 :]:
            start = starts[later.id]
            head = all(starts[earlier.id].at_ms <= start.at_ms for earlier in order[:index])
            if head and start.at_ms < waited_until:
                assert start.end_ms <= waited_until


def test_eight_devices_are_not_starved_by_a_stream_of_small_tests() -> None:
    small = units([100] * 200)
    starts = {start.id: start.at_ms for start in schedule([Unit("big", 100, 8), *small], 8)}
    assert starts["big"] == 0
    starts = {
        start.id: start.at_ms for start in schedule([Unit("big", 99, 8), Unit("first", 150), *units([100] * 40)], 8)
    }
    assert starts["big"] <= 600


def test_a_test_that_no_runner_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 9 devices"):
        schedule([Unit("t", 1, 9)], 8)


@given(jobs=jobs, shards=st.integers(1, 9), width=st.sampled_from([8, 12]), seed=st.integers(0, 5))
@settings(max_examples=150)
def test_each_unit_is_in_exactly_one_shard_none_is_empty_and_order_does_not_matter(
    jobs: list[Unit], shards: int, width: int, seed: int
) -> None:
    found = divide(jobs, width=width, shards=shards)
    assert sorted(job.id for shard in found.shards for job in shard) == sorted(job.id for job in jobs)
    assert len(found.shards) == min(shards, len(jobs))
    assert all(found.shards)
    assert found.lower_bound <= found.makespan == max(length(shard, width) for shard in found.shards)
    assert found.loads == tuple(length(shard, width) for shard in found.shards)
    for shard in found.shards:
        assert list(shard) == sorted(shard, key=start_key)
    shuffled = list(jobs)
    random.Random(seed).shuffle(shuffled)
    assert divide(shuffled, width=width, shards=shards) == found


@pytest.mark.parametrize(
    ("jobs", "shards", "loads"),
    [
        ([Unit("a", 8), Unit("b", 7, serial=True), Unit("c", 8), Unit("d", 5, serial=True)], 3, (8, 7, 5)),
        ([Unit("a", 4, devices=2), Unit("b", 7), Unit("c", 5), Unit("d", 4, serial=True)], 3, (7, 4, 4)),
    ],
)
def test_a_serial_test_takes_the_whole_runner_when_shards_are_filled(jobs, shards: int, loads: tuple[int, ...]) -> None:
    assert divide(jobs, width=2, shards=shards).loads == loads


def test_the_ratio_compares_with_the_bound_and_is_1_for_nothing() -> None:
    assert divide(units([5, 4, 3]), width=1, shards=2).ratio == 7 / 6
    assert divide([], width=1, shards=2).ratio == divide(units([0]), width=1, shards=1).ratio == 1.0


@pytest.mark.parametrize(("sizes", "shards"), [((0, 0, 0), 3), ((0, 0, 0, 0), 3), ((9, 0, 0), 3), ((0,), 2)])
def test_tests_that_take_no_time_leave_no_shard_empty(sizes: tuple[int, ...], shards: int) -> None:
    found = divide(units(sizes), width=1, shards=shards)
    assert [len(shard) > 0 for shard in found.shards] == [True] * min(shards, len(sizes))
    assert sorted(job.id for shard in found.shards for job in shard) == [unit.id for unit in units(sizes)]


@given(jobs=jobs)
@settings(max_examples=50)
def test_the_running_bound_of_a_shard_is_a_bound(jobs: list[Unit]) -> None:
    filling = Filling(8)
    bound = 0
    for job in jobs:
        devices = 8 if job.serial else job.devices
        bound = filling.bound_with(job.ms, devices)
        filling.add(job.ms, devices)
    assert bound <= length(jobs, 8)


def optimum(sizes: Sequence[int], shards: int) -> int:
    best = sum(sizes)
    for assignment in itertools.product(range(shards), repeat=len(sizes)):
        if assignment and assignment[0] != 0:
            break
        loads = [0] * shards
        for size, shard in zip(sizes, assignment, strict=True):
            loads[shard] += size
        best = min(best, max(loads))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_small_cases_stay_within_the_proven_ratio_of_the_optimum(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.randrange(1, 60) for _ in range(chance.randrange(3, 9))]
    for shards in (2, 3):
        found = divide(units(sizes), width=1, shards=shards)
        assert found.makespan <= optimum(sizes, shards) * (4 / 3 - 1 / (3 * shards)) + 1e-9


def test_moves_and_swaps_reach_the_optimum_where_longest_first_does_not() -> None:
    # Longest first gives 5+4+3 and 5+3; the optimum is 10 and 10.
    assert divide(units([5, 5, 4, 3, 3]), width=1, shards=2).makespan == 10
    assert divide(units([7, 6, 5, 4, 4, 4]), width=1, shards=2).makespan == 15


def test_known_estimates_are_divided_to_the_bound_and_mixed_devices_to_within_5_percent() -> None:
    single = [divide(lognormal(seed), width=1, shards=shards).ratio for seed in range(3) for shards in (2, 8, 16)]
    assert max(single) <= 1.0013
    mixed = [
        divide(lognormal(seed, mixed=True), width=8, shards=shards).ratio for seed in range(3) for shards in (2, 8)
    ]
    assert max(mixed) <= 1.05


def test_learned_estimates_divide_far_better_than_placeholders() -> None:
    """Max over mean true shard time; truth and observations are noisy."""
    results: dict[str, list[float]] = {"placeholder": [], "learned": []}
    for seed in range(4):
        chance = random.Random(f"truth-{seed}")
        tests = lognormal(seed)
        truth = {test.id: round(test.ms * chance.lognormvariate(0, 0.1)) for test in tests}
        seen = [
            Observation(test.id, "s", "h200", round(test.ms * chance.lognormvariate(0, 0.2)), float(run))
            for run in range(10)
            for test in tests
        ]
        known = {key[0]: item.ms for key, item in learn(seen, now=10.0).items()}
        for name, values in {"placeholder": dict.fromkeys(truth, 60_000), "learned": known}.items():
            for shards in (2, 4, 8):
                groups = divide([replace(test, ms=values[test.id]) for test in tests], width=1, shards=shards).shards
                loads = [sum(truth[test.id] for test in group) for group in groups]
                results[name].append(max(loads) / statistics.mean(loads))
    assert statistics.median(results["placeholder"]) > 1.10
    assert max(results["learned"]) <= 1.10


@pytest.mark.parametrize(
    ("sizes", "devices", "options", "expected"),
    [
        ([100] * 10, 1, {"width": 1}, 10),  # 1000 / (150 - 50)
        ([100] * 10, 1, {"width": 2}, 5),
        ([100] * 10, 2, {"width": 2}, 10),
        ([1], 1, {"width": 1}, 1),
        ([1], 1, {"width": 1, "min_shards": 3}, 1),  # never an empty shard
        ([1] * 5, 1, {"width": 1, "min_shards": 3}, 3),
        ([100] * 100, 1, {"width": 1}, 32),
        ([100] * 100, 1, {"width": 1, "slots": 4}, 4),
        ([100] * 10, 1, {"width": 1, "min_shards": 6, "slots": 4}, 4),
        ([100], 1, {"width": 1, "units": 4, "min_shards": 3}, 3),
        ([], 1, {"width": 1}, 0),
    ],
)
def test_the_number_of_shards_follows_target_limits_and_runners(
    sizes: list[int], devices: int, options: dict, expected: int
) -> None:
    given_options = {"target_ms": 150, "setup_ms": 50, "min_shards": 1, "max_shards": 32, **options}
    assert shard_count(units(sizes, devices), **given_options) == expected


def test_a_target_within_the_setup_is_an_error() -> None:
    with pytest.raises(ValueError, match="leaves nothing"):
        shard_count(units([1]), width=1, target_ms=50, setup_ms=50, min_shards=1, max_shards=2)


def test_area_counts_a_serial_test_with_the_whole_runner() -> None:
    assert area([Unit("a", 10, 2), Unit("b", 10, 1, serial=True)], 8) == 20 + 80


def test_the_division_is_the_same_under_every_hash_seed() -> None:
    code = (
        "import random; from types import SimpleNamespace as Unit; from miles_ci.plan.shard import divide; "
        "chance = random.Random(1); jobs = [Unit(id=f't{i}', ms=chance.randrange(1, 99), "
        "devices=chance.choice((1, 2, 4, 8)), serial=False) for i in range(60)]; "
        "print([[job.id for job in shard] for shard in divide(jobs, width=8, shards=4).shards])"
    )
    outputs = set()
    for seed in ("0", "1", "2", "3", "random"):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=REPOSITORY, env=environ, capture_output=True, check=True
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_the_search_ends_when_it_has_scheduled_as_many_tests_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    inner = shard_module.makespan
    monkeypatch.setattr(shard_module, "makespan", lambda *words: calls.append(1) or inner(*words))
    jobs = lognormal(3, 60, mixed=True)
    divide(jobs, width=8, shards=4)
    free = len(calls)
    calls.clear()
    monkeypatch.setattr(shard_module, "MAX_SCHEDULED", 1)
    divide(jobs, width=8, shards=4)
    # The four shards as they were filled, and the pair of the one exchange that is tried.
    assert len(calls) == 6 < free
