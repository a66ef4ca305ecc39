"""One rule for the dtypes of trainer and engine: equal, or told with the size of the gap; under a contract, equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from miles.recipe.schema import Recipe

ENGINE_DTYPE = {"fp32": "float32", "bf16": "bfloat16"}
GAP, LARGEST_GAP = "mismatch/abs_diff_mean", "mismatch/abs_diff_max"


def differ(recipe: Recipe) -> bool:
    """Trainer and engine compute in different dtypes. Given answers need no engine."""
    return not recipe.supervised and ENGINE_DTYPE[recipe.train.precision] != recipe.engine.dtype


def objections(recipe: Recipe) -> Iterator[tuple[Literal["error", "warning"], str, str]]:
    """(severity, what is wrong, what to do)."""
    if not differ(recipe):
        return
    wanted = ENGINE_DTYPE[recipe.train.precision]
    message = f"train.precision is {recipe.train.precision} but engine.dtype is {recipe.engine.dtype}"
    fix = f"set engine.dtype={wanted}"
    if recipe.quant.fake_qat != "none" or recipe.engine.nvfp4_experts is not None:
        yield "error", f"{message}: under a quantisation contract both must hold the same decoded weights", fix
        return
    corrected = recipe.algo.correction.active or recipe.algo.correction.bypass
    yield (
        "warning",
        f"{message}: the engine draws from a policy that differs by rounding from the one that is trained; the first "
        f"step measures by how much ({GAP}) and the run says it",
        fix if corrected else f"{fix}, or correct for it with algo.correction.mode=truncate",
    )


def measured_gap(recipe: Recipe, row: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> str | None:
    """The warning with the gap's size at the first step that measured it; None afterwards, and where dtypes agree."""
    if not differ(recipe) or GAP not in row or any(GAP in before for before in earlier):
        return None
    return (
        f"log-probs of the engine ({recipe.engine.dtype}) and of the trainer (train.precision {recipe.train.precision}) "
        f"differ by {row[GAP]:.2g} on average and {row[LARGEST_GAP]:.2g} at most in step {row['step']} ({GAP}, "
        f"{LARGEST_GAP})"
    )
