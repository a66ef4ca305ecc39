"""`miles-ci run` on a CPU suite, as a user types it: real processes, time limits, daemons, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest

from miles_ci.run.process import process_tree
from tests.fast.ci.helpers.lean import EVERY_PLUGIN


def test_passing_at_the_second_time_is_flaky_visible_and_exit_code_0(repository):
    repository.file("test_flaky.py", """
        import pathlib
        def test_connects_at_the_second_time():
            mark = pathlib.Path(__file__).with_suffix(".tried")
            if not mark.exists():
                mark.write_text("")
                raise ConnectionResetError("Connection reset by peer")
        def test_b(): assert True
    """)  # fmt: skip
    outcome = repository.run("--suite", "stage-a-cpu", **EVERY_PLUGIN)
    assert outcome.code == 0
    test = outcome.tests()["test_flaky.py"]
    assert test["outcome"] == "flaky"
    assert [attempt["outcome"] for attempt in test["attempts"]] == ["infra", "passed"]
    assert test["attempts"][0]["cause"] == "connection-reset"
    assert "FLAKY" in outcome.output


def test_file_option_runs_that_file_or_node_only(repository):
    path = repository.file("test_two.py", "def test_good(): assert True\ndef test_bad(): assert False\n")
    repository.file("test_other.py", "def test_a(): assert False\n")
    outcome = repository.run("--suite", "stage-a-cpu", "--file", f"{path}::test_good")
    assert (outcome.code, outcome.outcomes()) == (0, {"test_two.py": "passed"})
    assert "===== " in outcome.output
    assert outcome.tests()["test_two.py"]["only"] == [f"{path}::test_good"]
    both = repository.run("--suite", "stage-a-cpu", "--file", f"{path}::test_good", "--file", f"{path}::test_bad")
    (test,) = both.results()["tests"]
    assert (both.code, len(test["nodes"]), len(test["only"])) == (1, 2, 2)
    repository.file("test_deep.py", "def test_a(): assert True\n", "tests/fast/deep")
    folder = repository.run("--suite", "stage-a-cpu", "--file", "tests/fast/deep/")
    assert (folder.code, folder.outcomes()) == (0, {"test_deep.py": "passed"})
    unknown = repository.run("--suite", "stage-a-cpu", "--file", "tests/fast/test_nowhere.py")
    assert unknown.code == 2
    assert "not planned in suite 'stage-a-cpu'" in unknown.output


def test_bound_judges_this_run_and_not_what_the_one_before_left_in_the_folder(repository):
    source = """
        import json, os, pathlib
        from miles_ci.declare import register_metric_bound, register_cpu_ci
        register_cpu_ci(est_time=1, suite="stage-a-cpu")
        register_metric_bound("loss", abs_up=0.1, abs_down=0.1)
        def test_a():
            record = {"schema": 1, "metric": "loss", "series": [[1, 1.0]]}
            with open(pathlib.Path(os.environ["MILES_CI_METRICS_DIR"]) / "m.jsonl", "a") as file:
                file.write(json.dumps(record) + "\\n")
            assert True
    """
    history = {"MILES_CI_HISTORY_URL": f"sqlite:{repository.root}/history.db"}
    silent = source.replace('file.write(json.dumps(record) + "\\n")', "pass")
    for text, code, verdict in ((source, 0, "inactive"), (source, 0, "inactive"), (silent, 6, "error")):
        repository.file("test_bounded.py", text)
        outcome = repository.run("--suite", "stage-a-cpu", **history)
        (metric,) = outcome.tests()["test_bounded.py"]["metrics"]
        assert (outcome.code, metric["verdict"]) == (code, verdict), metric["message"]
    assert metric["message"] == "loss: the test recorded no such metric"


def test_reader_that_goes_away_changes_nothing_about_the_result(repository):
    """`miles-ci run --suite stage-a-cpu | head -1`"""
    repository.file("test_a.py", "def test_a(): assert True\n")
    read, write = os.pipe()
    os.close(read)
    words = repository.command("run", "--suite", "stage-a-cpu")
    done = subprocess.run(
        words, cwd=repository.root, env=repository.environment(), stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
    (path,) = (repository.root / "out").glob("*/results.json")
    assert json.loads(path.read_text())["status"] == "complete"


def test_json_format_leaves_stdout_to_the_results(repository):
    repository.file("test_a.py", "def test_a(): assert True\n")
    words = repository.command("run", "--suite", "stage-a-cpu", "--format", "json", "--workers", "1")
    done = subprocess.run(words, cwd=repository.root, env=repository.environment(), capture_output=True, check=True)
    assert json.loads(done.stdout)["counts"]["passed"] == 1


def test_no_test_to_run_is_exit_code_4_unless_allowed(repository):
    repository.gpu_file("test_gpu.py", "def test_a(): assert True\n")
    outcome = repository.run("--suite", "stage-a-cpu")
    assert outcome.code == 4
    assert "no test is registered in this suite" in outcome.output
    assert repository.run("--suite", "stage-a-cpu", "--allow-empty").code == 0


def test_a_tree_without_any_test_is_exit_code_2_whatever_is_allowed(repository):
    (repository.root / "tests" / "fast").mkdir(parents=True)
    outcome = repository.run("--suite", "stage-a-cpu", "--allow-empty")
    assert outcome.code == 2
    assert "no-test-files" in outcome.output


def test_unknown_suite_is_exit_code_2_with_the_nearest_name(repository):
    outcome = repository.run("--suite", "stage-a-cpus")
    assert outcome.code == 2
    assert "did you mean 'stage-a-cpu'?" in outcome.output


@pytest.mark.parametrize(("option", "value"), [
    ("--workers", "0"), ("--rerun-failed", "-3"), ("--wait-memory", "-1"), ("--wait-memory", "nan"),
    ("--wait-memory", "inf"),
])  # fmt: skip
def test_numbers_that_mean_nothing_are_refused(repository, capsys, option, value):
    from miles_ci.cli import main

    words = ["run", "--root", str(repository.root), "--suite", "stage-a-cpu", option, value]
    assert main(words) == 2
    assert f"{option} {value}: must be between" in capsys.readouterr().err


def test_names_in_any_script_and_with_blanks_are_run(repository):
    repository.file("test_spaß 'q'.py", "def test_a(): assert True\n", "tests/fast/ünï cödé, 漢字")
    outcome = repository.run("--suite", "stage-a-cpu")
    assert (outcome.code, outcome.outcomes()) == (0, {"test_spaß 'q'.py": "passed"})


def test_planned_file_that_is_not_in_the_checkout_fails_alone(repository):
    from miles_ci.cli import main

    repository.file("test_here.py", "def test_a(): assert True\n")
    gone = repository.root / repository.file("test_gone.py", "def test_a(): assert True\n")
    saved = repository.root / "plan.json"
    assert main(["plan", "--root", str(repository.root), "--suite", "stage-a-cpu", "--out", str(saved)]) == 0
    gone.unlink()
    outcome = repository.run("--suite", "stage-a-cpu", "--plan", str(saved))
    assert outcome.code == 1
    assert outcome.outcomes() == {"test_gone.py": "error", "test_here.py": "passed"}
    assert "does not exist in this checkout" in outcome.tests()["test_gone.py"]["message"]


def test_file_that_kills_the_shared_process_does_not_take_the_others_with_it(repository):
    repository.file("test_kills.py", """
        import os, signal, time
        def test_a():
            time.sleep(1)  # what has started is known by then
            if "PYTEST_XDIST_WORKER" in os.environ:
                os.kill(os.getppid(), signal.SIGSEGV)
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(60)
            assert True
    """)  # fmt: skip
    for number in range(12):
        repository.file(f"test_n{number}.py", "import time\ndef test_a():\n    time.sleep(0.4)\n    assert True\n")
    outcome = repository.run("--suite", "stage-a-cpu")
    assert outcome.code == 1
    outcomes = outcome.outcomes()
    assert outcomes.pop("test_kills.py") == "error"
    assert set(outcomes.values()) == {"passed"}
    assert any("process died; 13 file(s) ran again" in note for note in outcome.results()["notes"])


def test_failure_in_a_process_that_another_file_kills_stands_and_the_rest_of_its_file_runs(repository):
    repository.file("test_a_fails_once.py", """
        import pathlib, pytest, time
        def test_once():
            mark = pathlib.Path(__file__).with_suffix(".tried")
            tried, _ = mark.exists(), mark.write_text("")
            assert tried
        @pytest.mark.parametrize("number", range(20))
        def test_slow(number):
            time.sleep(0.3)
            assert True
    """)  # fmt: skip
    repository.file("test_b_kills.py", """
        import os, pathlib, signal, time
        def test_a():
            while not pathlib.Path(__file__).with_name("test_a_fails_once.tried").exists():
                time.sleep(0.1)
            time.sleep(1)
            if "PYTEST_XDIST_WORKER" in os.environ:
                os.kill(os.getppid(), signal.SIGSEGV)
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(60)
            assert True
    """)  # fmt: skip
    outcome = repository.run("--suite", "stage-a-cpu")
    tests = outcome.tests()
    assert outcome.outcomes() == {"test_a_fails_once.py": "failed", "test_b_kills.py": "error"}
    assert "::test_once: AssertionError" in tests["test_a_fails_once.py"]["message"]
    assert sorted(tests["test_a_fails_once.py"]["nodes"].values()) == ["failed", *["passed"] * 20]


def test_kill_of_a_serial_file_is_named_beside_what_had_failed_before(repository):
    repository.file("test_serial.py", """
        import os
        from miles_ci.declare import register_cpu_ci
        register_cpu_ci(est_time=1, suite="stage-a-cpu", serial=True)
        def test_ok(): assert True
        def test_wrong(): assert 1 == 2
        def test_killed():
            os.kill(os.getpid(), 9)
            assert True
    """)  # fmt: skip
    outcome = repository.run("--suite", "stage-a-cpu")
    assert (outcome.code, outcome.outcomes()) == (1, {"test_serial.py": "error"})
    assert (
        "\nERROR        tests/fast/test_serial.py: crashed: pytest was killed by signal 9 while running "
        "tests/fast/test_serial.py::test_killed; before that tests/fast/test_serial.py::test_wrong: AssertionError: "
    ) in outcome.output


CRASHES = {
    "leaves": "import os\ndef test_m():\n    os._exit(1)\n    assert 1\n",
    "segmentation-fault": "import ctypes\ndef test_m():\n    ctypes.string_at(0)\n    assert 1\n",
    "leaves-at-import": "import os\nos._exit(0)\ndef test_m(): assert 1\n",
    "sys-exit-0-at-import": "import sys\nsys.exit(0)\ndef test_m(): assert 1\n",
    "sys-exit-3-at-import": "import sys\nsys.exit(3)\ndef test_m(): assert 1\n",
    "interrupt-at-import": "raise KeyboardInterrupt\ndef test_m(): assert 1\n",
    "pytest-exit-at-import": "import pytest\npytest.exit('enough')\ndef test_m(): assert 1\n",
    "pytest-exit": "import pytest\ndef test_m():\n    pytest.exit('enough')\n    assert 1\n",
}
REASONS = {
    "leaves": "crashed: ",
    "segmentation-fault": "crashed: ",
    "leaves-at-import": "crashed: the process ended with exit code 0 while importing",
    "sys-exit-0-at-import": "SystemExit: 0",
    "sys-exit-3-at-import": "SystemExit: 3",
    "interrupt-at-import": "KeyboardInterrupt",
    "pytest-exit-at-import": "Exit: enough",
    "pytest-exit": "crashed: ",
}


@pytest.mark.parametrize("kind", CRASHES)
def test_only_the_file_that_ends_its_process_fails_and_soon(repository, kind):
    """With a replaced xdist worker this hung up to the shard's limit, and could blame another file."""
    for number in range(10):
        repository.file(f"test_g{number}.py", "def test_x(): assert 1\n")
    repository.file("test_m_bad.py", CRASHES[kind])
    started = time.monotonic()
    outcome = repository.run("--suite", "stage-a-cpu")
    assert time.monotonic() - started < 40  # seconds on a busy machine; the limit is 300
    assert outcome.code == 1
    outcomes = outcome.outcomes()
    assert outcomes.pop("test_m_bad.py") == "error"
    assert set(outcomes.values()) == {"passed"}
    assert REASONS[kind] in outcome.tests()["test_m_bad.py"]["message"]


