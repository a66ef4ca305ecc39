"""Evaluation sets whose answers do not fit, or whose prompts training sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from miles.recipe.schema import Recipe

Objection = tuple[Literal["error", "warning"], str, str]


def objections(
    recipe: Recipe, *, positions: int | None, trained: int, longest: Mapping[str, int], overlap: Mapping[str, int]
) -> Iterator[Objection]:
    """(severity, what is wrong, what to do). `trained`: tokens of training's longest prompt; `longest`: of each set's;
    `overlap`: prompts of a set that training sees too. What training already cannot do is not said again."""
    rollout, engine = recipe.rollout, recipe.engine
    limits = {"the model's positions": positions, "engine.context_length": engine.context_length}
    limits["engine.max_total_tokens"] = engine.max_total_tokens
    told = trained + rollout.max_new_tokens
    told = min(told, rollout.max_context or told)
    for chosen in recipe.eval.sets:
        prompt = longest.get(chosen.name, 1)
        if rollout.max_context is not None and trained < prompt >= rollout.max_context:
            message = (
                f"rollout.max_context {rollout.max_context} leaves no token after a prompt of {prompt} of eval.sets "
            )
            yield "error", message + chosen.name, f"raise it to at least {prompt + 1}, or shorten the prompts"
            continue
        need = prompt + (chosen.max_new_tokens or rollout.max_new_tokens)
        need = min(need, rollout.max_context or need)
        for name, limit in limits.items():
            if limit is not None and need > max(limit, told):
                message = f"eval.sets {chosen.name}: a prompt of {prompt} tokens and its answer need {need} positions"
                fix = f"set its max_new_tokens to at most {limit - prompt}" if limit > prompt else "shorten the prompts"
                yield "error", f"{message}, but the limit of {name} is {limit}", fix
        if overlap.get(chosen.name):
            yield (
                "warning",
                f"eval.sets {chosen.name}: {overlap[chosen.name]} of its prompts are among training's, word for word",
                "take them out of one of the two, or raise data.held_out_fraction and evaluate what is held out",
            )
