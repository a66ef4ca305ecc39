"""From plan and environment to the runner's job; a wrong plan is refused with exit code 5."""

from __future__ import annotations

import io
import json

import pytest

from miles_ci.errors import UsageError
from miles_ci.plan.model import Plan, Shard, Unit
from miles_ci.run.console import Console
from miles_ci.run.from_plan import default_branch, only_files, parse_shard, run_info

PATH = "tests/fast/test_x.py"


def unit(**changes) -> Unit:
    fields = {"id": PATH, "path": PATH, "suite": "s", "kind": "test", "ms": 1500, "est_source": "declared", "devices": 2,
              "timeout_s": 300}  # fmt: skip
    return Unit(**{**fields, **changes})


def test_a_faulty_declaration_is_the_reason_why_a_unit_starts_no_process():
    assert unit().declaration_error is None
    assert unit(kind="declaration-error", errors=("bad suite", "bad label")).declaration_error == "bad suite; bad label"
    assert unit(kind="declaration-error").declaration_error == "the declaration is faulty"


def test_files_are_narrowed_to_a_node_and_unknown_ones_refused():
    units = [unit()]
    assert only_files(units, [PATH, f"./{PATH}"], "s") == tuple(units)
    (one,) = only_files(units, [f"{PATH}::test_a[1]"], "s")
    assert one.nodes == one.only == (f"{PATH}::test_a[1]",)
    assert units[0].only == ()
    with pytest.raises(UsageError, match="tests/fast is a folder"):
        only_files(units, ["tests/fast::test_a"], "s")
    with pytest.raises(UsageError, match="not planned in suite 's'"):
        only_files(units, ["tests/fast/test_y.py"], "s")


def test_several_nodes_of_a_file_are_one_unit_and_the_whole_file_holds_them():
    units = [unit()]
    nodes = [f"{PATH}::test_a", f"{PATH}::test_b", f"{PATH}::test_a"]
    (both,) = only_files(units, nodes, "s")
    assert both.only == (f"{PATH}::test_a", f"{PATH}::test_b")
    assert only_files(units, [*nodes, PATH], "s") == only_files(units, [PATH, *nodes], "s") == tuple(units)


@pytest.mark.parametrize("text", ["1", "0/2", "3/2", "a/b", "1/2/3", "-1/2", "1/"])
def test_malformed_shard_is_refused(text):
    with pytest.raises(UsageError, match="write i/n"):
        parse_shard(text)


def test_shard_counts_from_one():
    assert parse_shard("2/3") == (2, 3)
    assert parse_shard(None) is None


def test_facts_of_a_run_come_from_github_or_local_stand_ins():
    shard = Shard("s", 1, 2, "cpu", "cpu", None, ("x",), 2, 1, 600, ())
    plan = Plan("nightly", (), False, True, None, None, (), (shard,), (), ())
    github = {"GITHUB_RUN_ID": "7", "GITHUB_RUN_ATTEMPT": "2", "GITHUB_EVENT_NAME": "schedule", "GITHUB_SHA": "abc",
              "GITHUB_REF": "refs/heads/main", "RUNNER_NAME": "box"}  # fmt: skip
    info = run_info(plan, shard, environ=github)
    assert (info.run_id, info.run_attempt, info.event, info.commit, info.runner) == ("7", 2, "schedule", "abc", "box")
    assert (info.shard, info.cadence, info.plan_digest) == ("1/2", "nightly", plan.digest)
    local = run_info(plan, shard, environ={})
    assert local.run_id.startswith("local-")
    assert local.event == ""


def test_default_branch_is_that_of_the_event(tmp_path):
    (tmp_path / "event.json").write_text(json.dumps({"repository": {"default_branch": "trunk"}}))
    assert default_branch({"GITHUB_EVENT_PATH": str(tmp_path / "event.json")}) == "trunk"
    assert default_branch({}) == "main"
    assert default_branch({"GITHUB_EVENT_PATH": str(tmp_path / "absent")}) == "main"


def test_output_of_a_test_cannot_give_the_runner_commands(tmp_path):
    log = tmp_path / "log"
    log.write_text("::error::fake\n::endgroup::\n")
    stream = io.StringIO()
    Console(stream, actions=True).log_of("title", log, failed=False)
    lines = stream.getvalue().split("\n")
    token = lines[1].removeprefix("::stop-commands::")
    assert lines[0] == "::group::title"
    assert len(token) >= 32
    assert lines.index("::error::fake") < lines.index(f"::{token}::")
    assert lines[-2] == "::endgroup::"


