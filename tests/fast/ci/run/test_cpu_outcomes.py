"""`miles-ci run` on one repository that holds every kind of CPU file, and what each of them leaves in the results."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from datetime import date, timedelta

import pytest

# One worker runs them all, so that the repository is run once.
pytestmark = pytest.mark.xdist_group("every-kind-of-file")

FILES = {
    "test_ok.py": """
        import os, pathlib
        def test_no_device_is_visible():
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "" == os.environ["HIP_VISIBLE_DEVICES"]
        def test_ports_and_folder_are_given():
            assert int(os.environ["MILES_CI_PORT_BASE"]) >= 20000
            assert pathlib.Path(os.environ["TMPDIR"]).is_dir()
        def test_runs_in_a_worker_beside_others():
            assert os.environ["PYTEST_XDIST_WORKER"].startswith("gw")
        """,
    "test_fails.py": """
        def test_wrong():
            value = 41
            assert value == 42, "token 7 at /home/u/x.py is 0xdeadbeef"
        def test_right(): assert True
        """,
    "test_fixture_error.py": """
        import pytest
        @pytest.fixture
        def broken(): raise ValueError("no such thing")
        def test_uses_it(broken): assert True
        """,
    "test_import_error.py": "import there_is_no_such_module\ndef test_a(): assert True\n",
    "test_nothing.py": "value = 1\n",
    "test_all_skipped.py": """
        import pytest
        @pytest.mark.skip(reason="not today")
        def test_a(): assert True
        """,
    "test_module_skipped.py": """
        import pytest
        pytest.skip("no such library", allow_module_level=True)
        def test_a(): assert True
        """,
    "test_skips_with_leave.py": """
        import pytest
        from miles_ci.declare import register_cpu_ci
        register_cpu_ci(est_time=1, suite="stage-a-cpu",
                        allow_all_skipped={"reason": "runs on macOS only, see docs"})
        @pytest.mark.skip(reason="macOS only")
        def test_a(): assert True
        """,
    "test_dead_cases.py": """
        import unittest
        def test_alive(): assert True
        if __name__ == "__main__":
            class Dead(unittest.TestCase):
                def test_never(self): self.fail()
            unittest.main()
        """,
    "test_swallows.py": """
        import pytest
        def test_a():
            pytest.main(["--version"])
            assert True
        """,
    "test_serial.py": """
        import os
        from miles_ci.declare import register_cpu_ci
        register_cpu_ci(est_time=1, suite="stage-a-cpu", serial=True)
        def test_runs_alone(): assert "PYTEST_XDIST_WORKER" not in os.environ
        """,
    "test_resets.py": """
        def test_a(): raise ConnectionResetError("Connection reset by peer")
        """,
    "test_unstable.py": """
        from miles_ci.declare import register_cpu_ci
        register_cpu_ci(est_time=1, suite="stage-a-cpu",
                        unstable={"reason": "races with the clock, being fixed", "issue": "#7", "until": "%(until)s"})
        def test_a(): assert 1 == 2
        """,
    "test_declares_wrongly.py": """
        from miles_ci.declare import register_cpu_ci
        register_cpu_ci(est_time=1, suite="no-such-suite")
        def test_a(): assert True
        """,
    "test_expected_failure.py": """
        import pytest
        @pytest.mark.xfail(reason="known", strict=True)
        def test_a(): assert 1 == 2
        """,
    "test_never_executed.py": """
        import pytest
        @pytest.mark.xfail(run=False, reason="kills the machine")
        def test_a(): assert 1 == 2
        """,
    "test_surrogate.py": """
        import warnings
        def test_half_a_pair(): assert "\\ud83d" == "x"
        def test_warns(): warnings.warn("\\udc00")
        """,
    "test_subtests.py": """
        import pytest, unittest
        def test_skips_then_passes(subtests):
            with subtests.test("first"): pytest.skip("not here")
            with subtests.test("second"): assert True
        def test_expects_a_failure_inside(subtests):
            with subtests.test("first"): pytest.xfail("known")
            with subtests.test("second"): assert True
        class TestCases(unittest.TestCase):
            def test_skips_one(self):
                for case in range(2):
                    with self.subTest(case=case):
                        if not case: self.skipTest("not here")
        """,
    "test_subtest_fails.py": """
        def test_one_of_three(subtests):
            for number in range(3):
                with subtests.test("number", number=number): assert number != 1
        """,
}
EXPECTED = {
    "test_ok.py": "passed",
    "test_fails.py": "failed",
    "test_fixture_error.py": "error",
    "test_import_error.py": "error",
    "test_nothing.py": "no_tests",
    "test_all_skipped.py": "all_skipped",
    "test_module_skipped.py": "all_skipped",
    "test_skips_with_leave.py": "all_skipped",
    "test_dead_cases.py": "error",
    "test_swallows.py": "error",
    "test_serial.py": "passed",
    "test_resets.py": "infra",
    "test_unstable.py": "unstable_failed",
    "test_declares_wrongly.py": "declaration_error",
    "test_expected_failure.py": "passed",
    "test_never_executed.py": "all_skipped",
    "test_surrogate.py": "failed",
    "test_subtests.py": "passed",
    "test_subtest_fails.py": "failed",
}


@pytest.fixture(scope="module")
def everything(tmp_path_factory, repository_class):
    """One run over all files; the tests below look at what it left."""
    repository = repository_class(tmp_path_factory.mktemp("repository"))
    until = (date.today() + timedelta(days=30)).isoformat()
    for name, source in FILES.items():
        repository.file(name, source.replace("%(until)s", until))
    return repository.run("--suite", "stage-a-cpu")


def test_every_kind_of_file_has_its_outcome(everything):
    assert everything.outcomes() == EXPECTED, everything.output


def test_declaration_error_decides_the_exit_code_over_test_failures(everything):
    assert everything.code == 2
    assert everything.results()["exit_code"] == 2


def test_leave_and_unstable_do_not_block_and_say_why(everything):
    tests = everything.tests()
    assert tests["test_skips_with_leave.py"]["tolerated"] == "runs on macOS only, see docs"
    assert tests["test_unstable.py"]["tolerated"] == "races with the clock, being fixed"


def test_failure_is_recorded_with_type_message_frame_and_signature(everything):
    (failure,) = everything.tests()["test_fails.py"]["attempts"][0]["failures"]
    assert failure["node"] == "tests/fast/test_fails.py::test_wrong"
    assert failure["type"] == "AssertionError"
    assert "token 7" in failure["message"]
    assert failure["frame"] == "tests/fast/test_fails.py:test_wrong:4"
    assert len(failure["signature"]) == 16


def test_nothing_is_repeated_where_too_much_failed(everything):
    """Twelve of nineteen files are bad: that is not chance, so the file with a retryable failure gets no second try."""
    test = everything.tests()["test_resets.py"]
    assert [attempt["cause"] for attempt in test["attempts"]] == ["connection-reset"]


def test_never_executed_tests_are_named(everything):
    tests = everything.tests()
    assert "Dead::test_never" in tests["test_dead_cases.py"]["message"]
    assert "pytest.main" in tests["test_swallows.py"]["message"]


def test_observed_lists_every_node_that_ran(everything):
    (path,) = everything.folder.glob("*/observed.json")
    observed = json.loads(path.read_text())
    assert set(observed["units"]["tests/fast/test_fails.py"]["nodes"].values()) == {"failed", "passed"}
    assert len(observed["units"]) == len(FILES)
    assert observed["plan_digest"] == everything.results()["run"]["plan_digest"]


def test_junit_holds_every_failing_file(everything):
    (path,) = everything.folder.glob("*/junit.xml")
    suite = ElementTree.parse(path).getroot().find("testsuite")
    bad = {case.get("file") for case in suite if case.find("failure") is not None or case.find("error") is not None}
    blocking = {f"tests/fast/{name}" for name in EXPECTED if name in (
        "test_fails.py", "test_fixture_error.py", "test_import_error.py", "test_nothing.py", "test_all_skipped.py",
        "test_module_skipped.py", "test_dead_cases.py", "test_swallows.py")}  # fmt: skip
    # test_unstable.py failed too: its node says so, although it does not block.
    assert bad - {"tests/fast/test_unstable.py"} >= blocking


def test_summary_names_what_is_wrong_and_the_exit_code(everything):
    assert "FAILED       tests/fast/test_fails.py" in everything.output
    assert "exit code 2" in everything.output
    assert (
        "XFAILED      tests/fast/test_expected_failure.py: 1 test(s) failed as expected, none passed"
        in everything.output
    )
    assert "4 passed" in everything.output
    assert "(1 of the passed only xfailed)" in everything.output


def test_text_that_no_file_can_carry_is_spelled_out_in_every_record(everything):
    (failure,) = everything.tests()["test_surrogate.py"]["attempts"][0]["failures"]
    assert "\\ud83d" in failure["message"]
    (path,) = everything.folder.glob("*/junit.xml")
    assert "\\ud83d" in path.read_text(encoding="utf-8")


def test_subtests_stand_beside_the_verdict_of_their_item(everything):
    test = everything.tests()["test_subtests.py"]
    assert set(test["nodes"].values()) == {"passed"}
    counted = {node.rpartition("::")[2]: counts for node, counts in test["subtests"].items()}
    assert counted == {
        "test_skips_then_passes": {"skipped": 1, "passed": 1},
        "test_expects_a_failure_inside": {"xfailed": 1, "passed": 1},
        "test_skips_one": {"skipped": 1, **({"passed": 1} if "passed" in counted["test_skips_one"] else {})},
    }


def test_subtest_that_fails_fails_its_item_and_is_named(everything):
    test = everything.tests()["test_subtest_fails.py"]
    assert set(test["nodes"].values()) == {"failed"}
    assert set(test["subtests"].popitem()[1].items()) == {("failed", 1), ("passed", 2)}
    (failure,) = test["attempts"][0]["failures"]
    assert failure["message"].startswith("subtest [number] (number='1'): ")


def test_exit_code_0_beside_a_failing_test_is_a_failure_of_that_file_and_a_note(repository):
    """Seen once: a SIGINT swallowed in a gc callback; a plugin that resets the exit status does the same."""
    repository.file("conftest.py", """
        import pytest
        @pytest.hookimpl(trylast=True)
        def pytest_sessionfinish(session):
            session.exitstatus = 0
    """)  # fmt: skip
    repository.file("test_bad.py", "def test_a(): assert 1 == 2\n")
    repository.file("test_good.py", "def test_a(): assert True\n")
    outcome = repository.run("--suite", "stage-a-cpu")
    assert outcome.code == 1
    assert outcome.outcomes() == {"test_bad.py": "failed", "test_good.py": "passed"}
    assert any("contradicts itself: exit code 0, but JUnit counts 1 failure" in n for n in outcome.results()["notes"])
