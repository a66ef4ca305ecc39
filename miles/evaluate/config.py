"""Configuration of evaluation (`eval.*` of a recipe)."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from miles.config import StrictModel
from miles.config.beside_recipe import RecipePath
from miles.config.metric_names import SET_NAME

# Prompts of a set that does not say how many and is no file of its own.
DEFAULT_PROMPTS = 64
MAX_PROMPTS = 1 << 20
MAX_SAMPLES = 1024
# Below this, logits divided by the temperature leave float32 in the engine.
MIN_TEMPERATURE = 1e-6


class EvalSet(StrictModel):
    """One set of prompts: those that `data` holds out, unless `path` or `task` names others."""

    name: str = Field(pattern=f"^{SET_NAME}$")
    # A file of prompts, read as the training's file is (as JSON lines where training reads none).
    path: RecipePath | None = None
    # Another task than the training's, or the training's with other options.
    task: str | None = None
    # Options of the task or file that differ from the training's, e.g. {digits: 4} or {prompt_key: question}.
    options: dict[str, Any] = Field(default_factory=dict)
    # null: every prompt of `path`, else 64.
    prompts: int | None = Field(default=None, ge=1, le=MAX_PROMPTS)
    samples_per_prompt: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    # 0 takes the likeliest token.
    temperature: float = Field(default=0.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    # null: as in training.
    max_new_tokens: int | None = Field(default=None, ge=1)
    # A sample with at least this reward is right: what pass@k counts.
    solved_at: float = 1.0

    @model_validator(mode="after")
    def _consistent(self) -> EvalSet:
        if self.path is not None and self.task is not None:
            raise ValueError(f"set {self.name}: path and task both say where its prompts come from; remove one of them")
        if self.options and self.path is None and self.task is None:
            raise ValueError(f"set {self.name}: options has no effect without path or task; set one, or remove it")
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"set {self.name}: temperature {self.temperature:g} is neither 0 (the likeliest token) nor at least "
                f"{MIN_TEMPERATURE:g}; use 0"
            )
        if self.samples_per_prompt > 1 and self.temperature == 0.0:
            raise ValueError(
                f"set {self.name}: samples_per_prompt is {self.samples_per_prompt} but temperature 0 makes them all "
                "equal; raise temperature, or set samples_per_prompt to 1"
            )
        if self.top_p < 1.0 and self.temperature == 0.0:
            raise ValueError(
                f"set {self.name}: top_p has no effect with temperature 0; raise temperature, or remove it"
            )
        return self


class EvalConfig(StrictModel):
    """`every`: steps between evaluations, the first before any step; null: only at the end, where there is always one.

    `seed` is that of prompts and sampling: it is not the run's, so that runs are compared on the same prompts.
    """

    every: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**31)
    sets: tuple[EvalSet, ...] = (EvalSet(name="held_out"),)

    @model_validator(mode="after")
    def _consistent(self) -> EvalConfig:
        names = [chosen.name for chosen in self.sets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"eval.sets has the name {twice[0]} more than once; give each set a name of its own")
        if self.every is not None and not self.sets:
            raise ValueError("eval.every has no effect while eval.sets is empty; name a set, or remove eval.every")
        return self

    def due(self, step: int, steps: int) -> bool:
        """Whether there is an evaluation after `step` of the run's `steps` steps."""
        return bool(self.sets) and (step == steps or (self.every is not None and step % self.every == 0))
