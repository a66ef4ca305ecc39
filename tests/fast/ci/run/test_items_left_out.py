"""The proof that a test runs is per item: what pytest made and did not run is named, with who left it out."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from miles_ci.plan.model import plan_from_json
from miles_ci.report.merge import merge, text
from miles_ci.run.judge.pytest_events import read_events
from miles_ci.run.results import read_results

TWO = """
    import pytest
    @pytest.mark.parametrize("size", ["small", pytest.param("big", marks=pytest.mark.slow)])
    def test_size(size):
        assert size
"""
SPLIT = """
    import pytest
    def test_a(): assert True
    def test_ab(): assert True
    @pytest.mark.parametrize("n", [1, 10])
    def test_b(n): assert n
"""
PLAIN = "def test_plain():\n    assert True\n"
SLOW = '\nmarkers = ["slow"]\n'
DROPS = """
    def pytest_collection_modifyitems(items):
        items[:] = [item for item in items if "big" not in item.nodeid]
"""
SAYS_SO = """
    def pytest_collection_modifyitems(config, items):
        gone = [item for item in items if "big" in item.nodeid]
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]
"""
THINS_OUT = """
    import pytest
    @pytest.hookimpl(wrapper=True)
    def pytest_pycollect_makeitem(name):
        made = yield
        return [item for item in made if "big" not in item.nodeid] if isinstance(made, list) else made
"""
CUTS_THE_MODULE = """
    import pytest
    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(collector):
        report = yield
        report.result = [item for item in report.result or [] if "big" not in item.nodeid]
        return report
"""
LATE = """
    import pytest
    @pytest.hookimpl(wrapper=True)
    def pytest_collection(session):
        done = yield
        session.items[:] = [item for item in session.items if "big" not in item.nodeid]
        return done
"""
SERIAL = """
    from miles_ci.declare import register_cpu_ci
    register_cpu_ci(5, "stage-a-cpu", serial=True)
"""
BIG, SMALL = "tests/fast/test_a.py::test_size[big]", "tests/fast/test_a.py::test_size[small]"


@pytest.fixture
def two(repository):
    (repository.root / "pyproject.toml").write_text(
        f'[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"{SLOW}'
    )
    repository.file("test_a.py", TWO)
    repository.file("test_b.py", PLAIN)
    return repository


def options(repository, words: str) -> None:
    (repository.root / "pyproject.toml").write_text(
        f'[tool.pytest.ini_options]\naddopts = "--import-mode=importlib {words}"{SLOW}'
    )


def test_without_anybody_who_leaves_out_every_item_runs(two) -> None:
    outcome = two.run("--suite", "stage-a-cpu")
    assert (outcome.code, outcome.outcomes()) == (0, {"test_a.py": "passed", "test_b.py": "passed"}), outcome.output
    assert outcome.tests()["test_a.py"]["never_executed"] == {}


@pytest.mark.parametrize(
    ("words", "gone", "who"),
    [
        ("-m 'not slow'", BIG, "deselected by -m 'not slow'"),
        ("-k 'not big'", BIG, "deselected by -k 'not big'"),
        (f"--deselect {SMALL}", SMALL, "deselected by --deselect"),
    ],
)
@pytest.mark.parametrize("serial", [False, True])
def test_a_parameter_that_an_option_leaves_out_is_an_error_and_exit_5(
    two, words: str, gone: str, who: str, serial: bool
) -> None:
    options(two, words)
    two.file("test_a.py", SERIAL + TWO if serial else TWO)
    outcome = two.run("--suite", "stage-a-cpu", "--file", "tests/fast/test_a.py")
    test = outcome.tests()["test_a.py"]
    assert (outcome.code, test["outcome"], test["never_executed"]) == (5, "error", {gone: who}), outcome.output
    assert f"NEVER RUN    {gone}: {who}" in outcome.output


@pytest.mark.parametrize("conftest", [DROPS, SAYS_SO, THINS_OUT, CUTS_THE_MODULE])
def test_a_parameter_that_a_conftest_drops_is_noticed_however_it_does_it(two, conftest: str) -> None:
    two.file("conftest.py", conftest, "tests")
    outcome = two.run("--suite", "stage-a-cpu")
    assert (outcome.code, outcome.outcomes()) == (5, {"test_a.py": "error", "test_b.py": "passed"}), outcome.output
    assert set(outcome.tests()["test_a.py"]["never_executed"]) == {BIG}


def test_a_list_that_is_cut_behind_the_back_of_xdist_passes_nothing(two) -> None:
    two.file("conftest.py", LATE, "tests")
    outcome = two.run("--suite", "stage-a-cpu", "--file", "tests/fast/test_a.py")
    assert outcome.code != 0
    assert outcome.outcomes() == {"test_a.py": "error"}, outcome.output


def test_a_list_that_is_cut_after_collection_is_noticed_where_there_is_one_process(two) -> None:
    two.file("conftest.py", LATE, "tests")
    two.file("test_a.py", SERIAL + TWO)
    outcome = two.run("--suite", "stage-a-cpu", "--file", "tests/fast/test_a.py")
    assert (outcome.code != 0, outcome.outcomes()) == (True, {"test_a.py": "error"}), outcome.output
    assert f"never reported a result, first {BIG}" in outcome.tests()["test_a.py"]["message"]


@pytest.mark.parametrize(
    ("conftest", "who"), [(DROPS, "dropped by tests/conftest.py"), (SAYS_SO, "deselected by tests/conftest.py")]
)
def test_the_conftest_that_leaves_an_item_out_is_named(two, conftest: str, who: str) -> None:
    two.file("conftest.py", conftest, "tests")
    assert two.run("--suite", "stage-a-cpu").tests()["test_a.py"]["never_executed"] == {BIG: who}


def test_a_file_all_of_whose_items_are_left_out_is_an_error_that_names_them(two) -> None:
    options(two, "-k plain")
    outcome = two.run("--suite", "stage-a-cpu")
    assert outcome.outcomes() == {"test_a.py": "error", "test_b.py": "passed"}
    assert set(outcome.tests()["test_a.py"]["never_executed"]) == {BIG, SMALL}
    assert outcome.code == 5


ALLOW = """
    from miles_ci.declare import register_cpu_ci
    register_cpu_ci(5, "stage-a-cpu", allow_never_executed={%r: "needs 64 GiB, a person runs it"})
