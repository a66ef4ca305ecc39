"""The fleet simulation: more load means longer queues, same seed means same numbers, crons fire on time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from miles_ci.errors import UsageError
from miles_ci.plan.model import Plan, Shard, SuitePlan
from miles_ci.plan.simulate import Demand, Load, _serve, _Tally, cron_times, demands, percentile, simulate
from miles_ci.registry import load_fleet
from tests.fast.ci.helpers.trees import REPOSITORY

FLEET = load_fleet(REPOSITORY / "registry.yaml")
HOUR = 3600.0


def plan(cadence: str, load_s: int, shards: int = 1) -> Plan:
    pool = FLEET.pools["h200-8gpu"]
    made = tuple(
        Shard(
            "stage-c-8-gpu-h200",
            i + 1,
            shards,
            "cuda",
            "h200",
            "h200-8gpu",
            tuple(pool.labels),
            8,
            load_s * 1000,
            7200,
            (),
        )
        for i in range(shards)
    )
    suites = (
        SuitePlan("stage-a-cpu", "cpu", 1, 1, None, 180_000, 180_000, 1.0, 420_000, 120_000, ()),
        SuitePlan("stage-c-8-gpu-h200", "cuda", 1, shards, None, 0, 0, 1.0, 0, 0, ()),
    )
    return Plan(cadence, (), cadence != "regular", False, None, None, suites, made, (), ())


def run(arrivals: float, load_s: int = 1800, **fields: object):
    load = Load(arrivals_per_hour=arrivals, hours=48, seeds=3, **fields)  # type: ignore[arg-type]
    report = simulate(FLEET, lambda cadence, labels: plan(cadence, load_s), load)
    return report, next(pool for pool in report.pools if pool.pool == "h200-8gpu")


@pytest.mark.parametrize("arrivals", [float("inf"), 1e9])
def test_more_runs_than_a_minute_can_simulate_are_refused(arrivals: float) -> None:
    with pytest.raises(UsageError, match="lower --arrivals, --hours or --seeds"):
        simulate(FLEET, lambda cadence, labels: pytest.fail("nothing may be planned"), Load(arrivals, 168.0, 5, 0.1))


def test_the_same_seed_gives_the_same_numbers() -> None:
    assert run(3.0)[0] == run(3.0)[0]


def test_waits_and_use_grow_with_load() -> None:
    calm, busy, over = (run(rate)[1] for rate in (0.5, 3.0, 8.0))
    assert calm.utilisation < busy.utilisation < over.utilisation <= 1.0
    assert calm.wait_p95_s <= busy.wait_p95_s < over.wait_p95_s
    assert calm.wait_p50_s == 0.0


def test_utilisation_is_offered_load_over_runners_when_nothing_saturates() -> None:
    report, pool = run(1.0, cadences=("regular",))
    offered = 1.0 * (FLEET.suites["stage-c-8-gpu-h200"].setup_seconds + 1800) / HOUR / FLEET.pools["h200-8gpu"].count
    assert pool.utilisation == pytest.approx(offered, rel=0.25)
    assert report.gpu_hours_per_week["regular"] == pytest.approx(168 * (2100 / HOUR) * 8, rel=0.25)


def test_a_bounded_shard_waits_for_the_cpu_stage_unless_fast_fail_is_bypassed() -> None:
    assert demands(plan("regular", 60), FLEET)[0].delay_s == 300.0
    assert demands(plan("nightly", 60), FLEET)[0].delay_s == 0.0
    assert demands(plan("regular", 60), FLEET)[0].service_s == 360.0


def test_nightly_and_weekly_fire_by_their_crons() -> None:
    day = 86_400.0
    nightly = cron_times(FLEET.cadences["nightly"].crons[0], 7 * day)
    weekly = cron_times(FLEET.cadences["weekly"].crons[0], 7 * day)
    # Monday is day 0: nightly runs Monday to Friday and Sunday, weekly on Saturday, all at 15:00.
    assert nightly == [index * day + 15 * HOUR for index in (0, 1, 2, 3, 4, 6)]
    assert weekly == [5 * day + 15 * HOUR]
    assert cron_times("*/30 8-9 * * 1", day) == [8 * HOUR, 8.5 * HOUR, 9 * HOUR, 9.5 * HOUR]
    with pytest.raises(UsageError, match="days of the month"):
        cron_times("0 0 1 * *", day)


def test_percentiles_are_observed_values() -> None:
    assert [percentile([3, 1, 2, 4], share) for share in (0.5, 0.95, 0.25)] == [2, 4, 1]
    assert percentile([], 0.5) == 0.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arrivals_per_hour": -1}, "simulate: --arrivals -1: must be 0 or more"),
        ({"arrivals_per_hour": float("nan")}, "simulate: --arrivals nan: must be 0 or more"),
        ({"hours": 0}, "simulate: --hours 0: must be more than 0 and at most 10000"),
        ({"seeds": 0}, "simulate: --seeds 0: must be between 1 and 1000"),
        ({"label_share": 1.5}, "simulate: --label-share 1.5: must be between 0 and 1"),
    ],
)
def test_a_senseless_load_names_the_one_option_that_is_wrong(fields: dict, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        simulate(FLEET, lambda cadence, labels: plan(cadence, 1), Load(**fields))


def test_demands_are_the_gpu_shards_and_wait_for_the_longest_cpu_shard_of_what_they_need() -> None:
    gpu = plan("regular", 600, shards=2)
    cpu = Shard("stage-a-cpu", 1, 1, "cpu", "cpu", None, ("ubuntu-24.04",), 2, 9000, 600, ())
    suite = FLEET.suites["stage-c-8-gpu-h200"]
    about = SuitePlan(suite.needs or "", "cpu", 1, 1, None, 150_000, 100_000, 1.0, 420_000, 120_000, ())
    mixed = replace(gpu, shards=(cpu, *gpu.shards), suites=(about, gpu.suites[1]))
    found = demands(mixed, FLEET)
    assert [(item.suite, item.pool, item.gpus) for item in found] == [("stage-c-8-gpu-h200", "h200-8gpu", 8)] * 2
    assert {(item.delay_s, item.service_s) for item in found} == {(270.0, suite.setup_seconds + 600.0)}
    assert {item.delay_s for item in demands(replace(mixed, suites=(replace(about, shards=0),)), FLEET)} == {0.0}


@pytest.mark.parametrize(
    "fields",
    [
        {"arrivals_per_hour": 0.0}, {"hours": 0.001}, {"hours": 10_000.0, "arrivals_per_hour": 0.0},
        {"seeds": 1}, {"seeds": 1000, "hours": 0.01}, {"label_share": 0.0}, {"label_share": 1.0},
    ],
)  # fmt: skip
def test_the_borders_of_every_range_belong_to_it(fields: dict) -> None:
    load = Load(**{"arrivals_per_hour": 0.5, "hours": 2.0, "seeds": 1, "label_share": 0.1, **fields})
    assert simulate(FLEET, lambda cadence, labels: plan(cadence, 60), load).load == load


def test_a_pool_is_busy_for_what_it_serves_within_the_time_that_is_looked_at() -> None:
    def busy(at: float, hours: float) -> tuple[float, float]:
        tally = _Tally()
        wanted = (Demand("stage-c-8-gpu-h200", "h200-8gpu", 0.0, 0.5, 8),)
        _serve(FLEET, [(at, "regular", wanted)], Load(hours=hours), 1, tally)
        return tally.busy["h200-8gpu"], tally.gpu_seconds["regular"] / 8

    whole, service = busy(0.0, 1.0)
    assert whole == pytest.approx(service) == pytest.approx(0.5, rel=0.9)
    assert busy(3600.0, 1.0)[0] == busy(4000.0, 1.0)[0] == 0.0
    assert busy(3600.0 - service / 2, 1.0)[0] == pytest.approx(service / 2)
