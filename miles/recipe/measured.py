"""Which metrics a recipe's steps never report: a gate on one would stop the run at once, an expectation at its end."""

from __future__ import annotations

from collections.abc import Iterator

from miles.config.metric_table import HELD_OUT_LOSS, REFUSED, REWARD_PARTS, STEP, Metric
from miles.recipe.schema import Recipe

# Reported by steps that have some; like the counts of filters, no gate can ask for it in every step.
_WITHOUT_GRADIENT = "train/steps_without_gradient"
COUNTED_WHEN_ANY = "train/nonfinite_tokens"


def unmeasured(recipe: Recipe) -> dict[str, str]:
    """Metric -> what would have to be set for steps to report it."""
    algo, stale = recipe.algo, recipe.rollout.max_staleness > 0
    support = recipe.rollout.needs_sampling_mask and algo.support_log_probs == "auto"
    given = recipe.supervised
    sampled = " ".join(metric.name for metric in STEP if _of_sampling(metric))
    conditions = (
        (not given, "algo.loss to one that uses advantages", sampled),
        (given and recipe.data.has_held_out, "algo.loss to sft and data.held_out_fraction above 0", HELD_OUT_LOSS),
        (given, "algo.loss to sft", "data/examples data/trained_tokens data/epoch"),
        (stale, "rollout.max_staleness above 0", "rollout/staleness_mean rollout/staleness_max"),
        (stale, "rollout.max_staleness above 0", "rollout/dropped_stale rollout/resubmitted_aborted"),
        (not stale, "rollout.max_staleness to 0", "rollout/waves rollout/surplus_groups rollout/filled_groups"),
        (algo.kl.where != "none", "algo.kl.where", "train/kl"),
        (algo.kl.where == "loss", "algo.kl.where to loss", "train/kl_loss"),
        (algo.needs_values, "algo.advantage to gae", "train/value_loss train/value_grad_norm"),
        (algo.needs_teacher, "algo.opd_coef above 0", "train/teacher_kl"),
        (recipe.several_steps, "data.global_batch_size below the step's rollouts", "train/optimizer_steps"),
        (algo.correction.active, "algo.correction.mode", "mismatch/rejected_frac"),
        (support, "rollout.top_p below 1 (or top_k, min_p)", "mismatch/support_mass_mean mismatch/support_mass_min"),
    )
    return {name: option for measured, option, names in conditions if not measured for name in names.split()}


def _of_sampling(metric: Metric) -> bool:
    """Measured on what an engine drew or on its rewards; the speed is that of any step."""
    name = metric.name
    return name != "rollout/tokens_per_s" and (name.startswith(("rollout/", "mismatch/")) or name == _WITHOUT_GRADIENT)


def objections(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(what is wrong, what to do) for every bound that no step could keep."""
    missing = unmeasured(recipe)
    gates = [(f"quant.gates.{index}", gate.name) for index, gate in enumerate(recipe.quant.gates)]
    for key, name in [*gates, *((f"expect.{name}", name) for name in recipe.expect)]:
        if name in missing:
            yield f"{key}: no step of this recipe reports {name}", f"remove the bound, or set {missing[name]}"
        elif key.startswith("quant.") and (name == COUNTED_WHEN_ANY or name.startswith((REFUSED, REWARD_PARTS))):
            message = f"{key}: steps report {name} only when there are some, and a gate needs its metric in every step"
            yield message, "remove the gate"
