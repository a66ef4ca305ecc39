"""A metric bound: which values it looks at, its corridor, how trust is earned, who may write."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_ci.history import corridor
from miles_ci.history.corridor import ERROR, FAIL, INACTIVE, PASS, MetricVerdict, Point, Writer
from miles_ci.history.errors import MetricError
from miles_ci.history.records import CANDIDATE, TRUSTED, MetricIdentity
from miles_ci.history.sqlite import SqliteStore
from miles_ci.metric_bound import MetricBound


def bound(**fields) -> MetricBound:
    return MetricBound(**{"metric": "ppo_kl", **fields})


IDENTITY = MetricIdentity("tests/e2e/test_t.py", "cuda", "s", "h200", 8, "ppo_kl", "last", "d")
NARROW = bound(abs_up=0.1, abs_down=0.1)


def judge(spec: MetricBound, value: float, trusted: list[float]) -> str:
    return corridor.evaluate(spec, [(0, value)], {0: trusted}).verdict


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(1.0, PASS), (1.1, PASS), (0.9, PASS), (1.11, FAIL), (0.89, FAIL), (-1.0, PASS), (-1.2, FAIL)],
)
def test_corridor_is_closed_and_symmetric_in_sign_for_magnitudes(value, verdict):
    assert judge(NARROW, value, [1.0] * 5) == verdict


def test_signed_divergence_is_a_violation_although_it_is_below_the_corridor_as_a_number():
    spec = bound(abs_up=1e-8, abs_down=1e-8)
    assert judge(spec, -4e-4, [0.0] * 5) == FAIL
    assert judge(spec, -4e-9, [0.0] * 5) == PASS


@pytest.mark.parametrize(("value", "verdict"), [(-1.05, PASS), (1.0, FAIL), (-1.2, FAIL), (-0.85, FAIL)])
def test_signed_metric_is_compared_as_it_is(value, verdict):
    spec = dataclasses.replace(NARROW, magnitude=False)
    assert judge(spec, value, [-1.0] * 5) == verdict


def test_the_wider_of_relative_and_absolute_bounds_holds_on_each_side():
    spec = bound(rel_up=0.5, abs_up=0.1, rel_down=0.01, abs_down=0.2)
    assert corridor.corridor(spec, 1.0) == (0.8, 1.5)
    assert corridor.corridor(spec, 0.1) == (pytest.approx(-0.1), pytest.approx(0.2))


def test_reference_is_the_median_of_the_last_ten_trusted_values():
    trusted = [1.0] * 6 + [9.0] * 4 + [50.0] * 100
    assert judge(NARROW, 1.05, trusted) == PASS
    assert judge(NARROW, 9.0, trusted) == FAIL


def test_limit_holds_from_the_first_run_and_in_both_directions():
    spec = dataclasses.replace(NARROW, limit=2.0)
    assert judge(spec, 2.0, []) == INACTIVE
    assert judge(spec, 2.1, []) == FAIL
    assert judge(spec, -2.1, []) == FAIL


def test_bound_is_inactive_until_warmup_values_are_trusted():
    assert judge(NARROW, 77.0, [1.0] * 4) == INACTIVE
    assert judge(NARROW, 77.0, [1.0] * 5) == FAIL


@pytest.mark.parametrize(
    ("series", "message"),
    [
        (None, "recorded no such metric"),
        ([], "series is empty"),
        ([(1, math.nan)], "not finite"),
        ([(1, math.inf)], "not finite"),
        ([(1, 1.0), (1, 1.0)], "step 1 is recorded twice"),
    ],
)
def test_unusable_series_is_an_error_not_a_pass(series, message):
    verdict = corridor.evaluate(NARROW, series, {0: [1.0] * 10})
    assert verdict.verdict == ERROR
    assert message in verdict.message


def test_named_step_that_is_missing_is_an_error():
    verdict = corridor.evaluate(dataclasses.replace(NARROW, steps=(1, 7)), [(1, 1.0)], {})
    assert (verdict.verdict, "step 7 is not recorded" in verdict.message) == (ERROR, True)


def test_last_means_the_highest_step_whatever_the_order():
    assert corridor.select_points(NARROW, [(3, 3.0), (1, 1.0)]) == [Point(0, 3.0)]


def test_every_step_has_a_history_of_its_own():
    spec = dataclasses.replace(NARROW, steps="all")
    series = [(1, 1.0), (2, 5.0)]
    history = {1: [1.0] * 5, 2: [5.0] * 5}
    assert corridor.evaluate(spec, series, history).verdict == PASS
    assert corridor.evaluate(spec, [(1, 1.0), (2, 1.0)], history).verdict == FAIL
    assert corridor.evaluate(spec, [*series, (3, 1.0)], history).verdict == INACTIVE


@given(st.floats(-1e6, 1e6), st.floats(0, 10), st.floats(0, 1), st.booleans())
def test_reference_itself_always_passes(reference, absolute, relative, magnitude):
    spec = bound(magnitude=magnitude, abs_up=absolute, abs_down=absolute, rel_up=relative, rel_down=relative)
    assert judge(spec, reference, [reference] * 5) == PASS


WRITER = Writer("schedule", "refs/heads/main", "main", "nightly", 1)


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({}, True),
        ({"cadence": "weekly"}, True),
        ({"event": "pull_request"}, False),
        ({"event": "workflow_dispatch"}, False),
        ({"event": "push"}, False),
        ({"cadence": "release"}, False),
        ({"cadence": "regular"}, False),
        ({"ref": "refs/heads/other"}, False),
        ({"ref": "refs/tags/main"}, False),
        ({"run_attempt": 2}, False),
    ],
)
def test_only_scheduled_runs_of_the_default_branch_write(change, allowed):
    assert dataclasses.replace(WRITER, **change).may_write(outcome="passed", attempts=1) is allowed


@pytest.mark.parametrize(("outcome", "attempts"), [("flaky", 2), ("failed", 1), ("passed", 2)])
def test_value_of_a_test_that_did_not_pass_at_once_is_not_written(outcome, attempts):
    assert not WRITER.may_write(outcome=outcome, attempts=attempts)


def _nightly(store: SqliteStore, value: float, counter=itertools.count()) -> tuple[str, int]:
    trusted = corridor.trusted_values(store, IDENTITY, [0])
    verdict = corridor.evaluate(NARROW, [(0, value)], trusted)
    run = f"run-{next(counter)}"
    points = [Point(0, value)]
    return verdict.verdict, corridor.remember(
        store, NARROW, IDENTITY, points, verdict, run_id=run, recorded_at=next(counter)
    )


def test_five_coherent_nightly_values_earn_trust(tmp_path):
    store = SqliteStore(tmp_path / "h.db")
    assert [_nightly(store, value) for value in (1.0, 1.02, 0.98, 1.05, 0.95)] == [(INACTIVE, 0)] * 4 + [(INACTIVE, 5)]
    assert _nightly(store, 1.04) == (PASS, 0)
    assert _nightly(store, 1.4) == (FAIL, 0)
    assert len(store.values(IDENTITY, state=TRUSTED, limit=99)) == 6
    assert [row.value for row in store.values(IDENTITY, state=CANDIDATE, limit=99)] == [1.4]


def test_scattered_values_are_not_trusted_until_a_person_promotes_them(tmp_path):
    store = SqliteStore(tmp_path / "h.db")
    for value in (1.0, 5.0, 1.0, 5.0, 1.0, 5.0, 1.0):
        assert _nightly(store, value) == (INACTIVE, 0)
    assert store.promote(IDENTITY) == 7
    assert _nightly(store, 1.0)[0] == PASS


def test_old_outlier_leaves_the_window_and_trust_is_earned_after_it(tmp_path):
    store = SqliteStore(tmp_path / "h.db")
    results = [_nightly(store, value)[1] for value in (9.0, 1.0, 1.0, 1.0, 1.0, 1.0)]
    assert results == [0, 0, 0, 0, 0, 5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ('{"schema": 2, "metric": "a", "series": []}', 'needs "schema": 1'),
        ('{"schema": 1, "series": []}', "needs a metric name"),
        ('{"schema": 1, "metric": "a", "series": [[1]]}', r"\[1\] is not \[step, value\]"),
        ('{"schema": 1, "metric": "a", "series": [[true, 1]]}', "step True is not an integer"),
        ('{"schema": 1, "metric": "a", "series": [[1, "high"]]}', "'high' at step 1 is not a number"),
        ('{"schema": 1, "metric": "a", "series": [[1, true]]}', "not a number"),
    ],
)
def test_faulty_record_names_file_and_line(tmp_path, line, message):
    (tmp_path / "m.jsonl").write_text('{"schema": 1, "metric": "ok", "series": []}\n' + line + "\n")
    with pytest.raises(MetricError, match=r"m\.jsonl:2: .*" + message):
        corridor.read_records(tmp_path)


def test_records_of_several_files_are_joined_and_names_of_non_finite_values_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"schema": 1, "metric": "m", "series": [[1, 0.5], [2, "NaN"]]}))
    (tmp_path / "b.jsonl").write_text(json.dumps({"schema": 1, "metric": "m", "series": [[3, "-Infinity"]]}))
    series = corridor.read_records(tmp_path)["m"]
    assert [step for step, _ in series] == [1, 2, 3]
    assert math.isnan(series[1][1])
    assert series[2][1] == -math.inf


def test_a_value_outside_and_one_that_cannot_be_judged_block():
    blocking = {kind: MetricVerdict("loss", kind, "").blocks for kind in (PASS, FAIL, INACTIVE, ERROR)}
    assert blocking == {PASS: False, FAIL: True, INACTIVE: False, ERROR: True}
