"""`Recipe`: everything that determines a run, as one frozen value with a digest."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import Field, model_validator

from miles.algos.config import AlgoConfig
from miles.config import ConfigError, StrictModel, metric_names, user_code
from miles.config.metric_table import HELD_OUT_LOSS
from miles.data.config import DataConfig
from miles.data.supervised.config import SupervisedConfig
from miles.evaluate import prompt_sets, summary
from miles.evaluate.config import EvalConfig
from miles.models.config import ModelConfig
from miles.observe.config import ObserveConfig
from miles.quant.config import QuantConfig
from miles.recipe.placement import ClusterConfig, PlacementConfig
from miles.recipe.run import Expectation, RunConfig, Validation
from miles.rollout.config import EngineConfig, RolloutConfig
from miles.sync.config import SyncConfig
from miles.train.config import TrainConfig

# Sections that do not change what a run learns.
NOT_DETERMINING = ("cluster", "observe")


class Recipe(StrictModel):
    """One run. Every section is the configuration class of the component that owns it."""

    schema_version: Literal[1] = 1
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    description: str = ""
    seed: int = Field(default=0, ge=0, lt=2**31)
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    algo: AlgoConfig = AlgoConfig()
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()
    engine: EngineConfig = EngineConfig()
    train: TrainConfig = TrainConfig()
    sync: SyncConfig = SyncConfig()
    quant: QuantConfig = QuantConfig()
    placement: PlacementConfig = PlacementConfig()
    cluster: ClusterConfig = ClusterConfig()
    observe: ObserveConfig = ObserveConfig()
    expect: dict[str, Expectation] = Field(default_factory=dict)
    validation: Validation = Validation()

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if not (user_code.is_reference(self.algo.advantage) or user_code.is_reference(self.algo.loss)):
            self.check_source()
        named = [(f"expect.{name}", name) for name in self.expect]
        named += [(f"quant.gates.{index}.name", gate.name) for index, gate in enumerate(self.quant.gates)]
        for key, name in named:
            evaluated = key.startswith("expect.") and name.startswith(summary.PREFIX)
            if evaluated and name == HELD_OUT_LOSS:
                continue  # a rule knows whether this run measures it
            fault = summary.fault(name, self.eval) if evaluated else metric_names.fault(name)
            if fault is not None:
                raise ValueError(f"{key}: {name} {fault}")
        return self

    def _check_evaluation(self) -> None:
        for chosen in self.eval.sets:
            if chosen.path is None and chosen.task is None and not self.data.has_held_out:
                raise ValueError(
                    f"eval.sets {chosen.name} takes held-out prompts but data.held_out_fraction is 0; set it above 0, give "
                    "the set a path or task, or set eval.sets to []"
                )
            try:
                prompt_sets.data_of(chosen, self.data)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        if self.run.keep_best is not None:
            try:
                summary.better_when_higher(self.run.keep_best, self.eval)
            except ValueError as error:
                raise ValueError(f"run.keep_best: {error}") from None

    def check_source(self) -> None:
        """`ValueError` for options that do not fit where the samples come from, an engine or the data. For an advantage
        or a loss of the user's own this imports it."""
        if self.supervised:
            if self.data.too_long == "truncate_left":
                raise ValueError(
                    "data.too_long is truncate_left, which cuts the question from its answer; use drop or error, with "
                    "data.supervised.max_tokens as the limit"
                )
            if self.run.keep_best is not None:
                raise ValueError(
                    f"run.keep_best is {self.run.keep_best}, but algo.loss {self.algo.loss} starts no engine that could "
                    "evaluate; remove it, and compare finished runs by `miles eval`"
                )
        else:
            self._check_evaluation()
            self._check_group_size()
            if self.data.supervised != SupervisedConfig():
                raise ValueError(
                    f"data.supervised has no effect with algo.loss {self.algo.loss}; set algo.loss to sft, or remove it"
                )
        size, samples = self.data.global_batch_size, self.samples_per_step
        if size is not None and size > samples:
            of = "data.supervised.batch_examples" if self.supervised else "rollout.batch_groups x rollout.group_size"
            raise ValueError(
                f"data.global_batch_size is {size}, but a step has {of} = {samples} rollouts; lower it, or raise those"
            )

    def _check_group_size(self) -> None:
        if self.rollout.group_size == 1 and self.algo.declared_advantage.groups:
            raise ValueError(
                f"rollout.group_size is 1 but algo.advantage {self.algo.advantage} compares the samples of a group, so "
                "every advantage would be 0; raise rollout.group_size to 2 or more, or choose reinforce_pp or gae"
            )

    @property
    def several_steps(self) -> bool:
        """The samples of a step are trained in more than one optimizer step."""
        return self.data.global_batch_size is not None and self.data.global_batch_size < self.samples_per_step

    @property
    def supervised(self) -> bool:
        """Answers come from the data: the loss uses no advantages, so that there are no engines, rewards or evaluations."""
        return not self.algo.declared_loss.advantages

    @property
    def samples_per_step(self) -> int:
        """Rollouts, or supervised examples, of one training step."""
        if self.supervised:
            return self.data.supervised.batch_examples
        return self.rollout.batch_groups * self.rollout.group_size


def canonical_json(recipe: Recipe) -> str:
    """The resolved recipe with sorted keys and no blanks: the text that the digest is taken of.

    `cluster` and `observe` are left out: a run goes on where there is room for it, and whoever watches.
    """
    return json.dumps(_determining(recipe), sort_keys=True, separators=(",", ":"))


def _determining(recipe: Recipe) -> dict[str, object]:
    return recipe.model_dump(mode="json", exclude=set(NOT_DETERMINING))


def digest(recipe: Recipe) -> str:
    """sha256 (hex) of the canonical JSON of the resolved recipe."""
    return hashlib.sha256(canonical_json(recipe).encode()).hexdigest()


def differences(left: Recipe, right: Recipe) -> list[str]:
    """`key: a -> b` for every resolved leaf that differs, in key order."""
    first, second = _leaves(_determining(left)), _leaves(_determining(right))
    keys = sorted(first.keys() | second.keys())
    return [f"{key}: {first.get(key)} -> {second.get(key)}" for key in keys if first.get(key) != second.get(key)]


def settings(recipe: Recipe) -> dict[str, Any]:
    """Every resolved leaf by its dotted key, as JSON values, without what does not change what a run learns."""
    return {key: json.loads(text) for key, text in _leaves(_determining(recipe)).items()}


def _leaves(value: object, prefix: str = "") -> dict[str, str]:
    if isinstance(value, dict) and value:
        found: dict[str, str] = {}
        for key, child in value.items():
            found |= _leaves(child, f"{prefix}.{key}" if prefix else key)
        return found
    return {prefix: json.dumps(value)}
