"""Commands, markers and the outcome table."""

from __future__ import annotations

import itertools

import pytest

from miles_ci.bot.grammar import Command, Problem, parse_commands
from miles_ci.bot.marker import Marker, ours, parse_marker
from miles_ci.bot.rerun.verdict import verdict
from miles_ci.workflows.simulate import JOB_RESULTS

GOOD = "tests/fast/ci/bot/test_x.py"


def one(body: str) -> Command | Problem | None:
    found = parse_commands(body, labels=["run-ci-kernels", "run-ci-all"])
    assert len(found) <= 1
    return found[0] if found else None


def test_each_command_is_read() -> None:
    assert one(f"/rerun-test {GOOD}") == Command("/rerun-test", 1, file=GOOD)
    assert one(f"/rerun-test {GOOD}::TestA::test_b[x-1] suite=stage-b-cpu") == Command(
        "/rerun-test", 1, file=GOOD, node="TestA::test_b[x-1]", suite="stage-b-cpu"
    )
    assert one("/rerun-failed") == Command("/rerun-failed", 1)
    assert one("/ok-to-test " + "0a" * 6) == Command("/ok-to-test", 1, sha="0a" * 6)
    assert one("/run-ci-kernels") == Command("/run-ci", 1, label="run-ci-kernels")
    for word in ("/help", "/cancel", "/lint", "/clear-labels", "/bypass-fastfail", "/not-ok-to-test"):
        assert one(word) == Command(word, 1)
    assert one("/test ?") == Command("/test", 1)


@pytest.mark.parametrize(
    "body",
    [
        " /help",
        "> /help",
        "```\n/help\n```",
        "    /help",
        "<!--\n/help\n-->",
        "/approve",
        "/retest-all",
        "see /help",
        "/etc/passwd",
    ],
)
def test_text_that_is_no_command_of_ours_is_ignored(body: str) -> None:
    assert one(body) is None


@pytest.mark.parametrize(
    "body",
    [
        "/hlep",
        "/rerun-tests x",
        "/cancell",
        "/run-ci-kernel",
        "/help me",
        "/ok-to-test abc",
        "/test",
        "/rerun-test",
        "/rerun-failed a b",
        "/run-ci-nope",
        "/OK-to-test",
    ],
)
def test_a_near_miss_gets_a_problem(body: str) -> None:
    assert isinstance(one(body), Problem)


def test_more_than_five_commands_run_none() -> None:
    found = parse_commands("\n".join(["/help"] * 6))
    assert len(found) == 1
    assert isinstance(found[0], Problem)


INJECTIONS = [
    "tests/fast/../../etc/test_x.py", "tests/fast//test_x.py", "/tests/fast/test_x.py", "tests/fast/test_x.py;id", "tests/fast/test_x.py&&id", "tests/fast/$(id)/test_x.py",
    "tests/fast/`id`/test_x.py", "tests/fast/test_x.py|id", "tests/fast/test_x.py>out", "tests/fast/-x/test_x.py", "tests/fast/.hidden/test_x.py", "tests/fast/test_x.py\\",
    "tests/fast/test_x.pyc", "tests/fast/x.py", "tests/other/test_x.py", "tests/fast/test_x.py::", "tests/fast/test_x.py::a;b", "tests/fast/test_x.py::$(id)", "tests/fast/test_x.py::`id`",
    "tests/fast/test_x.py::a|b", "tests/fast/test_x.py::" + "a" * 201, "tests/fast/test_x.py::a'b", 'tests/fast/test_x.py::a"b', "tests/fast/test_x.py::${{secrets.X}}", "tests/fast/${{github.token}}/test_x.py",
    "tests/fast/test_é.py", "tests/fast/test_x.py%0a::x", "tests/fast/te\u200bst_x.py", "tests/fast/a b/test_x.py", "tests/fast/test_x.py::a@b", "tests/fast/test_x.py::a\u202eb", "tests\\fast\\test_x.py",
    "~/tests/fast/test_x.py", "file:tests/fast/test_x.py", "tests/fast/test_*.py", "tests/fast/{a,b}/test_x.py", "tests/fast/test_x.py#", "tests/fast/test_x.py::a{b}", "tests/e2e/../fast/test_x.py", "tests/rocm/test_.py",
]  # fmt: skip


@pytest.mark.parametrize("path", INJECTIONS)
def test_forty_injection_strings_in_a_path_are_refused(path: str) -> None:
    assert len(INJECTIONS) >= 40
    assert isinstance(one(f"/rerun-test {path}"), Problem)


def test_a_marker_survives_its_own_line_and_a_malformed_one_is_none() -> None:
    marker = Marker("rerun", "q" * 32, 7, 2, "running", "a" * 40)
    assert parse_marker(marker.line() + "\nbody") == marker
    assert parse_marker(Marker("rerun", req="a-->b").line()) == Marker("rerun", req="a-->b")
    assert "-->" not in Marker("x", req="-->").line()[:-4]
    for text in (
        None,
        "",
        "x\n" + marker.line(),
        "<!-- miles-ci {} -->",
        '<!-- miles-ci {"v":2,"kind":"x"} -->',
        '<!-- miles-ci {"v":1,"v":1,"kind":"x"} -->',
        '<!-- miles-ci {"v":1,"kind":"x","run":true} -->',
    ):
        assert parse_marker(text) is None


def test_a_marker_typed_by_a_person_is_ignored() -> None:
    line = Marker("rerun", req="q").line()
    comments = [
        {"id": 1, "body": line, "user": {"id": 99}},
        {"id": 2, "body": line, "user": None},
        {"id": 3, "body": line, "user": {"id": 5}},
    ]
    assert [comment["id"] for comment, _ in ours(comments, 5, "rerun", "q")] == [3]


def expected(resolve: str, legs: tuple[str, ...], observed: int) -> str:
    """The table of the specification, row by row."""
    words = (resolve, *legs)
    if any(word not in JOB_RESULTS for word in words):
        return "failed"
    if resolve == "cancelled":
        return "cancelled"
    if resolve != "success":
        return "failed"
    if all(leg == "skipped" for leg in legs):
        return "failed"
    if "failure" in legs or ("success" in legs and observed == 0):
        return "failed"
    if "cancelled" in legs:
        return "cancelled"
    return "passed" if set(legs) == {"success"} else "failed"


def test_the_outcome_table_is_total_over_all_words() -> None:
    words = (*JOB_RESULTS, "", "neutral")
    for resolve, count in itertools.product(words, range(3)):
        for legs in itertools.product(words, repeat=count):
            for observed in (0, 1):
                suites = [f"s{n}" for n in range(count)]
                got = verdict(
                    resolve,
                    dict.fromkeys(suites, 1),
                    dict(zip(suites, legs, strict=True)),
                    dict.fromkeys(suites, observed),
                )
                assert got.state == expected(resolve, legs, observed), (resolve, legs, observed)


def test_reasons_say_what_happened() -> None:
    assert verdict("failure", {}, {}, {}).reason == "never started"
    assert verdict("success", {}, {}, {}).reason == "nothing ran"
    assert verdict("success", {"a": 1}, {"b": "success"}, {}).reason == "inconsistent"
    assert verdict("success", {"a": 1, "b": 1}, {"a": "success"}, {"a": 1}).reason == "did not run: b"
