"""The commands as a user types them: output, JSON, exit codes, start-up cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from miles_ci import cli
from miles_ci.commands.output import plain_table, seconds
from miles_ci.environment import VARIABLES, read, refuse_unknown
from miles_ci.errors import ExitCode, UsageError, combine_exit_codes, edit_distance, nearest, suggestion
from miles_ci.plan.model import Plan
from tests.fast.ci.helpers.trees import REPOSITORY

TABLES = ["list", "plan", "explain", "simulate", "tune", "doctor", "lint"]


def test_list_shows_every_suite_and_the_faulty_files(run) -> None:
    code, out, _ = run("list")
    assert code == 0
    assert "stage-c-4-gpu-mi300x" in out
    assert "declaration errors (see `miles-ci lint`): tests/e2e/test_bad.py" in out
    code, out, _ = run("list", "--suite", "stage-c-4-gpu-h200", "--format", "json")
    assert [(test["path"], test["gpus"], test["switch"]) for test in json.loads(out)["tests"]] == [
        ("tests/e2e/test_gpu.py", 4, "unstable")
    ]
    assert run("list", "--suite", "stage-c-4-gpu-h20")[0] == 2


def test_plan_prints_shards_writes_a_verified_file_and_the_outputs_of_the_job(run, tree: Path) -> None:
    code, out, _ = run("plan", "--suite", "stage-a-cpu")
    assert code == 0
    assert "declaration::tests/e2e/test_bad.py" in out
    assert "tests/fast/test_a.py  5.0 s (default)" in out
    outputs = tree / "outputs"
    code, out, _ = run(
        "plan",
        "--labels",
        "run-ci-megatron",
        "--out",
        str(tree / "plan.json"),
        "--github-output",
        str(outputs),
        "--format",
        "json",
    )
    plan = Plan.load(tree / "plan.json")
    assert json.loads(out)["digest"] == plan.digest
    assert plan.suite("stage-c-4-gpu-h200").selected == 1
    lines = outputs.read_text().splitlines()
    assert f"digest={plan.digest}" in lines
    assert "stage-c-4-gpu-h200-shards=[1]" in lines
    assert "stage-c-4-gpu-mi300x-count=0" in lines


def test_a_forced_number_of_shards_is_kept(run) -> None:
    _, out, _ = run("plan", "--suite", "stage-a-cpu", "--shards", "1", "--format", "json")
    assert [shard["count"] for shard in json.loads(out)["shards"]] == [1]
    assert run("plan", "--shards", "0")[0] == 2


def test_explain_tells_reason_and_line_of_one_test_and_counts_of_all(run, tree: Path) -> None:
    code, out, _ = run("explain", "tests/e2e/test_gpu.py")
    assert code == 0
    assert "tests/e2e/test_gpu.py in stage-c-4-gpu-h200: excluded" in out
    line = next(
        n for n, text in enumerate((tree / "registry.yaml").read_text().splitlines(), 1) if "include: requested" in text
    )
    assert (
        f"label: none of its labels is included by cadence regular; asked for by run-ci-megatron  [registry.yaml:{line}]"
        in out
    )
    _, out, _ = run("explain", "tests/e2e/test_gpu.py", "--label", "run-ci-megatron")
    assert "unstable, its failure does not block: diverges now and then" in out
    _, out, _ = run("explain")
    assert "4 registration(s): 1 declaration-error, 2 included, 1 label" in out
    code, _, err = run("explain", "tests/e2e/test_gpv.py")
    assert code == 2
    assert "did you mean 'tests/e2e/test_gpu.py'?" in err


def test_explain_follows_the_pool_switch_to_its_line(run, tree: Path) -> None:
    registry = tree / "registry.yaml"
    off = '  h200-4gpu:\n    disabled: {reason: "node is being re-imaged", issue: "#1", until: 2026-12-24}\n'
    registry.write_text(registry.read_text().replace("  h200-4gpu:\n", off, 1))
    line = registry.read_text()[: registry.read_text().index('    disabled: {reason: "node')].count("\n") + 1
    _, out, _ = run("explain", "tests/e2e/test_gpu.py", "--label", "run-ci-megatron")
    assert f"disabled-pool: pool h200-4gpu is disabled: node is being re-imaged  [registry.yaml:{line}]" in out


@pytest.mark.parametrize("command", TABLES)
def test_every_command_that_prints_a_table_prints_json_too(run, command: str) -> None:
    extra = {"tune": ["--report"], "simulate": ["--hours", "2", "--seeds", "1"], "doctor": ["--no-health"]}.get(
        command, []
    )
    code, out, _ = run(command, *extra, "--format", "json")
    assert code == (2 if command == "lint" else 0)
    assert isinstance(json.loads(out), dict)
    assert run(command, *extra)[1].strip()


def test_a_cron_decides_the_cadence_and_must_not_contradict_it(run) -> None:
    _, out, _ = run("plan", "--cron", "0 15 * * 6", "--format", "json")
    assert json.loads(out)["cadence"] == "weekly"
    code, _, err = run("plan", "--cron", "0 15 * * 6", "--cadence", "nightly")
    assert (code, "contradicts" in err) == (2, True)
    assert run("plan", "--cron", "0 3 * * *")[0] == 2


def test_a_diff_narrows_the_selection_and_an_unreadable_one_does_not(run, tree: Path) -> None:
    (tree / "diff").write_bytes(b"M\0tests/fast/test_a.py\0")
    _, out, _ = run("explain", "--diff", str(tree / "diff"), "--format", "json")
    codes = {record["path"]: record["codes"] for record in json.loads(out)["tests"]}
    assert codes["tests/fast/test_a.py"] == []
    assert codes["tests/e2e/test_cpu.py"] == ["unaffected"]
    (tree / "diff").write_bytes(b"nonsense")
    _, out, _ = run("plan", "--diff", str(tree / "diff"))
    assert "affected: the diff cannot be read" in out
    assert run("plan", "--diff", str(tree / "diff"), "--base", "main")[0] == 2


def test_tune_learns_from_results_and_rewrites_sources(run, tree: Path) -> None:
    now = time.time()
    for index in range(3):
        test = {
            "unit": "tests/e2e/test_cpu.py",
            "path": "tests/e2e/test_cpu.py",
            "outcome": "passed",
            "attempts": [{"wall_s": 100 + index}],
        }
        info = {"suite": "stage-b-cpu", "hardware": "cpu", "started_at": now - index}
        (tree / f"results-{index}.json").write_text(json.dumps({"schema": 2, "run": info, "tests": [test]}))
    code, out, _ = run("tune", "--results", *(str(tree / f"results-{index}.json") for index in range(3)))
    assert code == 0
    assert "tests/durations.json: 1 entries" in out
    # Folders do as well; with --format json stdout is one document, also beside a report.
    (tree / "artifact").mkdir()
    (tree / "results-0.json").rename(tree / "artifact/results.json")
    _, out, _ = run("tune", "--results", str(tree / "artifact"), "--format", "json")
    assert json.loads(out) == {"table": "tests/durations.json", "entries": 1, "observed": 1}
    _, out, err = run("tune", "--results", str(tree / "artifact"), "--report", "--format", "json")
    assert json.loads(out)["observed"] == 1
    assert "1 entries" in err
    code, _, err = run("tune", "--results", str(tree / "tests"))
    assert (code, "no results.json there" in err) == (2, True)
    _, out, _ = run("tune", "--report")
    assert "tests/e2e/test_cpu.py  stage-b-cpu      30 s     101 s   3.37     3" in out
    assert "1 estimate(s) rewritten in 1 file(s)" in run("tune", "--source")[1]
    assert "est_time=101" in (tree / "tests/e2e/test_cpu.py").read_text()
    assert run("tune")[0] == 2


def test_doctor_compares_the_registry_with_githubs_runners(run, tree: Path) -> None:
    labels = ["self-hosted", "nvidia", "h200", "1gpu", "2gpu", "4gpu", "8gpu", "h100", "b200", "amd", "MI300X", "mi355"]
    runners = [{"name": f"r{i}", "status": "online", "labels": [{"name": name} for name in labels]} for i in range(2)]
    pages = (
        json.dumps({"total_count": 2, "runners": runners[:1]})
        + "\n"
        + json.dumps({"total_count": 2, "runners": runners[1:]})
    )
    (tree / "runners.json").write_text(pages)
    code, out, _ = run("doctor", "--fleet", str(tree / "runners.json"))
    assert code == 2
    assert (
        "error[label-without-runner] pools.mi355x-4gpu.labels: no runner carries 'mi355x'; did you mean 'mi355'?" in out
    )
    assert "warning[runner-count] pools.h200-1gpu.count: 8 in the registry, 2 registered on GitHub" in out
    assert "mi300x-4gpu" not in out
    (tree / "runners.json").write_text("{}")
    assert run("doctor", "--fleet", str(tree / "runners.json"))[0] == 2


def test_doctor_asks_github_for_its_runners(run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = json.dumps({"total_count": 0, "runners": []}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("GITHUB_API_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    monkeypatch.setenv("GITHUB_TOKEN", "t")
    code, out, _ = run("doctor", "--fleet")
    server.shutdown()
    thread.join()
    server.server_close()
    assert asked[0].startswith("/repos/owner/name/actions/runners")
    assert code == 2
    assert "no runner carries 'h200'" in out
    monkeypatch.delenv("GITHUB_TOKEN")
    assert run("doctor", "--fleet")[0] == 2


def test_doctor_says_what_is_missing_for_each_suite(run) -> None:
    _, out, _ = run("doctor", "--no-health", "--format", "json")
    verdicts = {item["suite"]: item for item in json.loads(out)["suites"]}
    assert verdicts["stage-a-cpu"]["runs"]
    assert (
        verdicts["stage-c-4-gpu-mi300x"]["runs"]
        or "needs 4 x mi300x, found" in verdicts["stage-c-4-gpu-mi300x"]["reason"]
    )


def test_a_missing_or_broken_registry_is_told_without_a_traceback(
    run, tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tree / "registry.yaml").write_text("version: 1\nsuites: 3\n")
    code, _, err = run("plan")
    assert code == 2
    assert "registry.yaml:2:9: error[wrong-type]" in err
    (tree / "registry.yaml").unlink()
    code, _, err = run("plan")
    assert code == 2
    assert "the registry cannot be read" in err
    assert cli.main(["list", "--root", str(tree / "nowhere")]) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "usage: miles-ci COMMAND"),
        (["--help"], 0, "usage: miles-ci COMMAND"),
        (["--version"], 0, "miles-ci "),
        (["plam"], 2, "did you mean 'plan'?"),
        (["plan", "--cadense", "weekly"], 2, "unrecognized arguments"),
        (["plan", "--help"], 0, "--cadence"),
    ],
)
def test_usage_errors_end_with_2(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == code
    captured = capsys.readouterr()
    assert words in captured.out + captured.err


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", interrupt)
    assert cli.main(["plan"]) == 130


def test_every_command_of_the_table_has_a_module_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.COMMANDS:
        assert cli.main([name, "--help"]) == 0, name
        assert capsys.readouterr().out.startswith(f"usage: miles-ci {name}")


def test_help_imports_neither_pydantic_nor_yaml_and_answers_at_once() -> None:
    code = "import sys, miles_ci.cli; miles_ci.cli.main(['--help']); print(sorted({'pydantic', 'yaml', 'rich', 'argparse'} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "['argparse']"


def test_an_unknown_variable_of_ours_is_refused_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MILES_CI_LOK_DIR", "/x")
    assert cli.main(["list"]) == 2
    assert "MILES_CI_LOK_DIR is not known; did you mean 'MILES_CI_LOCK_DIR'?" in capsys.readouterr().err
    with pytest.raises(UsageError):
        refuse_unknown({"MILES_CI_X": "1", "OTHER": "2"})
    refuse_unknown(dict.fromkeys(VARIABLES, "1"))


def test_only_declared_variables_can_be_read_and_empty_means_unset() -> None:
    assert read("MILES_CI_LOCK_DIR", {"MILES_CI_LOCK_DIR": ""}) is None
    assert read("MILES_CI_LOCK_DIR", {"MILES_CI_LOCK_DIR": "/x"}) == "/x"
    with pytest.raises(KeyError):
        read("MILES_CI_OTHER", {})


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], 0),
        ([0, 0], 0),
        ([0, 1], 1),
        ([1, 2], 2),
        ([1, 5], 5),
        ([2, 130, 5], 130),
        ([6, 4, 3], 4),
        ([6, 3], 6),
        ([3], 3),
        ([1, 4], 1),
    ],
)
def test_several_exit_codes_become_the_strongest(codes: list[int], expected: int) -> None:
    assert combine_exit_codes(codes) == expected


def test_the_exit_codes_are_those_of_the_documentation() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "TEST_FAILURE": 1,
        "CONFIG": 2,
        "INFRA": 3,
        "ZERO_TESTS": 4,
        "NEVER_EXECUTED": 5,
        "METRIC_BOUND": 6,
        "DRIFT": 7,
        "INTERRUPTED": 130,
    }


def test_near_names_are_found_up_to_distance_three() -> None:
    assert edit_distance("kitten", "sitting", 3) == 3
    assert edit_distance("abcdef", "uvwxyz", 3) == 4
    assert edit_distance("lsit", "list", 3) == 1
    assert nearest("h20", ["h200", "h100", "b200"]) == "h200"
    assert nearest("zzz", ["abc"]) is None
    assert suggestion("zzzzzzz", ["b", "a"]) == "; valid: a, b"
    assert suggestion("zzzzzzz", [f"name-{index}" for index in range(13)]) == ""


def test_tables_and_durations_read_well() -> None:
    assert plain_table(("a", "n"), [("x", 1), ("yy", 22)], right=(1,)) == "a    n\nx    1\nyy  22"
    assert [seconds(ms) for ms in (400, 12_000, 200_000, 7_500_000)] == ["0.4 s", "12 s", "3 min 20 s", "2 h 05 min"]


def test_every_variable_and_every_reason_code_is_documented() -> None:
    from miles_ci.select.selection import REASONS

    page = (REPOSITORY / "docs/ci/registry.md").read_text(encoding="utf-8")
    for name, meaning in VARIABLES.items():
        assert f"| `{name}` | {meaning} |" in page
    for code in REASONS:
        assert f"`{code}`" in page


def test_the_plan_of_a_tree_has_the_same_digest_under_every_hash_seed(tree: Path, cache: Path) -> None:
    digests = set()
    for seed in ("0", "1", "2", "3", "random"):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "MILES_CI_CACHE_DIR": str(cache / seed)}
        command = [
            sys.executable,
            "-m",
            "miles_ci",
            "plan",
            "--cadence",
            "weekly",
            "--root",
            str(tree),
            "--format",
            "json",
        ]
        done = subprocess.run(command, cwd=REPOSITORY, env=environ, capture_output=True, check=True)
        digests.add(json.loads(done.stdout)["digest"])
    assert len(digests) == 1
