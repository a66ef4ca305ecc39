"""Counts and words of the JUnit file: one case for each item, one more where no item shows what is wrong."""

from __future__ import annotations

from xml.etree.ElementTree import Element

import pytest

from miles_ci.report.junit import junit
from miles_ci.run.results import (
    THEN_PASSED,
    Attempt,
    FailureRecord,
    MetricVerdict,
    RunInfo,
    ShardResults,
    TestResult,
)

PATH = "tests/fast/test_a.py"
INFO = RunInfo("stage-a-cpu", "cpu", "cpu", "1/2", "d", "regular", "r", 1, "c", "", "", "x", "host", 0.0)


def suite(*tests: TestResult) -> Element:
    found = junit(ShardResults(INFO, list(tests), status="complete", ended_at=1.0)).find("testsuite")
    assert found is not None
    return found


def counts(found: Element) -> tuple[str | None, ...]:
    return tuple(found.get(name) for name in ("tests", "failures", "errors", "skipped"))


def result(outcome: str, nodes: dict[str, str], **values) -> TestResult:
    return TestResult(PATH, PATH, outcome, nodes={f"{PATH}::{name}": kind for name, kind in nodes.items()}, **values)


def test_every_item_is_counted_by_what_became_of_it() -> None:
    failure = FailureRecord(f"{PATH}::test_b", "ValueError", "is 3", "0" * 16)
    early = FailureRecord(f"{PATH}::test_c", "KeyError", "early", "0" * 16)
    attempts = (Attempt(1, "failed", 2.0, failures=(early,)), Attempt(2, "failed", 0.5, failures=(failure,)))
    nodes = {
        "test_a": "passed",
        "test_b": "failed",
        "test_c": "error",
        "test_d": "skipped",
        "test_e": "xfailed",
        "test_f": "unfinished",
    }
    found = suite(result("failed", nodes, attempts=attempts, node_ms={f"{PATH}::test_a": 1500}))
    assert counts(found) == ("6", "1", "2", "2")
    assert (found.get("name"), found.get("hostname"), found.get("time")) == ("stage-a-cpu 1/2", "host", "2.500")
    cases = {case.get("name"): case for case in found}
    assert [case.get("time") for case in found] == ["1.500", "0.000", "0.000", "0.000", "0.000", "0.000"]
    assert [len(cases[name]) for name in nodes] == [0, 1, 1, 1, 1, 1]
    (detail,) = cases["test_b"]
    assert (detail.tag, detail.get("type"), detail.text) == ("failure", "ValueError", "is 3")
    (detail,) = cases["test_c"]
    assert (detail.tag, detail.get("type"), detail.text) == ("error", "error", "outcome error")
    assert [cases[name][0].tag for name in ("test_d", "test_e", "test_f")] == ["skipped", "skipped", "error"]


def test_a_repetition_that_passed_is_told_beside_the_failure() -> None:
    found = suite(result("failed", {"test_a": "failed"}, reruns=("failed", "passed")))
    assert found[0][0].text == f"{THEN_PASSED}: outcome failed"
    assert suite(result("failed", {"test_a": "failed"}, reruns=("failed",)))[0][0].text == "outcome failed"


@pytest.mark.parametrize(
    ("outcome", "nodes", "expected"),
    [
        ("passed", {"test_a": "passed"}, ("1", "0", "0", "0")),
        ("no_tests", {}, ("1", "0", "1", "0")),
        ("timeout", {"test_a": "passed"}, ("2", "0", "1", "0")),
        ("unstable_failed", {"test_a": "passed"}, ("2", "0", "0", "1")),
        ("unstable_failed", {"test_a": "failed"}, ("1", "1", "0", "0")),
        ("failed", {"test_a": "failed"}, ("1", "1", "0", "0")),
        ("flaky", {"test_a": "passed"}, ("1", "0", "0", "0")),
    ],
)
def test_the_file_speaks_where_its_items_are_silent(outcome: str, nodes: dict, expected: tuple[str, ...]) -> None:
    assert counts(suite(result(outcome, nodes))) == expected


def test_a_metric_bound_that_blocks_gives_its_message() -> None:
    bounds = (MetricVerdict("loss", "fail", "3 is above 2", 3.0), MetricVerdict("kl", "pass", "fine", 1.0))
    found = suite(result("passed", {"test_a": "passed"}, metrics=bounds, message="m"))
    assert counts(found) == ("2", "0", "1", "0")
    assert (found[1].get("name"), found[1][0].text) == ("[passed]", "m; 3 is above 2")