"""


@pytest.mark.parametrize("name", ["test_size[big]", "test_size"])
def test_an_item_left_out_may_be_allowed_by_name_and_is_still_shown(two, name: str) -> None:
    options(two, "-m 'not slow'")
    two.file("test_a.py", ALLOW % name + TWO)
    outcome = two.run("--suite", "stage-a-cpu")
    test = outcome.tests()["test_a.py"]
    assert (outcome.code, test["outcome"], test["never_executed"]) == (0, "passed", {}), outcome.output
    assert test["allowed"] == {BIG: "deselected by -m 'not slow'; needs 64 GiB, a person runs it"}
    assert f"LEFT OUT     {BIG}: deselected by -m" in outcome.output


@pytest.mark.parametrize("name", ["test_size[bi]", "test_siz", "test_size[bigger]", "test"])
def test_an_allowance_for_another_name_allows_nothing(two, name: str) -> None:
    options(two, "-m 'not slow'")
    two.file("test_a.py", ALLOW % name + TWO)
    outcome = two.run("--suite", "stage-a-cpu")
    assert (outcome.code, outcome.outcomes()["test_a.py"]) == (5, "error")


def test_the_merge_names_each_item_that_never_ran_and_ends_with_5(two) -> None:
    options(two, "-m 'not slow'")
    planned = subprocess.run(
        two.command("plan", "--suite", "stage-a-cpu", "--out", str(two.root / "plan.json")),
        cwd=two.root, env=two.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    outcome = two.run("--suite", "stage-a-cpu", "--plan", str(two.root / "plan.json"))
    plan = plan_from_json(json.loads((two.root / "plan.json").read_text()))
    (path,) = outcome.folder.glob("*/results.json")
    merged = merge(plan, [read_results(path)])
    assert merged.never_executed == (f"stage-a-cpu: {BIG} (deselected by -m 'not slow')",)
    assert merged.exit_code() == 5
    assert f"NEVER RUN    stage-a-cpu: {BIG}" in text(merged)


def test_asking_for_one_item_leaves_the_others_in_peace(two) -> None:
    outcome = two.run("--suite", "stage-a-cpu", "--file", SMALL)
    assert (outcome.code, outcome.tests()["test_a.py"]["never_executed"]) == (0, {}), outcome.output


@pytest.mark.parametrize("distribution", [["-p", "no:xdist"], ["-p", "xdist", "-n", "2"]])
def test_a_part_of_a_split_file_leaves_out_exactly_the_items_of_other_parts(repository, distribution) -> None:
    names = ("test_a", "test_ab", "test_b[1]", "test_b[10]")
    repository.file("test_s.py", SPLIT)
    command = [sys.executable, "-m", "pytest", "-p", "miles_ci.run.process.event_writer", *distribution, "-rA"]
    words = ["tests/fast/test_s.py", "--runs-elsewhere=tests/fast/test_s.py::test_a"]
    words += ["--runs-elsewhere=tests/fast/test_s.py::test_b[1]"]
    events = repository.root / "events"
    done = subprocess.run(
        [*command, *words], cwd=repository.root, env=repository.environment(MILES_CI_OBSERVED=str(events)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    evidence = read_events(events).files["tests/fast/test_s.py"]
    ran = {node.partition("::")[2] for node in evidence.items}
    assert (ran, set(evidence.left_out.values())) == ({names[1], names[3]}, {"run by another part"})
