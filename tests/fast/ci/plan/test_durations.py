"""Learning durations, the committed table, estimates, drift and the rewriting of est_time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_ci.errors import UsageError
from miles_ci.plan import tune
from miles_ci.plan.durations import Durations, Learned, Observation, learn, median_ms
from miles_ci.plan.estimate import estimate
from miles_ci.plan.tune import (
    apply_rewrites,
    drifts,
    learned_of_history,
    merge,
    observations_of_results,
    placeholders,
    prune,
    rewrites,
)
from miles_ci.registry import load_fleet
from miles_ci.run import results as results_file
from tests.fast.ci.helpers.trees import PLAIN, REPOSITORY, cpu, cuda, workspace, write_tree

DAY = 86_400.0
NOW = 1_800_000_000.0


def seen(ms: int, age_days: float = 0.0, **fields: object) -> Observation:
    values: dict = {"path": "t.py", "suite": "s", "hardware": "cpu", **fields}
    return Observation(ms=ms, finished_at=NOW - age_days * DAY, **values)


def test_only_the_last_20_of_30_days_count() -> None:
    rows = [seen(10, age_days=25 - index / 10) for index in range(5)] + [
        seen(100, age_days=index / 10) for index in range(20)
    ]
    rows += [seen(9999, age_days=31), seen(9999, age_days=-2)]
    assert learn(rows, NOW)[("t.py", "s", "cpu")].ms == 100
    assert learn(rows, NOW)[("t.py", "s", "cpu")].count == 20


def test_hardware_models_are_learned_apart_and_items_beside_their_file() -> None:
    rows = [seen(10), seen(30, hardware="h200"), seen(4, item="t.py::test_a"), seen(6, item="t.py::test_a")]
    found = learn(rows, NOW)
    assert (found[("t.py", "s", "cpu")].ms, found[("t.py", "s", "h200")].ms) == (10, 30)
    assert found[("t.py", "s", "cpu")].items == {"t.py::test_a": 4}


def test_a_median_is_an_observed_whole_number_of_at_least_one() -> None:
    assert [median_ms(values) for values in ([1, 100], [3, 1, 2], [0])] == [1, 2, 1]


def test_the_table_survives_a_round_trip_with_one_line_for_each_test(tmp_path: Path) -> None:
    table = Durations(
        {
            ("b.py", "s", "cpu"): Learned(5, 3, "2026-11-30"),
            ("a.py", "s", "cpu"): Learned(7, 2, "2026-11-29", {"a.py::x": None}),
        }
    )
    path = tmp_path / "tests/durations.json"
    table.save(path)
    assert Durations.load(path).entries == table.entries
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert lines[1].startswith('"a.py|s|cpu"')
    table.save(path)
    assert path.read_text().splitlines() == lines


def test_a_missing_table_is_empty_and_the_committed_one_is_canonical() -> None:
    assert Durations.load(Path("/nonexistent/durations.json")).entries == {}
    committed = REPOSITORY / "tests/durations.json"
    assert Durations.load(committed).text() == committed.read_text()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"schema": 2, "tests": {}}',
        '{"schema": 1}',
        '{"schema": 1, "tests": []}',
        '{"schema": 1, "tests": {"a|b": {"ms": 1, "n": 3, "last": "x"}}}',
        '{"schema": 1, "tests": {"a|b|c": {"ms": "1", "n": 3, "last": "x"}}}',
        '{"schema": 1, "tests": {"a|b|c": {"ms": true, "n": 3, "last": "x"}}}',
        '{"schema": 1, "tests": {"a|b|c": {"ms": -1, "n": 3, "last": "x"}}}',
        '{"schema": 1, "tests": {"a|b|c": {"ms": 1, "n": 3}}}',
        '{"schema": 1, "tests": {"a|b|c": {"ms": 1, "n": 3, "last": "x", "more": 1}}}',
        '{"schema": 1, "tests": {"a|b|c": {"ms": 1, "n": 3, "last": "x"}, "a|b|c": {"ms": 1, "n": 3, "last": "x"}}}',
        '{"schema": 1, "tests": {"a|b|c": {"ms": 1, "n": 3, "last": "x", "items": {"i": 0.5}}}}',
    ],
)
def test_a_corrupt_table_is_an_error_and_never_guessed(text: str, tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(UsageError, match="no valid durations table"):
        Durations.load(tmp_path / "d.json")


def test_estimates_prefer_observed_then_declared_then_the_suite_then_a_default(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {"tests/fast/test_a.py": PLAIN, "tests/fast/test_b.py": PLAIN, "tests/e2e/test_c.py": cpu(est_time="2.5")},
    )
    registrations = workspace(tmp_path).catalog.registrations
    fast = [item for item in registrations if item.suite == "stage-a-cpu"]
    slow = [item for item in registrations if item.suite == "stage-b-cpu"]
    assert {(e.ms, e.source) for e in estimate(fast, Durations(), "cpu").values()} == {(5000, "default")}
    assert estimate(slow, Durations(), "cpu")["tests/e2e/test_c.py"].ms == 2500
    known = {("tests/fast/test_a.py", "stage-a-cpu", "cpu"): Learned(700, 3, "2026-11-30")}
    found = estimate(fast, Durations(known), "cpu")
    assert (found["tests/fast/test_a.py"].source, found["tests/fast/test_b.py"].source) == ("observed", "suite-mean")
    assert found["tests/fast/test_b.py"].ms == 700
    few = {("tests/e2e/test_c.py", "stage-b-cpu", "cpu"): Learned(700, 2, "2026-11-30")}
    assert estimate(slow, Durations(few), "cpu")["tests/e2e/test_c.py"].source == "declared"
    assert estimate(slow, Durations(few), "h200")["tests/e2e/test_c.py"].source == "declared"


def test_a_thin_new_entry_does_not_replace_a_thick_old_one() -> None:
    key = ("a.py", "s", "cpu")
    old = Durations({key: Learned(5, 20, "2026-11-01")})
    assert merge(old, {key: Learned(9, 1, "2026-11-30")}).entries[key].ms == 5
    assert merge(old, {key: Learned(9, 3, "2026-11-30")}).entries[key].ms == 9
    assert merge(Durations(), {key: Learned(9, 1, "2026-11-30")}).entries[key].ms == 9


def test_entries_of_tests_that_are_gone_are_pruned_and_those_of_faulty_files_kept(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/fast/test_a.py": PLAIN, "tests/e2e/test_bad.py": "register_cpu_ci("})
    keys = [("tests/fast/test_a.py", "stage-a-cpu", "cpu"), ("tests/fast/gone.py", "stage-a-cpu", "cpu")]
    keys.append(("tests/e2e/test_bad.py", "stage-b-cpu", "cpu"))
    table = Durations({key: Learned(5, 3, "2026-11-30") for key in keys})
    assert set(prune(table, workspace(tmp_path).catalog).entries) == {keys[0], keys[2]}


def test_only_files_that_may_be_split_keep_the_durations_of_their_items(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/fast/test_a.py": PLAIN, "tests/e2e/test_b.py": cpu(split="True")})
    whole, split = ("tests/fast/test_a.py", "stage-a-cpu", "cpu"), ("tests/e2e/test_b.py", "stage-b-cpu", "cpu")
    table = Durations({key: Learned(5, 3, "2026-11-30", {f"{key[0]}::test_it": 5}) for key in (whole, split)})
    kept = prune(table, workspace(tmp_path).catalog).entries
    assert (kept[whole].items, kept[split].items) == ({}, {"tests/e2e/test_b.py::test_it": 5})


def results(outcome: str = "passed", unit: str = "tests/fast/test_a.py") -> dict:
    test = {
        "unit": unit,
        "path": "tests/fast/test_a.py",
        "outcome": outcome,
        "attempts": [{"wall_s": 9.0}, {"wall_s": 1.25}],
        "nodes": {"tests/fast/test_a.py::test_x": "passed", "tests/fast/test_a.py::test_y": "failed"},
        "node_ms": {"tests/fast/test_a.py::test_x": 30, "tests/fast/test_a.py::test_y": 40},
    }
    return {"schema": 2, "run": {"suite": "stage-a-cpu", "hardware": "cpu", "started_at": NOW}, "tests": [test]}


def test_passing_runs_are_read_from_results_and_parts_tell_of_items_only(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results()))
    found = list(observations_of_results([path]))
    assert [(item.item, item.ms) for item in found] == [(None, 1250), ("tests/fast/test_a.py::test_x", 30)]
    path.write_text(json.dumps(results(unit="tests/fast/test_a.py#1/2")))
    assert [item.item for item in observations_of_results([path])] == ["tests/fast/test_a.py::test_x"]
    narrowed = results()
    narrowed["tests"][0]["only"] = ["tests/fast/test_a.py::test_x"]
    path.write_text(json.dumps(narrowed))
    assert [item.item for item in observations_of_results([path])] == ["tests/fast/test_a.py::test_x"]
    for outcome in ("failed", "flaky", "timeout"):
        path.write_text(json.dumps(results(outcome)))
        assert list(observations_of_results([path])) == []
    path.write_text(json.dumps({**results(), "schema": 1}))
    with pytest.raises(UsageError, match="no results of schema 2: schema is 1, not 2; give a results"):
        list(observations_of_results([path]))
    path.write_text('{"schema": 2}')
    with pytest.raises(UsageError, match="no results of schema 2: 'run' is missing"):
        list(observations_of_results([path]))


def test_copies_of_one_run_count_once_and_a_second_start_is_another_run(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.json" for name in "abc"]
    for path, started in zip(paths, (NOW, NOW, NOW + 1), strict=True):
        data = results()
        data["run"] |= {"run_id": "7", "run_attempt": 1, "shard": "1/1", "started_at": started}
        path.write_text(json.dumps(data))
    found = [item for item in observations_of_results([*paths, paths[0]]) if item.item is None]
    assert [item.finished_at for item in found] == [NOW, NOW + 1]


def test_a_history_store_gives_files_and_their_items() -> None:
    fleet = load_fleet(REPOSITORY / "registry.yaml")
    rows = {"cpu": {("stage-a-cpu", "a.py"): [30, 10, 20], ("stage-a-cpu", "a.py::x"): [4], ("old-suite", "a.py"): [1]}}
    found = learned_of_history(fleet, rows, "2026-11-30")
    assert found == {("a.py", "stage-a-cpu", "cpu"): Learned(20, 3, "2026-11-30", {"a.py::x": 4})}


def test_drift_is_notable_beyond_a_factor_of_two_and_ten_seconds(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            f"tests/e2e/test_{name}.py": cpu(est_time=est)
            for name, est in (("a", "10"), ("b", "10"), ("c", "100"), ("d", "2"))
        },
    )
    observed = {"a": 25_000, "b": 15_000, "c": 40_000, "d": 6_000}
    table = Durations(
        {(f"tests/e2e/test_{n}.py", "stage-b-cpu", "cpu"): Learned(ms, 3, "2026-11-30") for n, ms in observed.items()}
    )
    space = workspace(tmp_path)
    found = {drift.path[-4]: drift.notable for drift in drifts(space.catalog, space.fleet, table)}
    assert found == {"a": True, "b": False, "c": True, "d": False}


def test_one_value_for_more_than_a_fifth_of_a_suite_is_called_a_placeholder(tmp_path: Path) -> None:
    files = {f"tests/e2e/test_{index}.py": cpu(est_time="60" if index < 3 else str(index)) for index in range(10)}
    write_tree(tmp_path, files)
    found = placeholders(workspace(tmp_path).catalog.registrations)
    assert [(item.est_time, item.tests, item.total) for item in found] == [(60.0, 3, 10)]
    (tmp_path / "tests/e2e/test_9.py").unlink()
    assert placeholders(workspace(tmp_path).catalog.registrations) == []


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_tuning_changes_exactly_the_characters_of_the_literal(newline: str, mark: str, tmp_path: Path) -> None:
    source = mark + newline.join(
        [
            "# 60 stays 60: é",
            "from miles_ci.declare import register_cuda_ci",
            '"é"; register_cuda_ci(suite="stage-b-1-gpu-h200",  est_time = 60 , hardware=["h200"], labels=["kernels"])',
            'register_cuda_ci(  1.5e1, "stage-b-2-gpu-h200", hardware=["h200"], labels=["kernels"])  # 60',
            "",
        ]
    )
    write_tree(tmp_path, {"tests/e2e/test_a.py": source.encode(), "tests/e2e/test_b.py": cuda()})
    paths = {"stage-b-1-gpu-h200": 123_456, "stage-b-2-gpu-h200": 1_234}
    entries = {("tests/e2e/test_a.py", suite, "h200"): Learned(ms, 5, "2026-11-30") for suite, ms in paths.items()}
    entries[("tests/e2e/test_b.py", "stage-b-1-gpu-h200", "h200")] = Learned(85_000, 5, "2026-11-30")
    space = workspace(tmp_path)
    changes = rewrites(tmp_path, space.catalog, space.fleet, Durations(entries))
    assert apply_rewrites(tmp_path, changes) == ["tests/e2e/test_a.py"]
    expected = source.replace("est_time = 60 ,", "est_time = 123 ,").replace("(  1.5e1,", "(  1.2,")
    assert (tmp_path / "tests/e2e/test_a.py").read_bytes() == expected.encode()


def test_a_file_that_changed_meanwhile_is_not_rewritten(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/e2e/test_a.py": cuda()})
    space = workspace(tmp_path)
    table = Durations({("tests/e2e/test_a.py", "stage-b-1-gpu-h200", "h200"): Learned(500_000, 5, "2026-11-30")})
    changes = rewrites(tmp_path, space.catalog, space.fleet, table)
    (tmp_path / "tests/e2e/test_a.py").write_text("\n\n" + cuda())
    with pytest.raises(UsageError, match="changed while it was being tuned"):
        apply_rewrites(tmp_path, changes)


def test_learning_reads_the_results_that_this_harness_writes() -> None:
    assert tune.RESULTS_SCHEMA == results_file.SCHEMA


def test_an_observation_on_either_border_counts_and_one_second_beyond_does_not() -> None:
    def counted(age_days: float) -> int:
        found = learn([seen(7, age_days=age_days)], NOW)
        return sum(entry.count for entry in found.values())

    second = 1 / DAY
    assert [counted(age) for age in (30, 30 + second, -1, -1 - second / 2)] == [1, 0, 1, 0]
    assert learn([seen(-1)], NOW) == {}


def test_a_duration_of_0_ms_in_the_table_is_1_and_1_stays(tmp_path: Path) -> None:
    record = {"n": 3, "last": "2026-11-30"}
    tests = {"a|s|cpu": {"ms": 0, **record}, "b|s|cpu": {"ms": 1, **record}}
    (tmp_path / "durations.json").write_text(json.dumps({"schema": 1, "tests": tests}))
    assert [entry.ms for entry in Durations.load(tmp_path / "durations.json").entries.values()] == [1, 1]


def test_drifts_come_largest_first_either_way(tmp_path: Path) -> None:
    observed = {"a": 20_000, "b": 1_000, "c": 10_000, "d": 50_000}
    write_tree(tmp_path, {f"tests/e2e/test_{name}.py": cpu(est_time="10") for name in observed})
    table = Durations(
        {(f"tests/e2e/test_{n}.py", "stage-b-cpu", "cpu"): Learned(ms, 3, "2026-11-30") for n, ms in observed.items()}
    )
    space = workspace(tmp_path)
    found = drifts(space.catalog, space.fleet, table)
    assert [(drift.path[-4], drift.ratio) for drift in found] == [("b", 0.1), ("d", 5.0), ("a", 2.0), ("c", 1.0)]


@pytest.mark.parametrize("mode", [0o640, 0o755])
def test_a_rewritten_file_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    write_tree(tmp_path, {"tests/e2e/test_a.py": cuda()})
    file = tmp_path / "tests/e2e/test_a.py"
    file.chmod(mode)
    space = workspace(tmp_path)
    table = Durations({("tests/e2e/test_a.py", "stage-b-1-gpu-h200", "h200"): Learned(500_000, 5, "2026-11-30")})
    assert apply_rewrites(tmp_path, rewrites(tmp_path, space.catalog, space.fleet, table)) == ["tests/e2e/test_a.py"]
    assert file.stat().st_mode & 0o7777 == mode
