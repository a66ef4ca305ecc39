"""From a tree to a plan: shards, reasons for empty suites, pools, split files, digest and its verification."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_ci.declare.model import Declaration, Scan
from miles_ci.errors import PlanMismatch, UsageError
from miles_ci.plan.build import PlanOptions, build_plan
from miles_ci.plan.durations import Durations, Learned
from miles_ci.plan.model import Plan, Unit, plan_from_json
from miles_ci.registry import Fleet, load_fleet
from miles_ci.registry.load import read_fleet
from miles_ci.select.policy import Policy
from miles_ci.select.registrations import build_catalog
from miles_ci.select.selection import select
from tests.fast.ci.helpers.trees import PLAIN, REPOSITORY, TODAY, cpu, cuda, workspace, write_tree

SOURCE = (REPOSITORY / "registry.yaml").read_text(encoding="utf-8")
FLEET = load_fleet(REPOSITORY / "registry.yaml")
BOUND = 'from miles_ci.declare import register_metric_bound\nregister_metric_bound("loss", rel_up=0.1, rel_down=0.1)\n'


def plan_of(root: Path, cadence: str = "weekly", durations: Durations | None = None, **options: object) -> Plan:
    space = workspace(root)
    selection = select(space.catalog, space.fleet, Policy.resolve(space.fleet, cadence), today=TODAY)
    chosen = PlanOptions(**{"shards": {}, **options})  # type: ignore[arg-type]
    return build_plan(space.catalog, space.fleet, selection, durations or Durations(), chosen)


def of_declarations(
    declarations: list[Declaration], fleet: Fleet = FLEET, labels: tuple[str, ...] = (), cadence: str = "weekly"
) -> Plan:
    catalog = build_catalog(Scan("", tuple(declarations), (), (), ()), fleet, today=TODAY)
    return build_plan(
        catalog, fleet, select(catalog, fleet, Policy.resolve(fleet, cadence, labels), today=TODAY), Durations()
    )


def test_a_unit_carries_everything_the_runner_needs(tmp_path: Path) -> None:
    unstable = '{"reason": "diverges now and then", "issue": "#3", "until": "2026-12-24"}'
    source = cuda("stage-c-8-gpu-h200", num_gpus="4", min_memory_gib="100", capabilities='["rdma"]', unstable=unstable, timeout="1200",
                  serial="True", allow_all_skipped='{"reason": "needs a licence server"}', est_time="90.5") + BOUND  # fmt: skip
    write_tree(tmp_path, {"tests/e2e/test_a.py": source})
    shard = plan_of(tmp_path).shard("stage-c-8-gpu-h200", 1)
    unit = shard.units[0]
    assert (shard.backend, shard.hardware, shard.pool, shard.width) == ("cuda", "h200", "h200-8gpu", 8)
    assert shard.runs_on == ("self-hosted", "nvidia", "h200", "8gpu")
    assert (unit.id, unit.ms, unit.est_source, unit.devices, unit.timeout_s) == (
        "tests/e2e/test_a.py",
        90_500,
        "declared",
        4,
        1200,
    )
    assert (unit.serial, unit.unstable, unit.min_memory_gib) == (True, "diverges now and then", 100.0)
    assert (unit.capabilities, unit.allow_all_skipped) == (("rdma",), "needs a licence server")
    assert unit.metric_bounds[0].metric == "loss"


@pytest.mark.parametrize(
    ("est", "timeout", "expected"), [("10", None, 300), ("200", None, 600), ("900", None, 1800), ("10", "45.2", 46)]
)
def test_a_timeout_is_declared_or_three_estimates_and_capped_by_the_suite(
    est: str, timeout: str | None, expected: int, tmp_path: Path
) -> None:
    write_tree(tmp_path, {"tests/e2e/test_a.py": cpu(est_time=est, timeout=str(timeout))})
    assert plan_of(tmp_path).shard("stage-b-cpu", 1).units[0].timeout_s == expected


def test_a_suite_without_tests_asks_for_no_runner_and_says_why(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/e2e/test_a.py": cuda(), "tests/fast/test_b.py": PLAIN})
    plan = plan_of(tmp_path, "regular")
    assert plan.suite("stage-b-2-gpu-h200").reason == "no test is registered in this suite"
    reason = plan.suite("stage-b-1-gpu-h200").reason
    assert reason is not None
    assert reason.startswith("all 1 tests are excluded: 1 label (first: none of its labels is included")
    write_tree(tmp_path, {"tests/e2e/test_d.py": cuda(nightly="True")})
    tied = plan_of(tmp_path, "regular").suite("stage-b-1-gpu-h200").reason
    assert tied is not None
    assert tied.startswith("all 2 tests are excluded: 1 cadence, 1 label (first: ")
    write_tree(tmp_path, {"tests/e2e/test_c.py": cuda()})
    told = plan_of(tmp_path, "regular").suite("stage-b-1-gpu-h200").reason
    assert told is not None
    assert told.startswith("all 3 tests are excluded: 2 label, 1 cadence (first: ")
    assert plan.shards_of("stage-b-1-gpu-h200") == ()
    assert plan.outputs()["stage-b-1-gpu-h200-shards"] == "[]"
    assert plan.outputs()["gpu-count"] == "0"


def test_a_broken_file_is_one_entry_of_the_first_shard_and_changes_no_other_suite(tmp_path: Path) -> None:
    files = {f"tests/e2e/test_{index}.py": cuda() for index in range(6)} | {
        "tests/fast/test_a.py": PLAIN,
        "tests/fast/test_b.py": PLAIN,
    }
    write_tree(tmp_path, files)
    before = plan_of(tmp_path)
    write_tree(tmp_path, {"tests/e2e/test_bad.py": cuda(est_time="-1")})
    after = plan_of(tmp_path)
    assert after.shards_of("stage-b-1-gpu-h200") == before.shards_of("stage-b-1-gpu-h200")
    first = after.shard("stage-a-cpu", 1)
    assert first.units[0].id == "declaration::tests/e2e/test_bad.py"
    assert "must be greater than 0" in first.units[0].errors[0]
    fault = first.units[0]
    assert (fault.ms, fault.timeout_s, fault.devices, fault.est_source, fault.only) == (1, 1, 0, "none", ())
    assert first.units[1:] == before.shard("stage-a-cpu", 1).units
    assert after.suite("stage-a-cpu").selected == 3


def test_a_tree_of_broken_files_only_still_has_a_shard_that_reports_them(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/e2e/test_bad.py": cuda(est_time="-1")})
    plan = plan_of(tmp_path)
    assert [unit.kind for unit in plan.shard("stage-a-cpu", 1).units] == ["declaration-error"]
    assert [shard.id for shard in plan.shards] == ["stage-a-cpu-1-of-1"]


def test_a_test_longer_than_the_target_is_named(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/e2e/test_a.py": cuda(est_time="901"), "tests/e2e/test_b.py": cuda(est_time="900")})
    assert plan_of(tmp_path).suite("stage-b-1-gpu-h200").over_target == ("tests/e2e/test_a.py",)


def split_tree(root: Path, extra: str = "", split: str = "True") -> Durations:
    write_tree(root, {"tests/e2e/test_big.py": cpu(split=split) + extra, "tests/e2e/test_small.py": cpu()})
    items: dict[str, int | None] = {f"tests/e2e/test_big.py::test_{index}": 200_000 for index in range(6)}
    return Durations({("tests/e2e/test_big.py", "stage-b-cpu", "cpu"): Learned(1_200_000, 5, "2026-11-30", items)})


def test_a_large_file_is_split_into_parts_that_cover_it(tmp_path: Path) -> None:
    durations = split_tree(tmp_path)
    plan = plan_of(tmp_path, durations=durations, shards={"stage-b-cpu": 3}, suites=("stage-b-cpu",))
    parts = sorted(
        (unit for shard in plan.shards for unit in shard.units if "big" in unit.path), key=lambda unit: unit.id
    )
    assert [unit.id for unit in parts] == [f"tests/e2e/test_big.py#{index}/3" for index in (1, 2, 3)]
    assert parts[0].nodes is None
    named = sorted(node for unit in parts[1:] for node in unit.nodes or ())
    assert sorted(parts[0].deselect) == named
    assert len(named) == 4
    assert len({shard.index for shard in plan.shards for unit in shard.units if "big" in unit.path}) == 3


def test_a_file_stays_whole_when_it_does_not_ask_is_bounded_or_is_unknown(tmp_path: Path) -> None:
    for extra, split, known in (("", "False", True), (BOUND, "True", True), ("", "True", False)):
        durations = split_tree(tmp_path, extra, split)
        plan = plan_of(tmp_path, durations=durations if known else Durations(), shards={"stage-b-cpu": 3})
        assert [unit.id for shard in plan.shards_of("stage-b-cpu") for unit in shard.units if "big" in unit.path] == [
            "tests/e2e/test_big.py"
        ]


def test_tests_that_need_different_pools_are_divided_apart() -> None:
    text = SOURCE.replace("pools: [h200-4gpu]", "pools: [h200-4gpu, h200-8gpu]", 1)
    fleet = read_fleet(text.encode(), today=TODAY).fleet
    assert fleet is not None
    tests = [
        Declaration(f"tests/e2e/test_{i}.py", "cuda", "stage-c-4-gpu-h200", est_time=1500.0, hardware=("h200",), labels=("megatron",),
                    capabilities=("rdma",) if i < 2 else ())
        for i in range(6)
    ]  # fmt: skip
    plan = of_declarations(tests, fleet)
    shards = plan.shards_of("stage-c-4-gpu-h200")
    assert [shard.index for shard in shards] == list(range(1, len(shards) + 1))
    assert {shard.count for shard in shards} == {len(shards)}
    assert len(shards) <= fleet.suites["stage-c-4-gpu-h200"].max_shards
    for shard in shards:
        if any("rdma" in unit.capabilities for unit in shard.units):
            assert shard.pool == "h200-8gpu"
    assert sorted(unit.path for shard in shards for unit in shard.units) == [test.path for test in tests]


def test_more_pool_sets_than_shards_get_one_shard_each() -> None:
    text = SOURCE.replace("pools: [h200-4gpu]", "pools: [h200-4gpu, h200-8gpu]", 1)
    suite = text[text.index("  stage-c-4-gpu-h200:\n") :]
    fleet = read_fleet(
        text.replace(suite, re.sub(r"max_shards: \d+", "max_shards: 1", suite, count=1)).encode(), today=TODAY
    ).fleet
    assert fleet is not None
    tests = [
        Declaration(f"tests/e2e/test_{i}.py", "cuda", "stage-c-4-gpu-h200", est_time=1700.0, hardware=("h200",),
                    labels=("megatron",), capabilities=("rdma",) if i < 4 else ())
        for i in range(8)
    ]  # fmt: skip
    assert [len(shard.units) for shard in of_declarations(tests, fleet).shards_of("stage-c-4-gpu-h200")] == [4, 4]


def test_the_nodes_of_a_narrowed_unit_are_all_it_says_something_about() -> None:
    unit = Unit("a", "a.py", "s", "test", 1, "declared", 0, 300)
    assert replace(unit, nodes=("a.py::b",), narrowed=True).only == ("a.py::b",)
    assert replace(unit, nodes=None, narrowed=True).only == replace(unit, nodes=("a.py::b",)).only == ()


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["kernels", "megatron", "long"]), st.integers(1, 4), st.integers(1, 2000)),
        max_size=30,
    ),
    labels=st.sets(st.sampled_from(["run-ci-kernels", "run-ci-megatron", "run-ci-long", "run-ci-data"])),
)
@settings(max_examples=60)
def test_no_shard_is_empty_for_any_subset_of_labels(rows: list[tuple[str, int, int]], labels: set[str]) -> None:
    tests = [
        Declaration(f"tests/e2e/test_{i:02}.py", "cuda", "stage-c-4-gpu-h200", est_time=float(est), hardware=("h200",), labels=(label,), num_gpus=gpus)
        for i, (label, gpus, est) in enumerate(rows)
    ]  # fmt: skip
    plan = of_declarations(tests, labels=tuple(labels), cadence="regular")
    chosen = {test.path for test in tests if f"run-ci-{test.labels[0]}" in labels}
    assert all(shard.units for shard in plan.shards)
    assert sorted(unit.path for shard in plan.shards for unit in shard.units) == sorted(chosen)
    assert (plan.suite("stage-c-4-gpu-h200").reason is None) == bool(chosen)


def test_the_plan_survives_a_round_trip_and_refuses_changes_and_other_plans(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "tests/e2e/test_a.py": cuda() + BOUND,
            "tests/fast/test_b.py": PLAIN,
            "tests/e2e/test_bad.py": "register_cpu_ci(",
        },
    )
    plan = plan_of(tmp_path)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert Plan.load(path, digest=plan.digest).digest == plan.digest
    other = plan_of(tmp_path, "regular")
    assert other.digest != plan.digest
    with pytest.raises(PlanMismatch, match="this shard must run plan"):
        Plan.load(path, digest=other.digest)
    data = json.loads(path.read_text())
    data["shards"][0]["units"][0]["timeout_s"] += 1
    with pytest.raises(PlanMismatch, match="altered after planning") as caught:
        plan_from_json(data)
    assert caught.value.exit_code == 5
    for text in ("", "[]", '{"schema": 2}', '{"schema": 1}', '{"schema": 3}'):
        path.write_text(text)
        with pytest.raises((UsageError, PlanMismatch)):
            Plan.load(path)


def test_the_digest_does_not_depend_on_the_order_in_which_files_were_found(tmp_path: Path) -> None:
    write_tree(tmp_path, {f"tests/e2e/test_{index}.py": cuda(est_time=str(index + 1)) for index in range(8)})
    space = workspace(tmp_path)
    scan = space.scan
    turned = Scan(
        scan.root, tuple(reversed(scan.declarations)), scan.metric_bounds, scan.errors, tuple(reversed(scan.files))
    )
    digests = set()
    for found in (scan, turned):
        catalog = build_catalog(found, space.fleet, today=TODAY)
        selection = select(catalog, space.fleet, Policy.resolve(space.fleet, "weekly"), today=TODAY)
        digests.add(build_plan(catalog, space.fleet, selection, Durations()).digest)
    assert len(digests) == 1


def test_an_unknown_suite_or_shard_is_named(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/fast/test_b.py": PLAIN})
    with pytest.raises(UsageError, match="did you mean 'stage-a-cpu'"):
        plan_of(tmp_path, suites=("stage-a-cpus",))
    plan = plan_of(tmp_path)
    with pytest.raises(UsageError, match="shard 3 of suite 'stage-a-cpu' is not part of the plan, which has 1"):
        plan.shard("stage-a-cpu", 3)
