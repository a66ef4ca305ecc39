"""One row of metrics for a rollout that was trained in several optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

# How a metric of several steps becomes one number; all others are averaged.
_OTHERWISE: dict[str, Callable[[list[float]], float]] = {
    "mismatch/abs_diff_max": max,
    "mismatch/support_mass_min": min,
    "train/lr": lambda values: values[-1],
    "train/nonfinite_tokens": sum,
}
# Why a step was skipped: told even when others changed the weights.
_OF_ALL_STEPS = ("train/nonfinite_tokens",)


def merge_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of the steps that changed the weights, merged; `train/step_skipped` is 1 when none did.

    Tokens that were not finite are counted in all steps. With more than one step `train/optimizer_steps` says how many
    changed the weights.
    """
    if len(steps) == 1:
        return dict(steps[0])
    trained = [step for step in steps if not step["train/step_skipped"]]
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for step in (*(trained or steps), *steps) for name in step):
        counted = steps if name in _OF_ALL_STEPS else trained or steps
        values = [step[name] for step in counted if name in step]
        if values:
            merged[name] = _OTHERWISE.get(name, lambda found: sum(found) / len(found))(values)
    return {**merged, "train/optimizer_steps": float(len(trained))}
