"""A CPU run that is cancelled, loses its terminal or is killed: what is finished is kept, and never taken for green."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from miles_ci.run import runner
from miles_ci.run.process import process_tree


def test_cancel_writes_partial_results_within_five_seconds(repository):
    done = repository.file("test_a_done.py", """
        from miles_ci.declare import register_cpu_ci
        register_cpu_ci(est_time=9, suite="stage-a-cpu", serial=True)
        def test_a(): assert True
    """)  # fmt: skip
    repository.file("test_b_stubborn.py", """
        import os, pathlib, signal, time
        from miles_ci.declare import register_cpu_ci
        register_cpu_ci(est_time=5, suite="stage-a-cpu", serial=True)
        def test_a():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if os.fork() == 0:
                os.setsid()
                pathlib.Path(__file__).with_suffix(".pid").write_text(str(os.getpid()))
                time.sleep(60)
            time.sleep(60)
            assert True
    """)  # fmt: skip
    repository.file("test_c_never.py", """
        from miles_ci.declare import register_cpu_ci
        register_cpu_ci(est_time=1, suite="stage-a-cpu", serial=True)
        def test_a(): assert True
    """)  # fmt: skip
    process = repository.start("--suite", "stage-a-cpu")
    pidfile = repository.root / "tests" / "fast" / "test_b_stubborn.pid"
    until(lambda: pidfile.exists() and pidfile.read_text() != "")
    started = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    code = process.wait(timeout=20)
    elapsed = time.monotonic() - started
    assert code == 130
    # Five seconds on a machine that is not overloaded; the suite shares two cores.
    assert elapsed < 7
    (path,) = (repository.root / "out").glob("*/results.json")
    results = json.loads(path.read_text())
    assert results["status"] == "interrupted"
    outcomes = {Path(test["path"]).name: test["outcome"] for test in results["tests"]}
    assert outcomes == {
        Path(done).name: "passed",
        "test_b_stubborn.py": "cancelled",
        "test_c_never.py": "cancelled",
    }
    assert process_tree.read_process(int(pidfile.read_text())) is None


def test_running_runner_owns_its_results_and_a_killed_one_is_never_taken_for_green(repository):
    repository.file("test_done.py", "def test_a(): assert True\n")
    repository.file("test_sleeps.py", """
        import os, pathlib, time
        from miles_ci.declare import register_cpu_ci
        register_cpu_ci(est_time=5, suite="stage-a-cpu", serial=True)
        def test_a():
            pathlib.Path(__file__).with_suffix(".pid").write_text(str(os.getpid()))
            time.sleep(60)
            assert True
    """)  # fmt: skip
    process = repository.start("--suite", "stage-a-cpu")
    pidfile = repository.root / "tests/fast/test_sleeps.pid"
    until(lambda: pidfile.exists() and pidfile.read_text() != "")
    second = repository.run("--suite", "stage-a-cpu")
    assert second.code == 2
    assert f"another run (pid {process.pid}) writes its results there" in second.output
    process.kill()
    process.wait()
    until(lambda: process_tree.read_process(int(pidfile.read_text())) is None)
    (path,) = (repository.root / "out").glob("*/results.json")
    results = json.loads(path.read_text())
    assert (results["status"], results["exit_code"], results["counts"]["passed"]) == ("running", 3, 1)
    shown = subprocess.run(
        [*repository.command("results", "show", "out")], cwd=repository.root, env=repository.environment(),
        capture_output=True, text=True,
    )  # fmt: skip
    assert shown.returncode == 3
    assert "UNFINISHED   stage-a-cpu shard 1/1: the runner died before it finished" in shown.stdout
    # The locks of the dead runner are free again.
    assert repository.run("--suite", "stage-a-cpu", "--file", "tests/fast/test_done.py").code == 0


def test_file_that_had_finished_in_the_shared_process_of_a_killed_runner_is_shown_and_never_green(repository):
    repository.file("test_bad.py", "def test_a(): assert 1 == 2\n")
    repository.file("test_good.py", "def test_a(): assert True\n")
    repository.file("test_sleeps.py", "import time\ndef test_a():\n    time.sleep(60)\n    assert True\n")
    earlier = repository.root / "out/stage-a-cpu-1-of-1/junit.xml"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("<testsuites/>")
    process = repository.start("--suite", "stage-a-cpu")
    results = {}

    def reported() -> bool:
        for path in (repository.root / "out").glob("*/results.json"):
            results.update(json.loads(path.read_text()))
        return len(results.get("provisional", ())) == 2

    try:
        until(reported)
    finally:
        process.kill()
        process.wait()
    assert (results["status"], results["exit_code"], results["tests"]) == ("running", 3, [])
    assert not earlier.exists()
    shown = subprocess.run(
        repository.command("results", "show", "out"), cwd=repository.root, env=repository.environment(),
        capture_output=True, text=True,
    )  # fmt: skip
    assert shown.returncode == 3
    assert "PROVISIONAL  tests/fast/test_good.py: 1 passed, not judged\n" in shown.stdout
    bad = "PROVISIONAL  tests/fast/test_bad.py: 1 failed, not judged; tests/fast/test_bad.py::test_a: AssertionError: "
    assert bad in shown.stdout
    assert "test_sleeps" not in shown.stdout
    assert "0 file(s), 0 test(s): nothing ran" in shown.stdout


def test_terminal_that_goes_away_cancels_the_run(repository):
    repository.file("test_done.py", "def test_a(): assert True\n")
    repository.file("test_sleeps.py", """
        import pathlib, time
        from miles_ci.declare import register_cpu_ci
        register_cpu_ci(est_time=5, suite="stage-a-cpu", serial=True)
        def test_a():
            pathlib.Path(__file__).with_suffix(".mark").write_text("")
            time.sleep(60)
            assert True
    """)  # fmt: skip
    mark = repository.root / "tests/fast/test_sleeps.mark"
    process = repository.start("--suite", "stage-a-cpu")
    until(mark.exists)
    for _ in range(2):  # the kernel sends one, and the shell another
        os.kill(process.pid, signal.SIGHUP)
        time.sleep(0.1)
    assert process.wait(timeout=20) == 130
    (path,) = (repository.root / "out").glob("*/results.json")
    data = json.loads(path.read_text())
    outcomes = {Path(test["path"]).name: test["outcome"] for test in data["tests"]}
    assert (data["status"], data["provisional"]) == ("interrupted", [])
    assert outcomes == {"test_done.py": "passed", "test_sleeps.py": "cancelled"}


def test_hangup_that_is_ignored_under_nohup_stays_ignored():
    cancel = threading.Event()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with runner.cancel_on_signal(cancel):
            os.kill(os.getpid(), signal.SIGHUP)
        assert not cancel.is_set()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def until(condition, limit_s: float = 40.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
