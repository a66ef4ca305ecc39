"""Rules that need the fleet: each broken one is an error at its field, each just kept one is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from miles_ci.declare.model import Declaration, Scan
from miles_ci.metric_bound import MetricBound
from miles_ci.registry import load_fleet
from miles_ci.registry.load import read_fleet
from miles_ci.select.policy import Policy
from miles_ci.select.registrations import build_catalog, eligible_pools
from miles_ci.select.selection import select
from tests.fast.ci.helpers.trees import REPOSITORY, TODAY

FLEET = load_fleet(REPOSITORY / "registry.yaml")
GPU = Declaration(
    path="tests/e2e/test_a.py", backend="cuda", suite="stage-c-4-gpu-h200",
    hardware=("h200",), labels=("megatron",), est_time=60.0,
)  # fmt: skip


def catalog(*declarations: Declaration, bounds: tuple[MetricBound, ...] = ()):
    return build_catalog(Scan("", declarations, bounds, (), ()), FLEET, today=TODAY)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"suite": "stage-c-4-gpu-h20"}, "unknown-suite"),
        ({"labels": ()}, "missing-label"),
        ({"labels": ("megatrom",)}, "unknown-label"),
        ({"hardware": ("h20",)}, "unknown-hardware"),
        ({"hardware": ("b200",)}, "hardware-not-covered"),
        ({"num_gpus": 5}, "too-many-gpus"),
        ({"min_memory_gib": 140.0}, "too-much-memory"),
        ({"capabilities": ("fp3",)}, "unknown-capability"),
        ({"capabilities": ("mxfp4",)}, "unmet-capability"),
    ],
)
def test_a_broken_rule_is_an_error_with_its_code(changes: dict, code: str) -> None:
    found = catalog(replace(GPU, **changes))
    assert [error.code for fault in found.faults for error in fault.errors] == [code]
    assert found.registrations == ()


@pytest.mark.parametrize("changes", [{"num_gpus": 4}, {"min_memory_gib": 139.0}, {"capabilities": ("fp8",)}, {}])
def test_what_the_machines_just_offer_may_be_asked_for(changes: dict) -> None:
    found = catalog(replace(GPU, **changes))
    assert found.faults == ()
    assert [item.num_gpus for item in found.registrations] == [4]


def test_a_metric_bound_belongs_to_the_tests_that_run() -> None:
    bound = MetricBound(path=GPU.path, metric="loss", rel_up=1.0, rel_down=1.0)
    other = replace(bound, path="tests/e2e/test_b.py")
    found = catalog(GPU, replace(GPU, path=other.path, num_gpus=9), bounds=(bound, other))
    assert {path: list(items) for path, items in found.metric_bounds.items()} == {GPU.path: [bound]}


def test_a_pool_of_hardware_that_a_test_does_not_name_is_not_eligible() -> None:
    source = (REPOSITORY / "registry.yaml").read_text(encoding="utf-8")
    suite = source[source.index("  stage-c-4-gpu-h200:\n") :]
    changed = suite.replace("hardware: [h200]", "hardware: [h200, b200]", 1).replace(
        "pools: [h200-4gpu]", "pools: [h200-4gpu, b200-4gpu]", 1
    )
    fleet = read_fleet(source.replace(suite, changed).encode(), today=TODAY).fleet
    assert fleet is not None
    assert set(eligible_pools(fleet, replace(GPU, hardware=("h200", "b200")), GPU.suite)) == {"h200-4gpu", "b200-4gpu"}
    assert eligible_pools(fleet, GPU, GPU.suite) == ("h200-4gpu",)
    assert eligible_pools(fleet, replace(GPU, hardware=("b200", "h200"), min_memory_gib=178.0), GPU.suite) == (
        "b200-4gpu",
    )
    assert eligible_pools(fleet, replace(GPU, hardware=("b200", "h200"), min_memory_gib=178.5), GPU.suite) == ()


def test_an_estimate_is_missing_where_nothing_was_observed() -> None:
    unknown = replace(GPU, est_time=None)
    assert [error.code for error in catalog(unknown).errors] == ["missing-field"]
    scan = Scan("", (unknown,), (), (), ())
    assert build_catalog(scan, FLEET, observed=lambda path, suite: path == GPU.path, today=TODAY).errors == ()


def test_a_registry_without_the_suite_of_the_fast_tests_says_so_at_the_first_place_of_the_file() -> None:
    fleet = FLEET.model_copy(update={"suites": {k: v for k, v in FLEET.suites.items() if k != "stage-a-cpu"}})
    test = Declaration(path="tests/fast/test_a.py", backend="cpu", suite="stage-a-cpu", implicit=True)
    found = build_catalog(Scan("", (test,), (), (), ()), fleet, today=TODAY)
    (error,) = found.errors
    assert (error.path, error.line, error.column, error.code) == (test.path, 1, 1, "unknown-suite")
    assert found.registrations == ()


@pytest.mark.parametrize(
    ("changes", "needs"),
    [({"capabilities": ("mxfp4", "rdma")}, "mxfp4, rdma"), ({"min_memory_gib": 500.0}, "the memory it asks for")],
)
def test_a_test_that_no_pool_can_take_is_excluded_with_what_it_needs(changes: dict, needs: str) -> None:
    sound = catalog(GPU)
    asks = replace(sound.registrations[0], declaration=replace(GPU, **changes))
    found = select(replace(sound, registrations=(asks,)), FLEET, Policy.resolve(FLEET, "weekly"), today=TODAY)
    (excluded,) = found.excluded
    assert [(reason.code, reason.text) for reason in excluded.reasons] == [
        ("no-hardware", f"no pool of the suite offers {needs}")
    ]