def test_outside_actions_groups_are_plain_and_quiet_shows_failures_only(tmp_path):
    (tmp_path / "log").write_text("text\n")
    stream = io.StringIO()
    console = Console(stream, quiet=True)
    console.log_of("good", tmp_path / "log", failed=False)
    console.log_of("bad", tmp_path / "log", failed=True)
    assert stream.getvalue() == "===== bad\ntext\n"


def test_growing_log_is_followed_to_its_end(tmp_path):
    stream = io.StringIO()
    follower = Console(stream).follow("title", tmp_path / "log")
    follower.tick()
    with open(tmp_path / "log", "w") as log:
        log.write("one\n")
        log.flush()
        follower.tick()
        log.write("two\n")
        log.flush()
    follower.close()
    assert stream.getvalue() == "===== title\none\ntwo\n"


@pytest.mark.parametrize("actions", [False, True])
def test_what_follows_a_log_that_ends_within_a_line_begins_a_new_one(tmp_path, actions):
    (tmp_path / "log").write_bytes(b"half a li")
    stream = io.StringIO()
    console = Console(stream, actions=actions)
    console.log_of("title", tmp_path / "log", failed=False)
    console.follow("title", tmp_path / "log").close()
    console.line("FAILED")
    lines = stream.getvalue().split("\n")
    assert lines.count("half a li") == 2
    assert "" not in lines[:-1]
    assert lines[-2:] == ["FAILED", ""]


def test_shard_that_is_left_without_a_test_says_so_and_the_others_keep_their_numbers(repository):
    from miles_ci.cli import main

    repository.gpu_file("test_gpu.py", "def test_a(): assert True\n")
    empty = repository.run("--suite", "stage-a-cpu", "--shard", "2/2", "--root", str(repository.root))
    assert (empty.code, "no test is registered" in empty.output) == (4, True)
    repository.file("test_a.py", "def test_a(): assert True\n")
    saved = repository.root / "plan.json"
    words = ["plan", "--root", str(repository.root), "--suite", "stage-a-cpu", "--all-labels", "--shards", "2"]
    assert main([*words, "--out", str(saved)]) == 0
    for number, plan in enumerate(([], ["--plan", str(saved)])):
        last = repository.run("--suite", "stage-a-cpu", "--shard", "2/2", *plan)
        assert last.code == 0
        assert "shard 2/2: no test is left for it: the suite's 1 test file(s) are in the first 1 of 2" in last.output
        assert len(list(last.folder.glob("*"))) == number
        first = repository.run("--suite", "stage-a-cpu", "--shard", "1/2", *plan)
        assert (first.code, first.results()["run"]["shard"]) == (0, "1/2")
        assert [path.name for path in first.folder.glob("*")] == ["stage-a-cpu-1-of-2"]
    assert main(["results", "merge", "--plan", str(saved), str(repository.root / "out")]) == 0
    assert repository.run("--suite", "stage-a-cpu", "--shard", "1/3", "--plan", str(saved)).code == 5


def test_shard_refuses_another_plan(repository):
    repository.file("test_a.py", "def test_a(): assert True\n")
    from miles_ci.cli import main

    saved = repository.root / "plan.json"
    assert main(["plan", "--root", str(repository.root), "--suite", "stage-a-cpu", "--out", str(saved)]) == 0
    words = ("--suite", "stage-a-cpu", "--plan", str(saved))
    wrong = repository.run(*words, MILES_CI_PLAN_DIGEST="0" * 64)
    assert wrong.code == 5
    assert "this shard must run plan 0000000000000000" in wrong.output
    other_count = repository.run(*words, "--shard", "1/2")
    assert other_count.code == 5
    assert "into 1 shard(s)" in other_count.output
    selecting = repository.run(*words, "--cadence", "nightly")
    assert selecting.code == 2
    assert "leave out the selection options" in selecting.output
    good = repository.run(*words, "--shard", "1/1", MILES_CI_PLAN_DIGEST=Plan.load(saved).digest)
    assert (good.code, good.outcomes()) == (0, {"test_a.py": "passed"})