def test_pytest_that_stops_at_the_first_failure_is_not_called_dead(repository):
    repository.file("test_a_bad.py", "def test_a(): assert 1 == 2\n")
    for number in range(8):
        repository.file(f"test_n{number}.py", "import time\ndef test_a():\n    time.sleep(0.3)\n    assert True\n")
    outcome = repository.run("--suite", "stage-a-cpu", PYTEST_ADDOPTS="-x")
    outcomes = outcome.outcomes()
    assert outcomes.pop("test_a_bad.py") == "failed"
    assert set(outcomes.values()) == {"passed"}
    (note,) = outcome.results()["notes"]
    assert "was stopped from inside (-x, --maxfail or pytest.exit)" in note


def test_timeout_in_one_file_leaves_the_results_of_the_others(repository):
    source = """
        import time
        from miles_ci.declare import register_cpu_ci
        register_cpu_ci(est_time=1, suite="stage-a-cpu", serial=True, timeout=2)
        def test_first(): assert True
        def test_hangs_here():
            time.sleep(60)
            assert True
    """
    repository.file("test_hangs.py", source)
    repository.file("test_ok.py", "def test_a(): assert True\n")
    outcome = repository.run("--suite", "stage-a-cpu")
    assert outcome.code == 1
    assert outcome.outcomes() == {"test_hangs.py": "timeout", "test_ok.py": "passed"}
    test = outcome.tests()["test_hangs.py"]
    assert "test_hangs_here" in test["message"]
    # The stacks of the hanging test are in its log.
    (log,) = outcome.folder.glob(f"*/logs/{test['attempts'][0]['log']}")
    assert "in test_hangs_here" in log.read_text()


