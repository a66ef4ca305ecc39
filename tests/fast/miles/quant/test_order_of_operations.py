"""Each listed association matters: replacing it changes a golden file, so the golden tests can fail."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

GOLDEN = Path(__file__).resolve().parent / "golden" / "nvfp4.safetensors"
MUTANT_COUNT = 17


@pytest.fixture(scope="module")
def cases(golden) -> list[tuple[np.ndarray, float, dict[str, torch.Tensor]]]:
    with safe_open(GOLDEN, "np") as f:
        maxima = json.loads(f.metadata()["maxima"])
    file = golden("nvfp4")
    return [
        (file[f"{i}/x"].float().numpy(), amax, {k[len(f"{i}/") :]: v for k, v in file.items() if k.startswith(f"{i}/")})
        for i, amax in enumerate(maxima)
    ]


def name_of(options: dict) -> str:
    if not options.get("four_over_six"):
        return "standard"
    return f"4over6-{options.get('e', 448)}-{'MSE' if options.get('mse') else 'MAE'}-{'fp16' if options.get('fp16') else 'exact'}"


def differing_cases(numpy_nvfp4, cases, options: dict, steps: dict) -> int:
    count = 0
    for x, amax, file in cases:
        got = numpy_nvfp4.NVFP4(**options, steps=steps)(x, amax)
        count += any(
            not np.array_equal(
                got[key].view(np.uint8),
                file[f"{name_of(options)}/{key}"].numpy().view(np.uint8).reshape(got[key].view(np.uint8).shape),
            )
            for key in ("codes", "scale", "s_dec", "y")
        )
    return count


def test_the_unchanged_order_gives_the_golden_files(numpy_nvfp4, cases) -> None:
    for options in ({}, {"four_over_six": True}, {"four_over_six": True, "mse": True, "fp16": True}):
        assert differing_cases(numpy_nvfp4, cases, options, {}) == 0


def test_every_mutant_changes_a_golden(numpy_nvfp4, cases) -> None:
    alive = [
        name
        for name, (options, steps) in numpy_nvfp4.MUTANTS.items()
        if differing_cases(numpy_nvfp4, cases, options, steps) == 0
    ]
    assert alive == []
    assert len(numpy_nvfp4.MUTANTS) == MUTANT_COUNT
