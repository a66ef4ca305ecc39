"""The metrics that a step can report: what `expect` and `quant.gates` may name, and which may be negative.

A test compares this table with the names that the components write. Some are reported only where they are measured
(`train/value_loss` with a critic, `rollout/staleness_max` with stale samples); a rule of the recipe knows which.
"""

from __future__ import annotations

from miles.config.names import suggestion

REFUSED = "rollout/refused/"
# Parts of a reward that is a mapping; users name them, and they may be negative.
REWARD_PARTS = "rollout/reward/"

_NEVER_NEGATIVE = {
    "rollout": (
        "aborted_frac dropped_stale prefix_cached_frac resubmitted_aborted response_length_max response_length_mean "
        "response_tokens reward_errors reward_std samples staleness_max staleness_mean surplus_groups tokens_per_s "
        "truncated_frac waves zero_std_frac"
    ),
    "train": (
        "approx_kl clip_frac_high clip_frac_low entropy ess grad_norm lr nonfinite_tokens optimizer_steps ratio_mean "
        "step_skipped steps_without_gradient value_grad_norm value_loss"
    ),
    "mismatch": "abs_diff_max abs_diff_mean k3 rejected_frac support_mass_mean support_mass_min w_mean w_p99",
    "data": "balance_max_over_mean dropped_rollouts dummy_micro_batches oversized_samples padding_share",
    "time": "prepare rollout score step sync train",
}
# Rewards, differences of log-probs, estimators that are negative on some samples, and losses made of them.
_SIGNED = {
    "rollout": "reward_mean reward_mean_all",
    "train": "kl kl_loss loss pg_loss ppo_kl teacher_kl",
}


def _names(table: dict[str, str]) -> frozenset[str]:
    return frozenset(f"{group}/{name}" for group, names in table.items() for name in names.split())


SIGNED = _names(_SIGNED)
METRICS = _names(_NEVER_NEGATIVE) | SIGNED


def signed(name: str) -> bool | None:
    """Whether a metric may be negative; None for a name that no step reports. Counts of filters are not."""
    return name in SIGNED or name.startswith(REWARD_PARTS) if fault(name) is None else None


def fault(name: str) -> str | None:
    """Why no step can report `name`; None for a metric. Filters and reward functions name their own below `rollout/refused/` and
    `rollout/reward/`."""
    if name in METRICS or any(name.startswith(users) and name != users for users in (REFUSED, REWARD_PARTS)):
        return None
    if name.startswith("eval/"):
        return "is measured now and then, and a gate needs its metric in every step; bound it in expect"
    same = sorted(metric for metric in METRICS if metric.partition("/")[2] == name.rpartition("/")[2])
    hint = f"did you mean {' or '.join(same)}?" if same else suggestion(name, METRICS)
    return f"is no metric that a step reports; {hint}"