def test_daemon_left_by_a_serial_file_is_killed_and_listed(repository):
    source = """
        import os, pathlib, time
        from miles_ci.declare import register_cpu_ci
        register_cpu_ci(est_time=1, suite="stage-a-cpu", serial=True)
        def test_starts_a_daemon():
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    pathlib.Path(__file__).with_suffix(".pid").write_text(str(os.getpid()))
                    time.sleep(60)
                os._exit(0)
            os.wait()
            while not pathlib.Path(__file__).with_suffix(".pid").exists():
                time.sleep(0.01)
            assert True
    """
    path = repository.file("test_daemon.py", source)
    outcome = repository.run("--suite", "stage-a-cpu")
    (leak,) = outcome.tests()["test_daemon.py"]["attempts"][0]["leaked"]
    pid = int((repository.root / path).with_suffix(".pid").read_text())
    assert str(pid) in leak
    assert process_tree.read_process(pid) is None


def test_failed_files_are_repeated_to_tell_flaky_from_broken(repository):
    repository.file("test_sometimes.py", """
        import pathlib
        def test_a():
            mark = pathlib.Path(__file__).with_suffix(".tried")
            tried, _ = mark.exists(), mark.write_text("")
            assert tried
    """)  # fmt: skip
    outcome = repository.run("--suite", "stage-a-cpu", "--rerun-failed", "3")
    assert outcome.code == 1
    test = outcome.tests()["test_sometimes.py"]
    assert (test["outcome"], test["reruns"]) == ("failed", ["passed"])
    assert "failed, then passed (flaky)" in outcome.output
    done = subprocess.run(
        repository.command("results", "flaky", str(outcome.folder)),
        cwd=repository.root, env=repository.environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "passed 1 of 1 repetitions on the same commit" in done.stdout
