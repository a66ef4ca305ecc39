"""The metrics that a step can report: what `expect` may name.

A test compares this list with the names that the components write. Reported only where they are measured: `train/kl*`,
`train/value*`, `train/teacher_kl`, `mismatch/support_mass_*`, `rollout/staleness_*` and the like.
"""

from __future__ import annotations

from miles.config.names import suggestion

REFUSED = "rollout/refused/"

_BY_GROUP = {
    "rollout": (
        "aborted_frac dropped_stale prefix_cached_frac resubmitted_aborted response_length_max response_length_mean "
        "response_tokens reward_errors reward_mean reward_mean_all reward_std samples staleness_max staleness_mean "
        "surplus_groups tokens_per_s truncated_frac waves zero_std_frac"
    ),
    "train": (
        "approx_kl clip_frac_high clip_frac_low entropy ess grad_norm kl kl_loss loss lr nonfinite_tokens "
        "optimizer_steps pg_loss ppo_kl ratio_mean step_skipped teacher_kl value_grad_norm value_loss"
    ),
    "mismatch": "abs_diff_max abs_diff_mean k3 rejected_frac support_mass_mean support_mass_min w_mean w_p99",
    "data": "balance_max_over_mean dropped_rollouts dummy_micro_batches oversized_samples padding_share",
    "time": "rollout step sync train",
}
METRICS = frozenset(f"{group}/{name}" for group, names in _BY_GROUP.items() for name in names.split())


def fault(name: str) -> str | None:
    """Why no step can report `name`; None for a metric. Filters name their own below `rollout/refused/`."""
    if name in METRICS or (name.startswith(REFUSED) and name != REFUSED):
        return None
    if name.startswith("eval/"):
        return "is measured once after the last step, and expect judges what steps report"
    same = sorted(metric for metric in METRICS if metric.partition("/")[2] == name.rpartition("/")[2])
    hint = f"did you mean {' or '.join(same)}?" if same else suggestion(name, METRICS)
    return f"is no metric that a step reports; {hint}"
