"""Trainer and engine in different dtypes: a warning, an error under a contract, and the measured size once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from miles.recipe.dtype_rules import differ, measured_gap, objections
from miles.recipe.schema import Recipe


def recipe(precision: str = "fp32", dtype: str = "float32", **sections: Any) -> Recipe:
    engine = {"dtype": dtype, **sections.pop("engine", {})}
    return Recipe.model_validate_json(
        json.dumps({"name": "r", "train": {"precision": precision}, "engine": engine, **sections})
    )


@pytest.mark.parametrize(
    ("precision", "dtype", "wanted"),
    [
        ("fp32", "float32", None),
        ("bf16", "bfloat16", None),
        ("fp32", "bfloat16", "float32"),
        ("bf16", "float32", "bfloat16"),
    ],
)
def test_unequal_dtypes_are_a_warning_that_names_the_equal_one(precision, dtype, wanted):
    found = list(objections(recipe(precision, dtype)))
    assert differ(recipe(precision, dtype)) is (wanted is not None)
    if wanted is None:
        assert found == []
        return
    ((severity, message, fix),) = found
    assert severity == "warning"
    assert f"train.precision is {precision} but engine.dtype is {dtype}" in message
    assert fix == f"set engine.dtype={wanted}, or correct for it with algo.correction.mode=truncate"


@pytest.mark.parametrize("correction", [{"mode": "truncate"}, {"bypass": True}])
def test_a_run_that_corrects_is_not_told_to(correction):
    ((_, _, fix),) = objections(recipe("fp32", "bfloat16", algo={"correction": correction}))
    assert fix == "set engine.dtype=float32"


@pytest.mark.parametrize("sections", [{"quant": {"fake_qat": "nvfp4", "nvfp4": {}}}, {"engine": {"nvfp4_experts": {}}}])
def test_a_quantisation_contract_asks_for_equal_dtypes(sections):
    ((severity, message, fix),) = objections(recipe("fp32", "bfloat16", **sections))
    assert (severity, fix) == ("error", "set engine.dtype=float32")
    assert "both must hold the same decoded weights" in message
    assert list(objections(recipe("bf16", "bfloat16", **sections))) == []


def test_the_gap_is_told_once_with_its_size_by_the_first_step_that_measured_it():
    unequal = recipe("fp32", "bfloat16")
    skipped = {"step": 0, "train/step_skipped": 1.0}
    row = {"step": 1, "mismatch/abs_diff_mean": 0.00312, "mismatch/abs_diff_max": 0.05}
    assert measured_gap(unequal, skipped, []) is None
    said = measured_gap(unequal, row, [skipped])
    assert said is not None
    assert "(bfloat16)" in said
    assert "differ by 0.0031 on average and 0.05 at most in step 1 (mismatch/abs_diff_mean" in said
    assert measured_gap(unequal, row, [skipped, row]) is None
    assert measured_gap(recipe(), row, []) is None
