"""Options that act nowhere in this run, though they would in another: told, not refused.

A variant of a recipe inherits them, and a smaller mesh or a single optimizer step puts them out of work. What is
idle whatever the rest of the run says is refused by the section that owns it.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from miles.recipe.schema import Recipe

Objection = tuple[str, str]


def objections(recipe: Recipe) -> Iterator[Objection]:
    """(what acts nowhere and why, what to do) for every such option."""
    if recipe.supervised:
        yield from _sampling_options(recipe)
        return
    yield from _ratio_options(recipe)
    if recipe.algo.needs_values and not recipe.several_steps and _is_set(recipe.algo.value, "eps_clip"):
        yield (
            f"algo.value.eps_clip {recipe.algo.value.eps_clip} acts nowhere: in one optimizer step the critic is the one "
            "that gave the old values",
            f"{_several_steps(recipe)}, or remove it",
        )
    if recipe.algo.support_log_probs == "off" and not recipe.rollout.needs_sampling_mask:
        yield (
            "algo.support_log_probs off acts nowhere: the sampler draws from the whole vocabulary",
            "set rollout.top_p, top_k or min_p, or remove it",
        )
    if recipe.data.balance == "flops" and recipe.train.parallel.dp == 1:
        yield (
            "data.balance flops acts nowhere: train.parallel.dp 1 has no other rank to balance with",
            "raise train.parallel.dp, or remove it",
        )


def _ratio_options(recipe: Recipe) -> Iterator[Objection]:
    """Clips and losses that differ only where the ratio to the old policy leaves 1."""
    algo = recipe.algo
    if recipe.several_steps or algo.correction.bypass:
        return
    reason = "one optimizer step on policy has ratio 1"
    if recipe.rollout.max_staleness:
        reason = "one optimizer step has ratio 1 without algo.correction.bypass, since old is the policy it starts from"
    idle = [
        f"algo.{name} {getattr(algo, name)} acts nowhere"
        for name in ("eps_clip", "eps_clip_high")
        if _is_set(algo, name)
    ]
    if algo.declared_loss.ratio_only and algo.loss != "ppo_clip":
        idle.append(f"algo.loss {algo.loss} does what ppo_clip does")
    for said in idle:
        yield f"{said}: {reason}", f"{_several_steps(recipe)}, or algo.correction.bypass=true, or remove it"


_EVALUATE_ELSEWHERE = "evaluate the run's hf_model by `miles eval` with a recipe that has prompts, or remove it"
# When the loss of held-out examples is measured, under `eval`.
_HELD_OUT_LOSS = ("every",)


def _sampling_options(recipe: Recipe) -> Iterator[Objection]:
    """What a run whose answers come from the data does not have."""
    sections: tuple[tuple[str, BaseModel], ...] = (
        ("rollout", recipe.rollout),
        ("engine", recipe.engine),
        ("sync", recipe.sync),
        ("eval", recipe.eval),
        ("placement", recipe.placement),
    )
    for section, model in sections:
        names = ", ".join(
            f"{section}.{name}"
            for name in type(model).model_fields
            if _is_set(model, name) and name not in _HELD_OUT_LOSS
        )
        if names:
            yield (
                f"{names} act{'' if ',' in names else 's'} nowhere: algo.loss {recipe.algo.loss} learns from the answers of "
                "the data, and no engine is started",
                _EVALUATE_ELSEWHERE if section == "eval" else "remove it",
            )


def _several_steps(recipe: Recipe) -> str:
    return f"set data.global_batch_size below the {recipe.samples_per_step} rollouts of a step"


def _is_set(section: BaseModel, name: str) -> bool:
    return bool(getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True))
