"""Metric bounds of one unit: what happens without a store, with a broken record, and who writes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from miles_ci.history.errors import StoreError
from miles_ci.history.sqlite import SqliteStore
from miles_ci.metric_bound import MetricBound
from miles_ci.run.judge.metric_bounds import MetricJudge
from miles_ci.run.results import Attempt, RunInfo, TestResult
from miles_ci.run.slug import slug
from tests.fast.ci.helpers.units import unit as made_unit

PATH = "tests/e2e/test_t.py"
BOUND = MetricBound("loss", abs_up=0.1, abs_down=0.1)
UNIT = made_unit(PATH, PATH, devices=8, metric_bounds=(BOUND,))


def info(**changes) -> RunInfo:
    fields = {
        "suite": "s", "backend": "cuda", "hardware": "h200", "shard": "1/1", "plan_digest": "d", "cadence": "nightly",
        "run_id": "r", "run_attempt": 1, "commit": "c", "event": "schedule", "ref": "refs/heads/main", "runner": "x",
        "host": "h", "started_at": 0.0,
    }  # fmt: skip
    return RunInfo(**{**fields, **changes})


@pytest.fixture
def metrics(tmp_path):
    folder = tmp_path / "metrics" / slug(PATH)
    folder.mkdir(parents=True)
    (folder / "m.jsonl").write_text(json.dumps({"schema": 1, "metric": "loss", "series": [[1, 1.0]]}))
    return tmp_path / "metrics"


def judge(keeper: MetricJudge, metrics, outcome: str = "passed", attempts: int = 1):
    return [(each.verdict, each.message) for each in keeper.judge(UNIT, metrics, outcome=outcome, attempts=attempts)]


def test_bounded_test_without_a_store_is_an_error_never_a_pass(metrics):
    ((verdict, message),) = judge(MetricJudge(info(), None, "main"), metrics)
    assert verdict == "error"
    assert "MILES_CI_HISTORY_URL is not set" in message


def test_unreachable_store_is_an_error_that_names_it(metrics):
    def refuse():
        raise StoreError("history store host: cannot connect")

    ((verdict, message),) = judge(MetricJudge(info(), refuse, "main"), metrics)
    assert (verdict, "cannot connect" in message) == ("error", True)


def test_missing_metric_is_an_error_even_where_nothing_is_trusted_yet(tmp_path, metrics):
    (metrics / slug(PATH) / "m.jsonl").unlink()
    keeper = MetricJudge(info(), lambda: SqliteStore(tmp_path / "h.db"), "main")
    assert judge(keeper, metrics) == [("error", "loss: the test recorded no such metric")]


def test_failed_test_is_not_judged_by_its_metrics(metrics):
    assert judge(MetricJudge(info(), None, "main"), metrics, outcome="failed") == []


@pytest.mark.parametrize(
    ("changes", "outcome", "attempts", "written"),
    [({}, "passed", 1, 1), ({}, "flaky", 2, 0), ({"event": "pull_request"}, "passed", 1, 0), ({"run_attempt": 2}, "passed", 1, 0)],
)  # fmt: skip
def test_values_are_remembered_only_by_runs_that_may_write(tmp_path, metrics, changes, outcome, attempts, written):
    keeper = MetricJudge(info(**changes), lambda: SqliteStore(tmp_path / "h.db"), "main")
    assert judge(keeper, metrics, outcome, attempts)[0][0] == "inactive"
    store = SqliteStore(tmp_path / "h.db")
    assert sum(candidates for _, _, candidates in store.series()) == written


def result(unit: str, wall_s: float) -> TestResult:
    attempts = (Attempt(1, "failed", 1.0), Attempt(2, "passed", wall_s))
    return TestResult(
        unit, PATH, "flaky", 8, 1.0, attempts=attempts, nodes={f"{PATH}::a": "passed"}, node_ms={f"{PATH}::a": 7}
    )


def test_durations_of_every_attempt_are_stored_and_items_where_splitting_may_pay(tmp_path):
    keeper = MetricJudge(info(event="push"), lambda: SqliteStore(tmp_path / "h.db"), "main")
    assert keeper.record_durations([result(PATH, 2.0)]) == ""
    store = SqliteStore(tmp_path / "h.db")
    assert store.passing_durations(hardware="h200", since=0) == {("s", PATH): [2000]}
    assert store.outcomes(test=PATH, suite="s") == [("r.1", "passed")]
    keeper.record_durations([result(f"{PATH}#1/2", 40.0)])
    assert store.passing_durations(hardware="h200", since=0)[("s", f"{PATH}::a")] == [7]


def test_file_of_which_only_some_nodes_ran_leaves_no_durations(tmp_path):
    keeper = MetricJudge(info(event="push"), lambda: SqliteStore(tmp_path / "h.db"), "main")
    assert keeper.record_durations([dataclasses.replace(result(PATH, 2.0), only=(f"{PATH}::a",))]) == ""
    assert SqliteStore(tmp_path / "h.db").outcomes(test=PATH, suite="s") == []


@pytest.mark.parametrize("event", ["", "pull_request", "pull_request_target"])
def test_local_runs_and_pull_requests_leave_no_durations(tmp_path, event):
    keeper = MetricJudge(info(event=event), lambda: SqliteStore(tmp_path / "h.db"), "main")
    assert keeper.record_durations([result(PATH, 2.0)]) == ""
    assert not (tmp_path / "h.db").exists()


def test_store_that_fails_while_storing_durations_is_noted_not_fatal():
    def refuse():
        raise StoreError("history store host: cannot connect")

    note = MetricJudge(info(event="push"), refuse, "main").record_durations([result(PATH, 2.0)])
    assert "durations were not stored" in note
