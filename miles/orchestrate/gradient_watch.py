"""Steps in a row from which nothing can be learned: every group's rewards equal, or a step that was skipped.

Such a run goes on and ends without an error; the person who watches is told. A recipe that wants more than a warning
bounds `train/steps_without_gradient` in `expect`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles.algos.config import AlgoConfig

METRIC = "train/steps_without_gradient"
# Rewards are equal when they differ by no more, as for the advantages.
EQUAL = 1e-8


def reason_without_gradient(row: Mapping[str, Any], *, within_groups: bool) -> str | None:
    """Why the step of this row carried no gradient of its rewards; None when it did."""
    if row.get("train/nonfinite_tokens"):
        return f"skipped, {row['train/nonfinite_tokens']:.0f} tokens had values that are not finite"
    mean = row["rollout/reward_mean"]
    if row["rollout/reward_std"] <= EQUAL:
        return f"every sample had the reward {mean:.3f}"
    if within_groups and row["rollout/zero_std_frac"] >= 1.0:
        return f"the samples of each group had equal rewards (mean {mean:.3f})"
    if row["train/step_skipped"]:
        return "skipped, no sample counted"
    return None


class GradientWatch:
    """Counts them and calls `warn` when there are `limit` in a row, and each time that their number has doubled."""

    def __init__(
        self, algo: AlgoConfig, limit: int, warn: Callable[[str], None], earlier: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """`earlier`: the rows of the steps before a resume."""
        self._limit, self._warn = limit, warn
        # Others than these learn from differences between groups too.
        self._within_groups = algo.declared_advantage.groups
        # A supervised loss and a teacher's answers have a gradient whatever the rewards are.
        self._acts = algo.declared_loss.advantages and not algo.needs_teacher
        self._count = int(earlier[-1].get(METRIC, 0)) if earlier else 0
        self._next = limit
        while self._next <= self._count:
            self._next *= 2

    def see(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Take note of a finished step's row; the metric to add to it."""
        if not self._acts:
            return {}
        reason = reason_without_gradient(row, within_groups=self._within_groups)
        self._count = 0 if reason is None else self._count + 1
        if reason is None:
            self._next = self._limit
        elif self._count >= self._next:
            self._next *= 2
            self._warn(_text(self._count, reason, row))
        return {METRIC: float(self._count)}


def _text(count: int, reason: str, row: Mapping[str, Any]) -> str:
    step, truncated, errors = row["step"], row["rollout/truncated_frac"], row["rollout/reward_errors"]
    return (
        f"{count} steps in a row carried no gradient (step {step}: {reason}). Look at rollout.reward ({errors:.0f} errors "
        f"in this step) and at whether its answers can be reached: {truncated:.0%} of the responses were cut at "
        "rollout.max_new_tokens, rollout.temperature makes them differ, data.task may be too hard or too easy"
    )
