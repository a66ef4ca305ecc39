"""Every registration is included or excluded exactly once, with all its reasons and the deciding line."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_ci.declare.model import Declaration, Exemption, Scan
from miles_ci.errors import Diagnostic
from miles_ci.registry import Fleet, load_fleet
from miles_ci.registry.load import read_fleet
from miles_ci.select.affected import Affected
from miles_ci.select.policy import CADENCES, Policy
from miles_ci.select.registrations import Fault, build_catalog
from miles_ci.select.selection import REASONS, select
from tests.fast.ci.helpers.trees import REPOSITORY, TODAY, cpu, cuda, workspace, write_tree

SOURCE = (REPOSITORY / "registry.yaml").read_text(encoding="utf-8")
FLEET = load_fleet(REPOSITORY / "registry.yaml")
OFF = '    disabled: {reason: "node is being re-imaged", issue: "#1", until: 2026-12-24}\n'


def fleet_without(*pools: str) -> Fleet:
    text = SOURCE
    for pool in pools:
        text = text.replace(f"  {pool}:\n", f"  {pool}:\n{OFF}", 1)
    found = read_fleet(text.encode(), today=TODAY).fleet
    assert found is not None
    return found


def gpu(path: str = "tests/e2e/test_a.py", suite: str = "stage-c-4-gpu-h200", **fields: object) -> Declaration:
    values: dict = {"hardware": ("h200",), "labels": ("megatron",), "est_time": 60.0, **fields}
    return Declaration(path=path, backend=fields.pop("backend", "cuda"), suite=suite, **values)  # type: ignore[arg-type]


def choose(
    *declarations: Declaration,
    fleet: Fleet = FLEET,
    cadence: str = "weekly",
    labels: tuple[str, ...] = (),
    affected: Affected | None = None,
    errors: tuple[Diagnostic, ...] = (),
):
    scan = Scan("", declarations, (), errors, ())
    catalog = build_catalog(scan, fleet, today=TODAY)
    return select(catalog, fleet, Policy.resolve(fleet, cadence, labels), affected=affected, today=TODAY)


def codes(selection) -> list[tuple[str, ...]]:
    return [tuple(reason.code for reason in item.reasons) for item in selection.excluded]


def test_each_reason_is_given() -> None:
    unaffected = Affected(False, "", frozenset())
    disabled = Exemption("fails on the new driver", "#1", "2026-12-24")
    fault = Diagnostic("tests/e2e/test_x.py", 3, 1, "not-declared", "declares no suite")
    assert codes(choose(gpu(nightly=True), cadence="regular", labels=("run-ci-megatron",))) == [("cadence",)]
    assert codes(choose(gpu(), cadence="regular")) == [("label",)]
    cpu_test = Declaration(path="tests/fast/test_a.py", backend="cpu", suite="stage-a-cpu", est_time=1.0)
    assert codes(choose(cpu_test, cadence="regular", affected=unaffected)) == [("unaffected",)]
    assert codes(choose(gpu(disabled=disabled))) == [("disabled-test",)]
    assert codes(choose(gpu(), fleet=fleet_without("h200-4gpu"))) == [("disabled-pool",)]
    assert codes(choose(errors=(fault,))) == [("declaration-error",)]


def test_a_test_whose_needs_only_a_disabled_pool_meets_is_told_so() -> None:
    text = SOURCE.replace("pools: [h200-4gpu]", "pools: [h200-4gpu, h200-8gpu]", 1)
    text = text.replace("  h200-8gpu:\n", f"  h200-8gpu:\n{OFF}", 1)
    fleet = read_fleet(text.encode(), today=TODAY).fleet
    assert fleet is not None
    found = choose(gpu(capabilities=("rdma",)), fleet=fleet)
    assert codes(found) == [("disabled-pool",)]
    assert "h200-8gpu" in found.excluded[0].reasons[0].text


def test_all_reasons_are_given_the_deciding_one_first() -> None:
    disabled = Exemption("fails on the new driver", "#1", "2026-12-24")
    found = choose(gpu(nightly=True, disabled=disabled), cadence="regular", fleet=fleet_without("h200-4gpu"))
    assert codes(found) == [("cadence", "label", "disabled-pool", "disabled-test")]


def test_a_requested_label_overrides_unaffected() -> None:
    unaffected = Affected(False, "", frozenset())
    chosen = choose(gpu(), cadence="regular", labels=("run-ci-megatron",), affected=unaffected)
    assert [item.registration.path for item in chosen.included] == ["tests/e2e/test_a.py"]


def test_everything_affected_is_told_as_a_warning() -> None:
    found = choose(gpu(), cadence="regular", affected=Affected(True, "x.bin is unknown"))
    assert any("x.bin is unknown" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("cadence", "outcome"),
    [("regular", "excluded"), ("nightly", "unstable"), ("weekly", "unstable"), ("release", "excluded")],
)
def test_a_disabled_test_whose_date_has_passed_runs_as_unstable_at_night_only(cadence: str, outcome: str) -> None:
    passed = Exemption("fails on the new driver", "#1", "2026-11-20")
    found = choose(gpu(disabled=passed, owner="training"), cadence=cadence, labels=("run-ci-megatron",))
    if outcome == "excluded":
        assert codes(found) == [("disabled-test",)]
        assert any("still excluded" in warning for warning in found.warnings)
    else:
        assert found.included[0].unstable == "fails on the new driver"
        assert found.included[0].notify is not None
        assert found.included[0].notify.startswith("training: ")


@pytest.mark.parametrize(("until", "passed"), [("2026-11-29", True), (TODAY.isoformat(), False)])
@pytest.mark.parametrize("cadence", ["regular", "weekly"])
def test_the_last_day_of_an_exemption_still_counts(cadence: str, until: str, passed: bool) -> None:
    labels = ("run-ci-megatron",)
    switch = Exemption("fails on the new driver", "#1", until)
    disabled = choose(gpu(disabled=switch), cadence=cadence, labels=labels)
    runs = passed and cadence == "weekly"
    assert (len(disabled.included), len(disabled.excluded)) == ((1, 0) if runs else (0, 1))
    assert any("has passed" in text for text in disabled.warnings) == (passed and not runs)
    unstable = choose(gpu(unstable=switch), cadence=cadence, labels=labels)
    assert any("has passed" in text for text in unstable.warnings) == passed
    assert (unstable.included[0].notify is not None) == passed


def test_an_unstable_test_runs_and_carries_its_reason() -> None:
    unstable = Exemption("loss diverges now and then", "#1", "2026-12-24")
    found = choose(gpu(unstable=unstable))
    assert (found.included[0].unstable, found.included[0].notify) == ("loss diverges now and then", None)


def test_weekly_sends_a_test_to_each_other_architecture_it_names() -> None:
    found = choose(gpu(hardware=("hopper", "b200"), num_gpus=2))
    assert [(item.registration.suite, item.registration.home) for item in found.included] == [
        ("stage-c-4-gpu-b200", False),
        ("stage-c-4-gpu-h200", True),
    ]
    assert [
        item.registration.suite for item in choose(gpu(hardware=("hopper", "b200")), cadence="nightly").included
    ] == ["stage-c-4-gpu-h200"]


def test_a_placement_takes_the_smallest_suite_that_offers_the_capabilities() -> None:
    blackwell = gpu(suite="stage-c-4-gpu-b200", hardware=("b200", "hopper"), num_gpus=2)
    assert "stage-b-2-gpu-h200" in [item.registration.suite for item in choose(blackwell).included]
    needs_rdma = replace(blackwell, capabilities=("nvlink", "bf16"), num_gpus=3)
    assert "stage-c-4-gpu-h200" in [item.registration.suite for item in choose(needs_rdma).included]
    only_blackwell = replace(blackwell, capabilities=("nvfp4",))
    assert [item.registration.suite for item in choose(only_blackwell).included] == ["stage-c-4-gpu-b200"]


def test_a_file_that_declares_both_suites_is_not_sent_twice() -> None:
    both = [gpu(hardware=("hopper", "b200")), gpu(suite="stage-c-4-gpu-b200", hardware=("b200", "hopper"))]
    suites = [item.registration.suite for item in choose(*both).included]
    assert sorted(suites) == ["stage-c-4-gpu-b200", "stage-c-4-gpu-h200"]


SUITES = [suite for suite in FLEET.suites if FLEET.suites[suite].backend != "cpu"]


@st.composite
def declarations(draw: st.DrawFn) -> list[Declaration]:
    found = []
    for index in range(draw(st.integers(0, 12))):
        suite_id = draw(st.sampled_from(["stage-a-cpu", "stage-b-cpu", *SUITES, "stage-x"]))
        suite = FLEET.suites.get(suite_id)
        backend = suite.backend if suite else "cpu"
        until = draw(st.sampled_from(["2026-11-01", "2026-11-25", "2026-12-24", "2027-09-09"]))
        switch = Exemption("a reason of length", "#1", until)
        is_gpu = backend != "cpu"
        hardware = (
            draw(st.sampled_from([tuple(suite.hardware), ("hopper", "b200"), ("h20",)])) if is_gpu and suite else ()
        )
        found.append(
            Declaration(
                path=f"tests/e2e/test_{draw(st.integers(0, 8))}.py",
                backend=backend,
                suite=suite_id,
                est_time=draw(st.sampled_from([None, 10.0])),
                hardware=hardware,
                num_gpus=draw(st.sampled_from([None, 1, 4, 9])) if is_gpu else None,
                labels=tuple(draw(st.sets(st.sampled_from(["kernels", "long", "ft-long", "nope"]), max_size=2))),
                nightly=draw(st.booleans()),
                disabled=switch if draw(st.booleans()) else None,
                unstable=switch if draw(st.booleans()) else None,
                capabilities=tuple(draw(st.sets(st.sampled_from(["rdma", "fp8"]), max_size=1))) if is_gpu else (),
                line=index + 1,
            )
        )
    unique = {(item.path, item.suite): item for item in found}
    return list(unique.values())


FLEETS = [FLEET, fleet_without("h200-4gpu", "b200-4gpu"), fleet_without(*FLEET.pools)]


@given(
    found=declarations(),
    cadence=st.sampled_from(CADENCES),
    labels=st.sets(st.sampled_from(["run-ci-all", "run-ci-image", "nightly", "run-ci-long", "run-ci-kernels", "x"])),
    hit=st.none() | st.sets(st.sampled_from([f"tests/e2e/test_{index}.py" for index in range(9)])),
    fleet=st.sampled_from(FLEETS),
)
@settings(max_examples=120)
def test_included_and_excluded_partition_what_was_scanned(
    found: list[Declaration], cadence: str, labels: set[str], hit: set[str] | None, fleet: Fleet
) -> None:
    scan = Scan("", tuple(found), (), (), ())
    catalog = build_catalog(scan, fleet, today=TODAY)
    affected = None if hit is None else Affected(False, "", frozenset(hit))
    chosen = select(catalog, fleet, Policy.resolve(fleet, cadence, labels), affected=affected, today=TODAY)
    included = [item.registration.id for item in chosen.included]
    excluded = [item.item.id for item in chosen.excluded]
    assert len(set(included)) == len(included)
    assert len(set(excluded)) == len(excluded)
    assert not set(included) & set(excluded)
    home = {item.registration.id for item in chosen.included if item.registration.home}
    home |= {item.item.id for item in chosen.excluded if isinstance(item.item, Fault) or item.item.home}
    assert home == {item.id for item in catalog.registrations} | {fault.id for fault in catalog.faults}
    # Every declaration is a registration or belongs to a faulty file.
    faulty = {fault.path for fault in catalog.faults}
    assert {(item.path, item.suite) for item in found if item.path not in faulty} == {
        (item.path, item.suite) for item in catalog.registrations
    }
    for item in chosen.excluded:
        assert item.reasons
        assert all(reason.code in REASONS and reason.text for reason in item.reasons)
    for chosen_item in chosen.included:
        if chosen_item.registration.backend != "cpu":
            assert chosen_item.pools
            assert all(fleet.pools[name].disabled is None for name in chosen_item.pools)


def test_a_missing_estimate_is_an_error_until_three_durations_are_known(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/e2e/test_a.py": cpu(est_time="None")})
    assert [error.code for error in workspace(tmp_path).catalog.errors] == ["missing-field"]
    name = "tests/e2e/test_a.py|stage-b-cpu|cpu"
    for count, errors in ((2, 1), (3, 0)):
        table = f'{{"schema": 1, "tests": {{"{name}": {{"ms": 5, "n": {count}, "last": "2026-11-30"}}}}}}'
        write_tree(tmp_path, {"tests/durations.json": table})
        assert len(workspace(tmp_path).catalog.errors) == errors


def test_split_is_refused_where_the_suite_does_not_split(tmp_path: Path) -> None:
    write_tree(tmp_path, {"tests/e2e/test_a.py": cuda(split="True"), "tests/e2e/test_b.py": cpu(split="True")})
    catalog = workspace(tmp_path).catalog
    assert [(error.path, error.code) for error in catalog.errors] == [("tests/e2e/test_a.py", "split-refused")]


def test_a_day_exactly_90_ahead_is_allowed_and_one_more_is_not() -> None:
    for until, count in (("2027-02-28", 0), ("2027-03-01", 1)):
        assert (date.fromisoformat(until) - TODAY).days == 90 + count
        scan = Scan("", (gpu(disabled=Exemption("a reason of length", "#1", until)),), (), (), ())
        assert len(build_catalog(scan, FLEET, today=TODAY).errors) == count


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"est_time": "1000000"}, "est_time: 1e+06 s exceeds test_timeout_s 1800 of the suite"),
        ({"est_time": "1800.5"}, "est_time: 1800.5 s exceeds"),
        ({"est_time": "60", "timeout": "30"}, "timeout: 30 s is less than est_time 60 s"),
        ({"est_time": "1800"}, None),
        ({"est_time": "60", "timeout": "60"}, None),
    ],
)
def test_a_test_must_be_able_to_take_as_long_as_it_says(tmp_path: Path, fields: dict, words: str | None) -> None:
    space = workspace(write_tree(tmp_path, {"tests/e2e/test_a.py": cpu(**fields)}))
    assert [error.code for error in space.catalog.errors] == ([] if words is None else ["out-of-range"])
    assert all(str(words) in error.message for error in space.catalog.errors)
