"""What is read of another job's results: every text is cut at its limit, every number counted as it is meant."""

from __future__ import annotations

from typing import Any

import pytest

from miles_ci.report.untrusted import MAX_TESTS, MAX_TEXT, OUTCOMES, BadArtifact, SeenTest, read_shard
from miles_ci.run.results import SCHEMA, THEN_PASSED

RUN = {"suite": "s" * 70, "hardware": "h" * 70, "shard": "1" * 20}


def read(**entry: Any) -> SeenTest:
    test = {"path": "tests/a.py", "outcome": "failed", "attempts": [], **entry}
    (seen,) = read_shard({"schema": SCHEMA, "run": RUN, "tests": [test]}).tests
    return seen


def failure(**values: Any) -> dict[str, Any]:
    return {"node": "tests/a.py::test_a", "message": "m", "signature": "sig", **values}


def test_names_are_cut_at_their_limits() -> None:
    shard = read_shard({"schema": SCHEMA, "run": RUN, "tests": []})
    assert (len(shard.suite), len(shard.hardware), len(shard.shard)) == (64, 64, 16)
    attempt = {"failures": [failure(node="n" * 600, message="m" * (MAX_TEXT + 9), type="t" * 300, signature="s" * 99)],
               "cause": "c" * 300, "cause_kind": "k" * 30}  # fmt: skip
    seen = read(path="p" * 400, message="m" * (MAX_TEXT + 9), attempts=[attempt])
    (found,) = seen.failures
    assert (len(seen.path), len(seen.message), len(seen.cause), len(seen.cause_kind)) == (300, MAX_TEXT, 200, 20)
    assert (len(found.node), len(found.signature), len(found.message)) == (500, 16, 200 + len(": ") + MAX_TEXT)


def test_the_last_attempt_speaks_and_times_and_left_processes_of_all_add_up() -> None:
    attempts = [
        {"wall_s": 2, "leaked": ["1"], "failures": [failure(message="first")], "cause": "early"},
        {"wall_s": -1.0},
        {"wall_s": "3"},
        {
            "wall_s": 0.5,
            "leaked": ["2", "3"],
            "failures": [failure(message="last")],
            "cause": "oom",
            "cause_kind": "test",
        },
    ]
    seen = read(attempts=attempts, nodes={"a": "failed", "b": "passed"})
    assert (seen.wall_s, seen.leaked, seen.nodes, seen.cause, seen.cause_kind) == (2.5, 3, 2, "oom", "test")
    assert [item.message for item in seen.failures] == ["last"]


@pytest.mark.parametrize("outcome", sorted(OUTCOMES))
@pytest.mark.parametrize("tolerated", ["", "known to fail"])
@pytest.mark.parametrize("verdict", ["pass", "fail", "error"])
def test_what_blocks(outcome: str, tolerated: str, verdict: str) -> None:
    metric = {"metric": "loss", "verdict": verdict, "message": "3 is above 2"}
    attempts = [{"failures": [failure(type="ValueError")]}]
    seen = read(outcome=outcome, tolerated=tolerated, metrics=[metric], attempts=attempts)
    by_itself = outcome not in ("passed", "flaky", "unstable_failed") and not tolerated
    assert seen.blocks == (by_itself or verdict != "pass")
    own = ["ValueError: m"] if by_itself or verdict == "pass" else []
    bound = [] if verdict == "pass" else ["metric bound: 3 is above 2"]
    assert [item.message for item in seen.failures] == own + bound


def test_a_repetition_that_passed_is_told_in_every_text() -> None:
    seen = read(message="m", attempts=[{"failures": [failure()]}], reruns=["failed", "passed"])
    assert [seen.message, seen.failures[0].message] == [f"{THEN_PASSED}: m"] * 2
    assert read(message="m", reruns=["failed"]).message == "m"


def test_only_units_that_ran_were_observed() -> None:
    tests = [{"path": f"tests/{outcome}.py", "outcome": outcome, "attempts": [], "nodes": {"a": "x", "b": "x"}}
             for outcome in ("passed", "failed", "not_run", "cancelled")]  # fmt: skip
    assert read_shard({"schema": SCHEMA, "run": RUN, "tests": tests}).observed == 4


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"outcome": "great"}, r"tests\[0\]: outcome 'great' is not known"),
        ({"path": 3}, r"tests\[0\]: path: expected text, found int"),
        ({"attempts": [1]}, "attempts: expected an object, found int"),
        ({"attempts": {}}, f"attempts: expected a list of at most {MAX_TESTS}"),
        ({"nodes": []}, "nodes: expected an object, found list"),
        ({"metrics": [1]}, "metric: expected an object"),
        ({"attempts": [{"failures": [1]}]}, "failure: expected an object"),
        ({"attempts": [{"leaked": 1}]}, "leaked: expected a list"),
        ({"reruns": 1}, "reruns: expected a list"),
    ],
)
def test_another_form_is_refused_with_its_field(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(BadArtifact, match=words):
        read(**entry)


def test_a_list_of_exactly_the_limit_is_read() -> None:
    test = {"path": "a", "outcome": "passed", "attempts": []}
    assert len(read_shard({"schema": SCHEMA, "run": RUN, "tests": [test] * MAX_TESTS}).tests) == MAX_TESTS
    with pytest.raises(BadArtifact, match="expected a list of at most"):
        read_shard({"schema": SCHEMA, "run": RUN, "tests": [test] * (MAX_TESTS + 1)})
