"""Merging shards against the plan: every planned test is observed, or the run fails and names it."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_ci.cli import main
from miles_ci.errors import UsageError
from miles_ci.plan.model import Plan, Shard, SuitePlan, Unit
from miles_ci.report import junit, merge, untrusted
from miles_ci.report.results import load_all, summary
from miles_ci.run import results
from miles_ci.run.results import Attempt, FailureRecord, MetricVerdict, Provisional, RunInfo, ShardResults, TestResult

SUITE = "stage-a-cpu"


def unit(name: str, suite: str = SUITE) -> Unit:
    path = f"tests/fast/test_{name}.py"
    return Unit(path, path, suite, "test", 1000, "declared", 0, 300)


def plan_of(*shards: list[str], suite: str = SUITE) -> Plan:
    parts = tuple(
        Shard(
            suite,
            n,
            len(shards),
            "cpu",
            "cpu",
            None,
            ("ubuntu",),
            2,
            1000,
            600,
            tuple(unit(name, suite) for name in names),
        )
        for n, names in enumerate(shards, 1)
    )
    total = sum(map(len, shards))
    about = SuitePlan(suite, "cpu", total, len(shards), None, 1, 1, 1.0, 1, 1, ())
    return Plan("regular", (), False, False, None, None, (about,), parts, (), ())


def passed(name: str, **changes) -> TestResult:
    path = f"tests/fast/test_{name}.py"
    base = TestResult(path, path, "passed", attempts=(Attempt(1, "passed", 1.0),), nodes={f"{path}::test_a": "passed"})
    return dataclasses.replace(base, **changes)


def shard_of(plan: Plan, index: int, tests: list[TestResult], suite: str = SUITE, **changes) -> ShardResults:
    info = RunInfo(
        suite, "cpu", "cpu", f"{index}/{len(plan.shards)}", plan.digest, "regular", "r", 1, "c", "", "", "x", "h", 0.0
    )
    return ShardResults(dataclasses.replace(info, **changes), tests, status="complete", ended_at=1.0)


PLAN = plan_of(["a", "b"], ["c"])


def complete() -> list[ShardResults]:
    return [shard_of(PLAN, 1, [passed("a"), passed("b")]), shard_of(PLAN, 2, [passed("c")])]


def test_everything_planned_and_passed_is_exit_code_0():
    merged = merge.merge(PLAN, complete())
    assert (merged.exit_code(), merged.planned, merged.observed, merged.never_executed, merged.faults) == (
        0,
        3,
        3,
        (),
        (),
    )


def test_planned_test_without_a_result_is_never_executed_and_named_with_its_shard():
    shards = complete()
    del shards[0].tests[1]
    merged = merge.merge(PLAN, shards)
    assert merged.never_executed == ("stage-a-cpu: tests/fast/test_b.py (shard 1/2)",)
    assert merged.exit_code() == 5


def test_file_of_which_only_some_nodes_ran_is_never_executed_and_the_nodes_are_named():
    shards = complete()
    shards[0].tests[1] = passed("b", only=("tests/fast/test_b.py::test_a",))
    merged = merge.merge(PLAN, shards)
    assert (merged.observed, merged.never_executed) == (2, ("stage-a-cpu: tests/fast/test_b.py (shard 1/2)",))
    fault = "stage-a-cpu shard 1/2: of tests/fast/test_b.py only tests/fast/test_b.py::test_a was to run (--file)"
    assert merged.faults == (fault,)
    assert merged.exit_code() == 5


def test_shard_that_delivered_nothing_makes_all_its_tests_dark():
    merged = merge.merge(PLAN, complete()[:1])
    assert len(merged.never_executed) == 1
    assert merged.exit_code() == 5


def test_empty_observed_set_is_an_error_of_its_own():
    assert any("nothing was observed" in fault for fault in merge.merge(PLAN, []).faults)
    silent = [shard_of(PLAN, 1, [passed("a", outcome="not_run"), passed("b", outcome="not_run")]),
              shard_of(PLAN, 2, [passed("c", outcome="not_run")])]  # fmt: skip
    merged = merge.merge(PLAN, silent)
    assert merged.never_executed == ()
    assert any("no planned test ran" in fault for fault in merged.faults)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[1].tests.append(passed("z")), "tests/fast/test_z.py was not planned there"),
        (lambda s: s[1].tests.append(passed("a")), "tests/fast/test_a.py has a second result"),
        (lambda s: s[1].tests.append(s[0].tests.pop()), "tests/fast/test_b.py belongs to shard 1/2"),
        (lambda s: s.append(s[0]), "has a second result"),
        (lambda s: setattr(s[0], "status", "running"), "the runner died before it finished"),
        (lambda s: setattr(s[0], "info", dataclasses.replace(s[0].info, plan_digest="0" * 64)), "results of plan 0000000000000000"),
    ],
)  # fmt: skip
def test_results_that_do_not_fit_the_plan_are_faults(change, message):
    shards = complete()
    change(shards)
    merged = merge.merge(PLAN, shards)
    assert any(message in fault for fault in merged.faults), merged.faults
    assert merged.exit_code() == 5


def test_result_from_the_wrong_shard_is_seen_so_that_a_second_one_is_named_and_nothing_counts_as_never_executed():
    shards = complete()
    shards[1].tests.append(shards[0].tests.pop())
    assert merge.merge(PLAN, shards).never_executed == ()
    shards[1].tests.append(shards[1].tests[-1])
    assert merge.merge(PLAN, shards).faults == (
        "stage-a-cpu shard 2/2: tests/fast/test_b.py belongs to shard 1/2",
        "stage-a-cpu shard 2/2: tests/fast/test_b.py has a second result, the first is from stage-a-cpu shard 2/2",
    )


def test_skipped_suite_needs_no_results_and_an_unknown_one_is_a_fault():
    assert merge.merge(PLAN, [], skipped={SUITE: "what it needs failed"}).exit_code() == 0
    merged = merge.merge(PLAN, complete(), skipped={"stage-z": "why not"})
    assert "the plan has no such suite" in merged.faults[0]


def test_never_executed_test_outranks_a_failed_one_and_infra_ranks_last():
    shards = complete()
    shards[0].tests[0] = passed("a", outcome="failed")
    assert merge.merge(PLAN, shards).exit_code() == 1
    del shards[0].tests[1]
    assert merge.merge(PLAN, shards).exit_code() == 5


@given(st.lists(st.sampled_from("abcdefgh"), unique=True), st.sets(st.sampled_from("abcdefgh")))
def test_never_executed_is_exactly_planned_minus_observed(planned, missing):
    plan = plan_of(planned or ["x"])
    there = [name for name in planned if name not in missing]
    merged = merge.merge(plan, [shard_of(plan, 1, [passed(name) for name in there])])
    missing = {line.split("test_")[1].split(".py")[0] for line in merged.never_executed}
    assert missing == set(planned or ["x"]) - set(there)
    assert merged.planned == len(there) + len(merged.never_executed)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [("passed", 0), ("flaky", 0), ("unstable_failed", 0), ("failed", 1), ("error", 1), ("timeout", 1), ("no_tests", 1),
     ("all_skipped", 1), ("declaration_error", 2), ("infra", 3), ("not_run", 3), ("cancelled", 130)],
)  # fmt: skip
def test_every_outcome_has_its_exit_code(outcome, code):
    assert passed("a", outcome=outcome).exit_code() == code


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [(["infra", "failed"], 1), (["infra", "passed"], 3), (["failed", "declaration_error"], 2),
     (["cancelled", "declaration_error"], 130), (["infra", "bound"], 6), (["failed", "bound"], 1)],
)  # fmt: skip
def test_the_strongest_exit_code_wins(outcomes, code):
    tests = []
    for number, outcome in enumerate(outcomes):
        metrics = (MetricVerdict("loss", "fail", "too high"),) if outcome == "bound" else ()
        tests.append(passed(str(number), outcome="passed" if outcome == "bound" else outcome, metrics=metrics))
    assert shard_of(PLAN, 1, tests).exit_code() == code


def test_results_survive_writing_and_reading(tmp_path):
    failure = FailureRecord("tests/fast/test_a.py::test_a", "ValueError", "bad \x00 value", "0" * 16, "a.py:f:1")
    attempt = Attempt(
        1, "failed", 1.5, "bad", 1, None, "test", "test", "none", {"failed": 1}, (failure,), ("pid 1: x",), ("0:1",)
    )
    test = passed(
        "a", outcome="failed", attempts=(attempt,), metrics=(MetricVerdict("m", "fail", "x", 1.0),), node_ms={"n": 3},
        only=("n",),
    )  # fmt: skip
    shard = shard_of(PLAN, 1, [test])
    shard.provisional["b"] = Provisional("b", "tests/fast/test_b.py", {"failed": 1}, (failure,))
    shard.write(tmp_path)
    assert results.read_results(tmp_path / "results.json") == shard


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "results schema 'list' is not supported"),
        ('{"schema": 1}', "schema 1 is not supported"),
        ('{"schema": 2}', "damaged results file: 'run' is missing"),
    ],
)
def test_damaged_results_file_is_named_with_its_fault(tmp_path, text, message):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UsageError, match=r"results\.json") as caught:
        load_all([tmp_path])
    assert message in str(caught.value)


def test_junit_is_valid_xml_whatever_the_messages_hold(tmp_path):
    nasty = "\x1b[31mred\x1b[0m \x00\x08\x1f <&> ]]> \ud800 \uffff end"
    failure = FailureRecord("tests/fast/test_a.py::test_a", "E", nasty, "0" * 16)
    test = passed("a", outcome="failed", nodes={failure.node: "failed"},
                  attempts=(Attempt(1, "failed", 1.0, failures=(failure,)),))  # fmt: skip
    shard = shard_of(PLAN, 1, [test, passed("b", outcome="no_tests", message="nothing", nodes={}, attempts=())])
    junit.write(shard, tmp_path / "junit.xml")
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "1")
    text = suite.find("testcase/failure").text
    assert text.startswith("red ")
    assert text.endswith(" end")


@given(st.text())
def test_cleaned_text_is_always_readable_as_xml(text):
    element = ElementTree.Element("a")
    element.text = junit.clean(text)
    read = ElementTree.fromstring(ElementTree.tostring(element, encoding="unicode")).text or ""
    assert set(read) <= set(text) | {"\n"}  # XML reads a carriage return as a line end


def test_summary_tells_what_blocks_what_leaked_and_the_code():
    leaking = passed("a", attempts=(Attempt(1, "passed", 1.0, leaked=("pid 7: sleep",)),))
    text = summary([shard_of(PLAN, 1, [leaking, passed("b", outcome="infra", message="gpu-occupied: pid 9")])])
    assert "LEAKED       tests/fast/test_a.py: pid 7: sleep" in text
    assert "INFRA        tests/fast/test_b.py: gpu-occupied: pid 9" in text
    assert "exit code 3" in text


def test_items_that_did_not_run_and_those_that_need_not_are_named():
    test = passed("a", never_executed={"tests/fast/test_a.py::test_b": "deselected by -m"},
                  allowed={"tests/fast/test_a.py::test_c": "needs a licence"})  # fmt: skip
    lines = summary([shard_of(PLAN, 1, [test])]).splitlines()
    assert "NEVER RUN    tests/fast/test_a.py::test_b: deselected by -m" in lines
    assert "LEFT OUT     tests/fast/test_a.py::test_c: needs a licence" in lines


def test_what_was_not_judged_is_shown_as_far_as_it_was_seen():
    failure = FailureRecord("tests/fast/test_b.py::test_b", "E", "first\nsecond", "0" * 16)
    shard = shard_of(PLAN, 1, [passed("a")])
    shard.provisional["b"] = Provisional(
        "b", "tests/fast/test_b.py", {"failed": 1, "passed": 2, "error": 0}, (failure,)
    )
    shard.provisional["c"] = Provisional("c", "tests/fast/test_c.py", {}, ())
    assert "PROVISIONAL" not in summary([shard])
    shard.status = "running"
    text = summary([shard]).splitlines()
    assert "PROVISIONAL  b: 1 failed, 2 passed, not judged; tests/fast/test_b.py::test_b: E: first" in text
    assert "PROVISIONAL  c: no test, not judged" in text


def test_slowest_files_are_listed_as_many_as_are_asked_for():
    tests = [passed(name, attempts=(Attempt(1, "passed", float(n)),)) for n, name in enumerate("abcdef")]
    lines = summary([shard_of(PLAN, 1, tests)], slowest=2).splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["5.0", "s", "tests/fast/test_f.py"],
        ["4.0", "s", "tests/fast/test_e.py"],
    ]
    assert "slowest: tests/fast/test_f.py 5.0 s" in summary([shard_of(PLAN, 1, tests)])


def test_merge_command_writes_the_merged_file_and_exits_5_on_a_never_executed_test(tmp_path, capsys):
    PLAN.save(tmp_path / "plan.json")
    shards = complete()
    del shards[1].tests[0]
    for number, shard in enumerate(shards):
        shard.write(tmp_path / "r" / str(number))
    out = tmp_path / "merged.json"
    code = main(["results", "merge", "--plan", str(tmp_path / "plan.json"), "--out", str(out), str(tmp_path / "r")])
    assert code == 5
    assert "NEVER RUN    stage-a-cpu: tests/fast/test_c.py" in capsys.readouterr().out
    assert json.loads(out.read_text())["never_executed"]


def test_merge_command_without_any_result_is_never_executed_not_a_usage_error(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    (tmp_path / "r").mkdir()
    assert main(["results", "merge", "--plan", str(tmp_path / "plan.json"), str(tmp_path / "r")]) == 5


def test_suite_that_the_plan_does_not_have_is_a_usage_error_with_the_nearest_name(tmp_path, capsys):
    PLAN.save(tmp_path / "plan.json")
    (tmp_path / "r").mkdir()
    words = ["results", "merge", "--plan", str(tmp_path / "plan.json"), str(tmp_path / "r"), "--suite"]
    assert main([*words, "stage-a-cpuu"]) == 2
    assert "--suite stage-a-cpuu: not a suite of the plan; did you mean 'stage-a-cpu'?" in capsys.readouterr().err
    assert main([*words, SUITE]) == 5


@pytest.mark.parametrize(("action", "option"), [
    ("show", "--plan"), ("show", "--out"), ("show", "--suite"), ("show", "--skipped"), ("show", "--history"),
    ("merge", "--history"), ("merge", "--slowest"), ("flaky", "--plan"), ("flaky", "--slowest"),
])  # fmt: skip
def test_option_of_another_action_is_refused_not_ignored(tmp_path, capsys, action, option):
    shard_of(PLAN, 1, [passed("a")]).write(tmp_path)
    assert main(["results", action, str(tmp_path), option, "7"]) == 2
    assert f"{option} belongs to `results " in capsys.readouterr().err


def test_altered_plan_is_refused_with_exit_code_5(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text().replace("test_a.py", "test_x.py")
    (tmp_path / "plan.json").write_text(text)
    assert main(["results", "merge", "--plan", str(tmp_path / "plan.json"), str(tmp_path)]) == 5


def test_failure_that_passed_when_repeated_says_so_in_every_text():
    failure = FailureRecord("tests/fast/test_a.py::test_a", "ValueError", "bad", "0" * 16)
    test = passed("a", outcome="failed", message="bad", nodes={failure.node: "failed"}, reruns=("failed", "passed"),
                  attempts=(Attempt(1, "failed", 1.0, failures=(failure,)),))  # fmt: skip
    shard = shard_of(PLAN, 1, [test])
    assert "bad; failed, then passed (flaky): repetition 2 passed" in summary([shard])
    detail = next(junit.junit(shard).iter("failure"))
    assert detail.get("message") == "failed, then passed (flaky): bad"
    (seen,) = untrusted.read_shard(json.dumps(shard.as_json()).encode()).tests
    assert seen.failures[0].message == "failed, then passed (flaky): ValueError: bad"
    assert (seen.blocks, shard.exit_code()) == (True, 1)
    broken = shard_of(PLAN, 1, [dataclasses.replace(test, reruns=("failed",))])
    assert "bad; failed in 1 repetition(s) too" in summary([broken])


def test_file_of_expected_failures_only_is_shown_as_xfailed():
    text = summary([shard_of(PLAN, 1, [passed("a", nodes={"n": "xfailed"}), passed("b")])])
    assert "XFAILED      tests/fast/test_a.py: 1 test(s) failed as expected, none passed" in text
    assert "2 passed (1 of the passed only xfailed)" in text


@pytest.mark.parametrize(("outcome", "status", "code"), [
    ("passed", "complete", 0), ("failed", "complete", 1), ("infra", "complete", 3), ("passed", "running", 3),
])  # fmt: skip
def test_showing_results_exits_as_the_run_did(tmp_path, outcome, status, code):
    shard = shard_of(PLAN, 1, [passed("a", outcome=outcome)])
    shard.status = status
    shard.write(tmp_path)
    assert main(["results", "show", str(tmp_path)]) == code
    assert main(["results", "show", str(tmp_path), "--format", "json"]) == code
