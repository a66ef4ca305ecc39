"""Configuration of rewards (`rollout.reward.*` of a recipe)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from miles.config import StrictModel


class OverlongConfig(StrictModel):
    """DAPO's soft punishment: 0 up to `buffer_tokens` below `rollout.max_new_tokens`, then falling to -`penalty` there."""

    buffer_tokens: int = Field(ge=1)
    penalty: float = Field(1.0, gt=0)


class LengthNormalisedConfig(StrictModel):
    """Of the answers to one prompt, shorter ones are worth more: `weight` times 0.5 (shortest) to -0.5 (longest).

    An answer whose judged reward is below `solved_from` gains nothing by being short.
    """

    weight: float = Field(gt=0)
    solved_from: float = 1.0


class RewardConfig(StrictModel):
    """`kind` picks the function, `options` are its own (see `miles.rollout.rewards.kinds`)."""

    kind: Literal[
        "task",
        "exact",
        "positional",
        "math_boxed",
        "f1",
        "choice_letter",
        "regex",
        "remote_http",
        "from_metadata",
        "python",
        "callable",
    ] = "task"
    options: dict[str, Any] = Field(default_factory=dict)
    # Of one call, from the moment at which the function starts.
    timeout_s: float = Field(30.0, gt=0)
    # How many functions run at once; what computes in our own worker processes gets one process a core at most.
    concurrency: int = Field(64, ge=1, le=1024)
    # Address space of one worker process.
    memory_gib: float = Field(8.0, ge=0.25)
    # What a failing function or a value that is no finite number does: stop the run, or mask that sample. `auto`:
    # mask where only the model's text can be the cause (math_boxed, regex, the task's own scorer), else raise.
    on_error: Literal["auto", "raise", "mask"] = "auto"
    # Added to what was judged, in training alone.
    overlong: OverlongConfig | None = None
    length_normalised: LengthNormalisedConfig | None = None

    @property
    def shapes(self) -> bool:
        """Something is added to judged rewards."""
        return self.overlong is not None or self.length_normalised is not None
