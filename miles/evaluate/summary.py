"""The numbers of one evaluated set, and their names: `eval/<set>/<metric>`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles.config.names import suggestion
from miles.data.sample import Sample, Status
from miles.evaluate.config import EvalConfig, EvalSet
from miles.evaluate.estimators import best_of_k, pass_at_k, sizes
from miles.rollout.errors import RolloutError

PREFIX = "eval/"
MEAN = "reward_mean"


def summarise(chosen: EvalSet, groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Means over prompts; a sample without a reward counts as 0 and as unsolved. Lengths are in tokens."""
    tables = [_by_rollout(chosen, group) for group in groups]
    rewards = [[rollout[0].reward or 0.0 for rollout in table] for table in tables]
    every = [rollout for table in tables for rollout in table]
    lengths = [sum(sample.response_length for sample in rollout) for rollout in every]
    solved = [sum(reward >= chosen.solved_at for reward in row) for row in rewards]
    n = chosen.samples_per_prompt
    found = {
        MEAN: float(np.mean(rewards)),
        **{f"pass_at_{k}": float(np.mean([pass_at_k(n, count, k) for count in solved])) for k in sizes(n)},
        **{f"best_of_{k}": float(np.mean([best_of_k(row, k) for row in rewards])) for k in sizes(n) if k > 1},
        "response_length_mean": float(np.mean(lengths)),
        "truncated_frac": float(np.mean([rollout[-1].status == Status.TRUNCATED for rollout in every])),
        "unjudged_frac": float(np.mean([rollout[0].reward is None for rollout in every])),
        "prompts": float(len(groups)),
    }
    return {f"{PREFIX}{chosen.name}/{name}": value for name, value in found.items()}


def _by_rollout(chosen: EvalSet, group: Sequence[Sample]) -> list[list[Sample]]:
    """The segments of each rollout, which share one reward."""
    found: dict[int, list[Sample]] = {}
    for sample in group:
        found.setdefault(sample.rollout_id, []).append(sample)
    if len(found) != chosen.samples_per_prompt:
        raise RolloutError(
            f"eval.sets {chosen.name}: a prompt has {len(found)} rollouts, asked were {chosen.samples_per_prompt}; the "
            "generate function must return every sample that it was given"
        )
    return list(found.values())


def metric_names(chosen: EvalSet) -> list[str]:
    """What `summarise` reports for the set."""
    ks = sizes(chosen.samples_per_prompt)
    names = [MEAN, *(f"pass_at_{k}" for k in ks), *(f"best_of_{k}" for k in ks if k > 1)]
    names += ["response_length_mean", "truncated_frac", "unjudged_frac", "prompts"]
    return [f"{PREFIX}{chosen.name}/{name}" for name in names]


def fault(name: str, config: EvalConfig) -> str | None:
    """Why no evaluation of this configuration reports `name`; None for one of its metrics."""
    names = [metric for chosen in config.sets for metric in metric_names(chosen)]
    if name in names:
        return None
    return (
        f"is no metric of eval.sets; {suggestion(name, names)}"
        if names
        else "is measured by no set; add one to eval.sets"
    )


def better_when_higher(name: str, config: EvalConfig) -> str:
    """The metric that `eval/<set>` or `eval/<set>/<metric>` ranks checkpoints by. `ValueError` for one that cannot."""
    metrics = [metric for chosen in config.sets for metric in metric_names(chosen)]
    able = [metric for metric in metrics if metric.rpartition("/")[2].startswith((MEAN, "pass_at_", "best_of_"))]
    sets = [f"{PREFIX}{chosen.name}" for chosen in config.sets]
    if name in sets:
        return f"{name}/{MEAN}"
    if name in able:
        return name
    if name in metrics:
        raise ValueError(f"{name} does not say which checkpoint is best; use one of {', '.join([*sets, *able])}")
    hint = suggestion(name, [*sets, *able]) if sets else "add a set to eval.sets"
    raise ValueError(f"{name} is no set of eval.sets; {hint}")


def said(metrics: dict[str, float]) -> str:
    """One line for a person: the mean reward and the largest pass@k of each set."""
    sets: dict[str, dict[str, float]] = {}
    for metric, value in metrics.items():
        name, _, kind = metric.removeprefix(PREFIX).partition("/")
        sets.setdefault(name, {})[kind] = value
    parts = []
    for name, values in sets.items():
        k = max(int(kind.removeprefix("pass_at_")) for kind in values if kind.startswith("pass_at_"))
        parts.append(f"{name} reward {values[MEAN]:.3f} pass@{k} {values[f'pass_at_{k}']:.3f}")
    return ", ".join(parts)
