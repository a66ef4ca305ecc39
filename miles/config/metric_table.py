"""The one list of metrics: name, unit, meaning. `docs/reference/metrics.md` is made of it.

A metric that a component writes and this list lacks fails a test; a run tells it once and goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

# Names below these are a filter's or a user's own; `rollout/reward/` may be negative.
HELD_OUT_LOSS = "eval/held_out/loss"
REFUSED = "rollout/refused/"
REWARD_PARTS = "rollout/reward/"


@dataclass(frozen=True, slots=True)
class Metric:
    """`unit` as the page shows it; `signed`: may be negative; `when`: what a recipe must have for steps to report it."""

    name: str
    unit: str
    meaning: str
    signed: bool = False
    when: str = ""


COLUMNS = (
    Metric("step", "count", "which step, from 0; the evaluation after the last step has the number of steps"),
    Metric("weight_version", "count", "version of the weights that the engines serve after the step"),
)

STEP = (
    Metric("rollout/reward_mean", "reward", "mean reward of the samples that are trained on", signed=True),
    Metric("rollout/reward_std", "reward", "standard deviation of these rewards"),
    Metric("rollout/reward_mean_all", "reward", "mean reward with the groups that filters refused", signed=True),
    Metric("rollout/reward_errors", "count", "calls of the reward function that failed"),
    Metric("rollout/zero_std_frac", "share", "groups whose rewards are all equal: they carry no gradient"),
    Metric("rollout/samples", "count", "samples that are trained on"),
    Metric("rollout/response_tokens", "tokens", "tokens of all responses"),
    Metric("rollout/response_length_mean", "tokens", "mean length of a response"),
    Metric("rollout/response_length_max", "tokens", "the longest response"),
    Metric("rollout/truncated_frac", "share", "responses cut at `rollout.max_new_tokens` or the context"),
    Metric("rollout/aborted_frac", "share", "samples without an end that a reward can judge"),
    Metric("rollout/prefix_cached_frac", "share", "prompt tokens that the engine found in its prefix cache"),
    Metric("rollout/tokens_per_s", "tokens/s", "response tokens over the time of the whole step"),
    Metric("rollout/waves", "count", "rounds of requests until enough groups were accepted", when="on policy"),
    Metric("rollout/surplus_groups", "count", "finished groups that were not needed", when="on policy"),
    Metric(
        "rollout/filled_groups",
        "count",
        "refused groups in the place of missing ones, in no loss: `rollout.filters.at_limit: train`",
        when="on policy",
    ),
    Metric("rollout/staleness_mean", "versions", "mean lag of a sample's weights", when="`rollout.max_staleness`"),
    Metric("rollout/staleness_max", "versions", "largest lag of a sample's weights", when="`rollout.max_staleness`"),
    Metric("rollout/dropped_stale", "count", "groups dropped as too old for this step", when="`rollout.max_staleness`"),
    Metric(
        "rollout/resubmitted_aborted",
        "count",
        "aborted groups asked for again for this step",
        when="`rollout.max_staleness`",
    ),
    Metric("train/loss", "loss", "the whole loss that was minimised", signed=True),
    Metric("train/pg_loss", "loss", "the policy's part of the loss", signed=True),
    Metric("train/kl_loss", "loss", "the KL's part of the loss", signed=True, when="`algo.kl.where: loss`"),
    Metric("train/value_loss", "loss", "the critic's loss", when="`algo.advantage: gae`"),
    Metric("train/kl", "nats/token", "estimated KL to the reference model", signed=True, when="`algo.kl.where`"),
    Metric(
        "train/teacher_kl", "nats/token", "mean log-prob of policy minus teacher", signed=True, when="`algo.opd_coef`"
    ),
    Metric("train/entropy", "nats/token", "mean entropy of the policy's next-token distribution"),
    Metric("train/grad_norm", "norm", "norm of the policy's gradient before it is clipped"),
    Metric("train/value_grad_norm", "norm", "norm of the critic's gradient", when="`algo.advantage: gae`"),
    Metric("train/lr", "rate", "learning rate of the last optimizer step"),
    Metric("train/clip_frac_low", "share", "tokens clipped at the lower bound of the ratio"),
    Metric("train/clip_frac_high", "share", "tokens clipped at the upper bound of the ratio"),
    Metric("train/ratio_mean", "ratio", "mean probability ratio of the policy to the one before the step"),
    Metric("train/approx_kl", "nats/token", "KL to the policy before the step, by the low-variance estimator"),
    Metric("train/ppo_kl", "nats/token", "mean log-prob of the policy before the step minus the policy", signed=True),
    Metric("train/ess", "share", "effective sample size of a sequence's importance weights, 1 when all are equal"),
    Metric("train/step_skipped", "0 or 1", "no weight was changed: nothing counted, or a number was not finite"),
    Metric("train/nonfinite_tokens", "tokens", "tokens whose values were not finite", when="there are some"),
    Metric(
        "train/optimizer_steps",
        "count",
        "optimizer steps taken on this rollout",
        when="`data.global_batch_size` below the step's rollouts",
    ),
    Metric(
        "train/steps_without_gradient",
        "count",
        "steps in a row whose rewards taught nothing, up to this one",
        when="a loss of advantages, no teacher",
    ),
    Metric("mismatch/abs_diff_mean", "nats", "mean absolute difference of a token's log-prob, trainer to engine"),
    Metric("mismatch/abs_diff_max", "nats", "largest such difference"),
    Metric("mismatch/k3", "nats/token", "estimated KL between engine and trainer (k3)"),
    Metric("mismatch/w_mean", "ratio", "mean importance weight of trainer over engine; 1 when they agree"),
    Metric("mismatch/w_p99", "ratio", "its 99th percentile"),
    Metric("mismatch/rejected_frac", "share", "tokens that the correction rejected", when="`algo.correction.mode`"),
    Metric(
        "mismatch/support_mass_mean",
        "share",
        "probability that the policy gives to the tokens the sampler could draw",
        when="`rollout.top_p`, `top_k` or `min_p`",
    ),
    Metric("mismatch/support_mass_min", "share", "the least of these", when="`rollout.top_p`, `top_k` or `min_p`"),
    Metric("data/examples", "count", "examples that are trained on", when="`algo.loss: sft`"),
    Metric("data/trained_tokens", "tokens", "tokens of their answers", when="`algo.loss: sft`"),
    Metric("data/epoch", "count", "how often the examples were gone through, with fractions", when="`algo.loss: sft`"),
    Metric("data/dropped_rollouts", "count", "rollouts that were in no optimizer step"),
    Metric("data/oversized_samples", "count", "samples above `data.max_tokens_per_gpu`, alone in a micro-batch"),
    Metric("data/dummy_micro_batches", "count", "empty micro-batches that keep the ranks in step"),
    Metric("data/padding_share", "share", "padding among the tokens of the micro-batches"),
    Metric("data/balance_max_over_mean", "ratio", "work of the busiest rank over the mean; 1 is even"),
    Metric("time/step", "s", "the whole step"),
    Metric("time/rollout", "s", "waiting for samples, their rewards included"),
    Metric("time/score", "s", "log-probs and values that the algorithm needs beside the engine's"),
    Metric("time/prepare", "s", "advantages and the schedule"),
    Metric("time/train", "s", "forward, backward and optimizer on every rank"),
    Metric("time/sync", "s", "sending the weights to the engines"),
)

# `<...>` stands for a name that a filter or a user's reward function gives.
PATTERNS = (
    Metric(f"{REFUSED}<reason>", "count", "groups that a filter refused for this reason", when="a filter refused some"),
    Metric(
        f"{REWARD_PARTS}<part>",
        "reward",
        "mean of one part of a reward that is a mapping, over the samples that have it",
        signed=True,
        when="the reward function returns parts",
    ),
)

# Of each evaluation: in the row of the step whose weights it measured before that step trained, the last one in a row of
# its own. `<set>` is the name of a set of `eval.sets`, `<k>` a number of samples.
EVALUATION = (
    Metric(
        "eval/<set>/reward_mean", "reward", "mean reward of all samples; one without a reward counts as 0", signed=True
    ),
    Metric("eval/<set>/pass_at_<k>", "share", "prompts that one of k samples solves, estimated without bias"),
    Metric(
        "eval/<set>/best_of_<k>",
        "reward",
        "mean of the highest reward of k samples of a prompt, estimated without bias",
        signed=True,
        when="`samples_per_prompt` of 2 or more",
    ),
    Metric("eval/<set>/response_length_mean", "tokens", "mean length of a response"),
    Metric("eval/<set>/truncated_frac", "share", "responses cut by a limit on their length"),
    Metric("eval/<set>/unjudged_frac", "share", "samples whose reward function failed"),
    Metric("eval/<set>/prompts", "count", "prompts of the set"),
    Metric(
        HELD_OUT_LOSS, "nats/token", "mean loss of a learnt token of the held-out examples", when="`algo.loss: sft`"
    ),
    Metric("time/evaluate", "s", "the whole evaluation, a checkpoint that it keeps included; no part of `time/step`"),
)
