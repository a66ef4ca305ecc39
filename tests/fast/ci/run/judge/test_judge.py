"""From evidence to outcome, case by case, without processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_ci.plan.slots import start_order
from miles_ci.run.judge import judge, pytest_events
from miles_ci.run.judge.judge import ProcessEvidence
from miles_ci.run.judge.never_executed import NeverExecuted
from miles_ci.run.judge.pytest_events import JUnitCounts
from miles_ci.run.judge.retry import RetryRow
from miles_ci.run.process import pytest_process
from miles_ci.run.process.supervisor_client import Ended, Leftover
from miles_ci.run.slug import slug
from tests.fast.ci.helpers.units import unit as made_unit

PATH = "tests/fast/test_x.py"
UNIT = made_unit(PATH, PATH, 1.0, 60)
ROWS = (
    RetryRow("host-oom", "infra", ("exit",), "137", "retry", 2),
    RetryRow("reset", "infra", ("exception", "log_tail"), "Connection reset by peer", "retry", 2),
)


def events(tmp_path: Path, *entries: dict) -> pytest_events.Observed:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return pytest_events.read_events(path)


def collected(*names: str) -> dict:
    return {"event": "collected", "nodes": [f"{PATH}::{name}" for name in names]}


def phase(name: str, when: str = "call", result: str = "passed", **extra) -> dict:
    return {"event": "phase", "node": f"{PATH}::{name}", "when": when, "outcome": result, "seconds": 0.1, **extra}


def failure(kind: str = "ValueError", message: str = "bad", *, asserted: bool = False) -> dict:
    exceptions = [f"{kind}: {message}"]
    return {"type": kind, "exceptions": exceptions, "frames": [[PATH, "test_a", 3]], "asserted_in_test": asserted}


def judged_of(
    observed: pytest_events.Observed,
    ended: Ended,
    junit: JUnitCounts | None,
    never_executed=(),
    unit=UNIT,
    tail: str = "",
):
    return judge.judge_unit(unit, ProcessEvidence(ended, observed, junit, tail), never_executed, ROWS)


EXIT_0 = Ended("exited", 1.0, exit_code=0)
EXIT_1 = Ended("exited", 1.0, exit_code=1)
ONE = JUnitCounts(1, 0, 0, 0)


def test_passed_needs_agreement_of_exit_code_junit_and_events(tmp_path):
    seen = events(tmp_path, collected("test_a"), phase("test_a"))
    assert judged_of(seen, EXIT_0, ONE).outcome == "passed"


@pytest.mark.parametrize(
    ("ended", "junit", "message"),
    [
        (EXIT_0, JUnitCounts(1, 1, 0, 0), "exit code 0, but JUnit counts 1 failure"),
        (EXIT_0, JUnitCounts(0, 0, 0, 0), "exit code 0, but JUnit counts no test"),
        (EXIT_1, ONE, "exit code 1, but JUnit counts no failure"),
        (EXIT_1, JUnitCounts(1, 1, 0, 0), "the runner's own record 0 failing file"),
        (EXIT_0, None, "left no readable JUnit file"),
        (Ended("exited", 1.0, exit_code=5), ONE, "nothing collected"),
        (Ended("exited", 1.0, exit_code=3), ONE, "exit code 3 (internal error)"),
        (Ended("exited", 1.0, exit_code=4), ONE, "exit code 4 (usage error)"),
        (Ended("exited", 1.0, exit_code=77), ONE, "exit code 77"),
    ],
)
def test_witnesses_that_disagree_are_an_error(tmp_path, ended, junit, message):
    seen = events(tmp_path, collected("test_a"), phase("test_a"))
    judged = judged_of(seen, ended, junit)
    assert judged.outcome == "error"
    assert message in judged.message


OTHER = "tests/fast/test_other.py"
END = {"event": "end", "exit": 0, "failed": 1, "collected": 2}


def shared_process(tmp_path: Path, *, other: str = "failed") -> pytest_events.Observed:
    """Two files in one process: test_x passed, test_other as told."""
    broken = {"failure": failure()} if other == "failed" else {}
    node = {"event": "phase", "node": f"{OTHER}::test_b", "when": "call", "outcome": other, "seconds": 0.1, **broken}
    return events(tmp_path, collected("test_a"), {"event": "collected", "nodes": [f"{OTHER}::test_b"]},
                  phase("test_a"), node, END)  # fmt: skip


def test_wrong_exit_code_of_a_shared_process_costs_only_the_file_that_failed(tmp_path):
    junit = JUnitCounts(2, 1, 0, 0, {"tests.fast.test_other": 1})
    seen = shared_process(tmp_path)
    assert judged_of(seen, EXIT_0, junit).outcome == "passed"
    assert judged_of(seen, EXIT_0, junit, unit=made_unit(OTHER, OTHER, 1.0, 60)).outcome == "failed"
    odd = judge.odd_exit(ProcessEvidence(EXIT_0, seen, junit, ""))
    assert odd == "exit code 0, but JUnit counts 1 failure(s) and 0 error(s)"
    assert judge.odd_exit(ProcessEvidence(EXIT_1, seen, junit, "")) is None


def test_failure_that_only_junit_knows_is_an_error_of_its_file_alone(tmp_path):
    junit = JUnitCounts(2, 1, 0, 0, {"tests.fast.test_other.TestB": 1})
    seen = shared_process(tmp_path, other="passed")
    judged = judged_of(seen, EXIT_1, junit, unit=made_unit(OTHER, OTHER, 1.0, 60))
    assert (judged.outcome, "the runner's own record none" in judged.message) == ("error", True)
    assert judged_of(seen, EXIT_1, junit).outcome == "passed"


@pytest.mark.parametrize("junit", [JUnitCounts(2, 1, 0, 0, {"elsewhere.test_c": 1}), JUnitCounts(2, 0, 0, 0)])
def test_exit_code_that_no_file_explains_is_an_error_of_every_file(tmp_path, junit):
    seen = shared_process(tmp_path, other="passed")
    assert judged_of(seen, EXIT_1, junit).outcome == "error"


def test_wrong_exit_code_of_a_session_that_did_not_end_is_an_error_of_every_file(tmp_path):
    seen = shared_process(tmp_path)
    seen.ended = None
    assert judged_of(seen, EXIT_0, JUnitCounts(2, 1, 0, 0, {"tests.fast.test_other": 1})).outcome == "error"


@pytest.mark.parametrize(
    ("entries", "out_of_time", "died"),
    [
        ([], "again", "again"),
        ([collected("test_a")], "again", "again"),
        ([collected("test_a", "test_b"), phase("test_a")], "again", "again"),
        ([collected("test_a"), phase("test_a")], None, "again"),
        ([collected("test_a", "test_b"), {"event": "start", "node": f"{PATH}::test_b"}], None, "alone"),
        ([collected("test_a", "test_b"), phase("test_a"), phase("test_b", "setup")], None, "alone"),
        ([collected("test_a"), phase("test_a", result="failed", failure=failure())], None, None),
        ([collected("test_a", "test_b"), phase("test_a", result="failed", failure=failure())], "again", "again"),
        ([collected("test_a", "test_b"), phase("test_a", result="failed", failure=failure()),
          {"event": "start", "node": f"{PATH}::test_b"}], None, "alone"),
    ],
)  # fmt: skip
def test_innocent_files_of_a_shared_process_that_ended_badly_run_again(tmp_path, entries, out_of_time, died):
    seen = events(tmp_path, *entries)

    def chance(ended: Ended) -> str | None:
        return judge.second_chance(UNIT, ProcessEvidence(ended, seen, None, ""))

    assert chance(Ended("timeout", 9.0)) == out_of_time
    assert chance(Ended("exited", 1.0, signal=11)) == chance(Ended("exited", 1.0, exit_code=3)) == died
    assert chance(EXIT_0) is chance(EXIT_1) is chance(Ended("cancelled", 1.0)) is None


def test_junit_class_belongs_to_the_longest_path(tmp_path):
    counts = JUnitCounts(3, 3, 0, 0, {"tests.a.test_b": 1, "tests.a.test_b.test_c.TestD": 2})
    assert counts.bad_by_file(["tests/a/test_b.py", "tests/a/test_b/test_c.py"]) == {
        "tests/a/test_b.py": 1,
        "tests/a/test_b/test_c.py": 2,
    }


def test_item_that_never_reported_is_an_error_although_pytest_is_content(tmp_path):
    seen = events(tmp_path, collected("test_a", "test_b"), phase("test_a"))
    judged = judged_of(seen, EXIT_0, ONE)
    assert (judged.outcome, "test_b" in judged.message) == ("error", True)


def test_failure_in_teardown_after_a_passed_call_is_an_error(tmp_path):
    seen = events(
        tmp_path, collected("test_a"), phase("test_a"), phase("test_a", "teardown", "failed", failure=failure())
    )
    assert judged_of(seen, EXIT_1, JUnitCounts(1, 0, 1, 0)).outcome == "error"


def test_failure_with_an_infrastructure_cause_is_infra_and_keeps_its_message(tmp_path):
    broken = failure("ConnectionResetError", "Connection reset by peer")
    seen = events(tmp_path, collected("test_a"), phase("test_a", result="failed", failure=broken))
    judged = judged_of(seen, EXIT_1, JUnitCounts(1, 1, 0, 0))
    assert (judged.outcome, judged.cause.name) == ("infra", "reset")
    assert "test_a" in judged.message


def test_process_killed_from_outside_is_host_oom(tmp_path):
    seen = events(tmp_path, collected("test_a"))
    judged = judged_of(seen, Ended("exited", 1.0, signal=9), None)
    assert (judged.outcome, judged.cause.name) == ("infra", "host-oom")


def test_process_that_ends_with_a_segmentation_fault_is_an_error_of_the_test(tmp_path):
    judged = judged_of(events(tmp_path, collected("test_a")), Ended("exited", 1.0, signal=11), None)
    assert (judged.outcome, judged.cause.kind) == ("error", "test")
    assert "signal 11" in judged.message


def test_timeout_names_what_was_running(tmp_path):
    seen = events(tmp_path, collected("test_a", "test_b"), phase("test_a"), phase("test_b", "setup"))
    judged = judged_of(seen, Ended("timeout", 9.0), None)
    assert judged.outcome == "timeout"
    assert "still running after 9 s: tests/fast/test_x.py::test_b" in judged.message


def test_file_that_was_finished_before_the_timeout_of_the_shared_process_keeps_its_result(tmp_path):
    seen = events(tmp_path, collected("test_a"), phase("test_a"))
    assert judged_of(seen, Ended("timeout", 9.0), None).outcome == "passed"
    assert judged_of(seen, Ended("cancelled", 9.0), None).outcome == "passed"


def test_survivors_of_sigkill_stop_the_host(tmp_path):
    ended = Ended("exited", 1.0, exit_code=0, survivors=(Leftover(7, "stuck"),))
    judged = judged_of(events(tmp_path, collected("test_a"), phase("test_a")), ended, ONE)
    assert (judged.outcome, judged.cause.action) == ("infra", "stop_host")
    assert "unkillable" in judged.message
    assert "pid 7 stuck" in judged.message


@pytest.mark.parametrize("reason", ["spawn", "lost"])
def test_harness_failures_are_infra(tmp_path, reason):
    assert judged_of(events(tmp_path), Ended(reason, 1.0, error="why"), None).outcome == "infra"


def test_other_number_of_devices_than_leased_is_infra(tmp_path):
    seen = events(tmp_path, {"event": "devices", "expected": 2, "seen": 8})
    judged = judged_of(seen, Ended("exited", 1.0, exit_code=3), None)
    assert (judged.outcome, judged.cause.action) == ("infra", "stop_host")


def test_never_executed_tests_turn_a_passed_file_into_an_error_but_never_hide_a_failure(tmp_path):
    hidden = [NeverExecuted("test_dead", 9, "not collected by pytest")]
    seen = events(tmp_path, collected("test_a"), phase("test_a"))
    assert judged_of(seen, EXIT_0, ONE, hidden).outcome == "error"
    broken = events(tmp_path, collected("test_a"), phase("test_a", result="failed", failure=failure()))
    assert judged_of(broken, EXIT_1, JUnitCounts(1, 1, 0, 0), hidden).outcome == "failed"


def test_skips_and_expected_failures_are_told_apart(tmp_path):
    skipped = events(tmp_path, collected("test_a"), phase("test_a", "setup", "skipped", reason="not here"))
    judged = judged_of(skipped, EXIT_0, JUnitCounts(1, 0, 0, 1))
    assert judged.outcome == "all_skipped"
    assert "not here" in judged.message
    expected = events(tmp_path, collected("test_a"), phase("test_a", "call", "skipped", xfail="known"))
    assert judged_of(expected, EXIT_0, JUnitCounts(1, 0, 0, 1)).outcome == "passed"


def test_event_line_cut_short_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(collected("test_a")) + "\n" + json.dumps(phase("test_a"))[:20])
    assert pytest_events.read_events(path).files[PATH].items[f"{PATH}::test_a"].outcome is None
    assert pytest_events.read_events(tmp_path / "absent").files == {}


def test_growing_events_are_read_piece_by_piece_and_each_line_once(tmp_path):
    path = tmp_path / "events.jsonl"
    reader = pytest_events.EventReader(path)
    assert reader.read().files == {}
    line = json.dumps(phase("test_a")) + "\n"
    path.write_text(line[:20])
    assert reader.read().files == {}
    path.write_text(line + line[:20])
    item = reader.read().files[PATH].items[f"{PATH}::test_a"]
    assert (item.outcome, item.seconds) == ("passed", 0.1)
    assert reader.read().files[PATH].items[f"{PATH}::test_a"].seconds == 0.1


def test_parts_of_a_split_file_are_given_to_pytest_by_node_and_by_exclusion(tmp_path):
    files = pytest_process.Files.below(tmp_path, "x", 1)
    named = made_unit(f"{PATH}#2/2", PATH, 1.0, 60, nodes=(f"{PATH}::test_b",))
    rest = made_unit(f"{PATH}#1/2", PATH, 1.0, 60, deselect=(f"{PATH}::test_b",))
    assert pytest_process.command_line([named], files, workers=None)[-1] == f"{PATH}::test_b"
    assert pytest_process.command_line([rest], files, workers=None)[-2:] == [PATH, f"--runs-elsewhere={PATH}::test_b"]


def test_two_units_never_share_a_file_name():
    names = [
        "tests/a_b/test_x.py",
        "tests/a/b_test_x.py",
        "tests/a.b/test_x.py",
        "tests/a-b/test_x.py",
        "tests/a/b/test_x.py",
        "tests/e2e/test_x.py#1/2",
    ]
    assert len({slug(name) for name in names}) == len(names)
    assert len(slug("x/" * 300)) <= 150


def test_longest_starts_first_and_serial_files_come_last():
    units = [made_unit("a", "a", 1.0, 9), made_unit("b", "b", 5.0, 9), made_unit("c", "c", 9.0, 9, serial=True)]
    assert [unit.id for unit in start_order(units)] == ["b", "a", "c"]


def crash_report(name: str) -> dict:
    """What xdist reports for a worker that died: a phase of its own, `???`."""
    text = f"worker 'gw1' crashed while running '{PATH}::{name}'"
    details = {"type": "crash", "exceptions": [text], "frames": [], "asserted_in_test": False}
    return phase(name, "???", "failed", failure=details)


DEAD_WORKER = {"event": "worker-died", "worker": "gw1", "text": "Not properly terminated"}
START = {"event": "start", "node": f"{PATH}::test_a"}


@pytest.mark.parametrize(
    ("entries", "chance"),
    [
        ([START, crash_report("test_a")], None),  # guilty: it was running
        ([crash_report("test_a")], "alone"),  # blamed, but it never started
        ([START], "alone"),
        ([phase("test_a")], None),  # keeps its result
        ([], "again"),
        ([phase("test_a", result="failed", failure=failure())], None),
    ],
)
def test_death_of_one_worker_costs_only_the_file_whose_test_was_running(tmp_path, entries, chance):
    seen = events(tmp_path, collected("test_a"), *entries, DEAD_WORKER, END)
    assert judge.second_chance(UNIT, ProcessEvidence(EXIT_1, seen, JUnitCounts(2, 0, 1, 0), "")) == chance


def test_test_that_killed_its_worker_is_an_error_that_says_crashed(tmp_path):
    seen = events(tmp_path, collected("test_a"), START, crash_report("test_a"), DEAD_WORKER, END)
    judged = judged_of(seen, EXIT_1, JUnitCounts(1, 0, 1, 0, {"tests.fast.test_x": 1}))
    assert (judged.outcome, judged.message.startswith(f"crashed: {PATH}::test_a: ")) == ("error", True)


@pytest.mark.parametrize(("reason", "chance"), [("exited", "alone"), ("timeout", None)])
def test_file_that_was_being_imported_when_all_ended_is_singled_out(tmp_path, reason, chance):
    seen = events(tmp_path, {"event": "importing", "worker": "gw0", "node": PATH})
    ended = Ended(reason, 1.0, exit_code=3 if reason == "exited" else None)
    process = ProcessEvidence(ended, seen, None, "")
    assert judge.second_chance(UNIT, process) == chance
    assert judge.second_chance(made_unit(OTHER, OTHER, 1.0, 60), process) == "again"


def test_results_reported_before_the_supervisor_was_lost_are_kept(tmp_path):
    lost = Ended("lost", 1.0, error="the supervisor ended without a report")
    assert judged_of(events(tmp_path, collected("test_a"), phase("test_a")), lost, None).outcome == "passed"
    bad = events(tmp_path, collected("test_a"), phase("test_a", result="failed", failure=failure()))
    assert judged_of(bad, lost, None).outcome == "failed"
    half = events(tmp_path, collected("test_a", "test_b"), phase("test_a"))
    assert judged_of(half, lost, None).outcome == "infra"


@pytest.mark.parametrize("text", ["[NOTRUN] too slow", "reason: [NOTRUN] too slow"])
def test_expected_failure_that_is_never_executed_counts_as_skipped(tmp_path, text):
    seen = events(tmp_path, collected("test_a"), phase("test_a", "setup", "skipped", xfail=text))
    judged = judged_of(seen, EXIT_0, JUnitCounts(1, 0, 0, 1))
    assert judged.outcome == "all_skipped"
    assert "xfail(run=False) too slow" in judged.message


def test_printed_infrastructure_text_beside_a_fault_of_the_program_is_a_test_failure(tmp_path):
    details = failure("AttributeError", "'NoneType' object has no attribute 'x'")
    broken = phase("test_a", result="failed", failure=details, output="Connection reset by peer")
    judged = judged_of(events(tmp_path, collected("test_a"), broken), EXIT_1, JUnitCounts(1, 1, 0, 0))
    assert (judged.outcome, judged.cause.kind) == ("failed", "test")


def test_nothing_that_an_earlier_run_left_is_evidence_of_this_one(tmp_path):
    before = pytest_process.Files.below(tmp_path, "x", 1)
    before.metrics.mkdir()
    for path in (before.log, before.events, before.junit, before.metrics / "m.jsonl"):
        path.write_text("old")
    again = pytest_process.Files.below(tmp_path, "x", 1)
    assert again == before
    assert not any(path.exists() for path in (again.log, again.events, again.junit, again.metrics))


def one_failed_one_left(tmp_path: Path, *entries: dict) -> pytest_events.Observed:
    broken = phase("test_a", result="failed", failure=failure("AssertionError", "assert 1 == 2"))
    return events(tmp_path, collected("test_a", "test_b"), broken, *entries)


WAITING_OTHER = {"event": "collected", "nodes": [f"{OTHER}::test_b"]}
START_B = {"event": "start", "node": f"{PATH}::test_b"}
FIRST = f"{PATH}::test_a: AssertionError: assert 1 == 2"


def test_assertion_is_not_hidden_behind_the_hang_of_another_file(tmp_path):
    judged = judged_of(one_failed_one_left(tmp_path, WAITING_OTHER), Ended("timeout", 25.0), None)
    assert judged.outcome == "failed"
    assert judged.message == f"{FIRST}; 1 test(s) never had their turn, next was {PATH}::test_b"


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (Ended("timeout", 25.0), ("timeout", f"still running after 25 s: {PATH}::test_b; before that {FIRST}")),
        (
            Ended("exited", 1.0, signal=9),
            ("error", f"crashed: pytest was killed by signal 9 while running {PATH}::test_b; before that {FIRST}"),
        ),
        (
            Ended("exited", 1.0, exit_code=1),
            (
                "error",
                f"crashed: the process ended with exit code 1 while running {PATH}::test_b; before that {FIRST}",
            ),
        ),
    ],
)
def test_file_that_failed_and_then_hung_or_died_says_both(tmp_path, ended, expected):
    judged = judged_of(one_failed_one_left(tmp_path, START_B), ended, None)
    assert (judged.outcome, judged.message) == expected


def test_crash_beside_the_hang_of_another_file_is_named(tmp_path):
    seen = events(tmp_path, collected("test_a", "test_b"), WAITING_OTHER, START, crash_report("test_a"), DEAD_WORKER)
    process = ProcessEvidence(Ended("timeout", 25.0), seen, None, "")
    assert judge.second_chance(UNIT, process) is None
    judged = judge.judge_unit(UNIT, process, (), ROWS)
    assert judged.outcome == "error"
    assert judged.message.startswith(f"crashed: {PATH}::test_a: ")
    assert judged.message.endswith(f"next was {PATH}::test_b")


def test_guess_of_xdist_beside_a_hang_is_checked_alone_and_does_not_stand(tmp_path):
    seen = events(tmp_path, collected("test_a"), WAITING_OTHER, crash_report("test_a"), DEAD_WORKER)
    process = ProcessEvidence(Ended("timeout", 25.0), seen, None, "")
    assert (judge.second_chance(UNIT, process), judge.seen_failing(UNIT, process)) == ("alone", [])


def test_failure_seen_in_one_turn_stands_whatever_the_next_turn_says(tmp_path):
    first = ProcessEvidence(Ended("timeout", 25.0), one_failed_one_left(tmp_path), None, "")
    seen = events(tmp_path, collected("test_a", "test_b"), phase("test_a"), phase("test_b"), END)
    second = ProcessEvidence(EXIT_0, seen, JUnitCounts(2, 0, 0, 0), "")
    stands = judge.seen_failing(UNIT, first)
    judged = judge.judge_unit(UNIT, second.with_failures(PATH, stands), (), ROWS)
    assert (judged.outcome, judged.message) == ("failed", FIRST)
    assert judge.judge_unit(UNIT, second, (), ROWS).outcome == "passed"
    hangs = ProcessEvidence(Ended("timeout", 9.0), events(tmp_path, collected("test_a"), START), None, "")
    assert judge.judge_unit(UNIT, hangs.with_failures(PATH, stands), (), ROWS).outcome == "timeout"
