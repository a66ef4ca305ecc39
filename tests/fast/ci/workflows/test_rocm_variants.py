"""Every AMD variant is listed, both files exist, TP and PP agree, and it fits four GPUs."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import yaml

from miles_ci.declare.tree import scan_tree
from miles_ci.registry import load_fleet

ROOT = Path(__file__).resolve().parents[4]
VARIANTS = yaml.safe_load((ROOT / "tests/rocm/variants.yaml").read_text())["variants"]
AXES = {"tp", "pp", "cp", "dp"}


def parallel(path: str) -> dict[str, int]:
    """The literal PARALLEL of a test file, read without importing it."""
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.Assign) and [target.id for target in node.targets if isinstance(target, ast.Name)] == [
            "PARALLEL"
        ]:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} has no PARALLEL")


def test_every_amd_test_is_listed_exactly_once() -> None:
    present = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/rocm").glob("test_amd_*.py"))
    assert sorted(entry["amd"] for entry in VARIANTS) == present
    assert present


@pytest.mark.parametrize("entry", VARIANTS, ids=lambda entry: entry["amd"])
def test_a_variant_keeps_tp_and_pp_gives_up_what_it_says_and_fits_four_gpus(entry: dict) -> None:
    assert set(entry) == {"cuda", "amd", "kept", "dropped"}
    assert (ROOT / entry["cuda"]).is_file()
    cuda, amd = parallel(entry["cuda"]), parallel(entry["amd"])
    assert set(cuda) == set(amd) == AXES
    assert {"tp", "pp"} <= set(entry["kept"])
    assert all(cuda[axis] == amd[axis] for axis in entry["kept"])
    assert all(cuda[axis] > amd[axis] == 1 for axis in entry["dropped"])
    assert set(entry["dropped"]) <= {"cp", "dp"}
    assert (math.prod(cuda.values()), math.prod(amd.values())) == (8, 4)


def test_the_registrations_agree_with_the_layouts() -> None:
    fleet = load_fleet(ROOT / "registry.yaml")
    declared = {item.path: item for item in scan_tree(ROOT).declarations}
    for entry in VARIANTS:
        cuda, amd = declared[entry["cuda"]], declared[entry["amd"]]
        assert (cuda.backend, cuda.num_gpus) == ("cuda", 8)
        assert (amd.backend, amd.num_gpus) == ("rocm", 4)
        assert fleet.suites[amd.suite].gpus == 4
        assert cuda.labels == amd.labels
