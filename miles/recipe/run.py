"""How a run goes: how long, when it saves, where it writes, what must have come out."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from miles.config import StrictModel


class RunConfig(StrictModel):
    """`steps`: optimizer rollouts to run. A checkpoint is written every `checkpoint_every` steps and at the end."""

    steps: int = Field(default=100, ge=1)
    checkpoint_every: int = Field(default=25, ge=1)
    # `eval/<set>`: keep the checkpoint and export with its highest mean reward; `eval/<set>/<metric>`: of that metric.
    keep_best: str | None = None
    # Folder that holds run folders; the environment variable MILES_RUNS_DIR is used when this is not set.
    directory: str | None = None
    # Steps (0-based) that are recorded for `miles replay`; each costs a checkpoint.
    replay_steps: tuple[int, ...] = ()
    # A warning comes when so many steps in a row carried no gradient (equal rewards); `expect` may ask for more.
    no_gradient_warning_steps: int = Field(default=10, ge=1)
    # Bound of every wait on an actor, in seconds; also covers the start.
    timeout_s: float = Field(default=600.0, ge=1.0)

    @model_validator(mode="after")
    def _replayed_steps_exist(self) -> RunConfig:
        wrong = [step for step in self.replay_steps if not 0 <= step < self.steps]
        if wrong:
            raise ValueError(
                f"run.replay_steps has {', '.join(map(str, wrong))}, but run.steps {self.steps} makes the steps 0 to "
                f"{self.steps - 1}; name steps of this run"
            )
        return self


class Expectation(StrictModel):
    """Bounds that a metric's mean over the last `over` steps must keep when the run ends."""

    min: float | None = None
    max: float | None = None
    over: int = Field(default=5, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Expectation:
        if self.min is None and self.max is None:
            raise ValueError("an expectation needs min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"no value is at least min {self.min} and at most max {self.max}; swap them")
        return self


class Validation(StrictModel):
    """What is known of this recipe. `validated` names where and when its expectations were met."""

    status: Literal["validated", "bring-up", "untested"] = "untested"
    hardware: str | None = None
    date: str | None = None
    source: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Validation:
        if self.status == "validated" and not (self.hardware and self.date):
            raise ValueError("validation.status validated needs validation.hardware and validation.date")
        return self
