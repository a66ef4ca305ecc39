"""A procedural task of the reasoning-gym package (extra `tasks`), scored by its own scorer."""

from __future__ import annotations

import string
from difflib import get_close_matches
from typing import Any

from miles.config import ConfigError
from miles.data.config import ReasoningGymConfig
from miles.data.tasks import TaskItem

# reasoning-gym seeds item i with seed + i: widely spaced seeds keep the items of two runs apart.
_SEED_STRIDE = 1_000_003_019


class ReasoningGym:
    name = "reasoning_gym"
    alphabet = string.printable[:95] + "\n"
    size: int | None = None
    has_conversations = False

    def __init__(self, config: ReasoningGymConfig, seed: int) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ConfigError(
                "data.task reasoning_gym needs the package reasoning-gym; install the extra: pip install 'miles-rl[tasks]'"
            ) from error
        if config.dataset not in DATASETS:
            near = get_close_matches(config.dataset, DATASETS, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; choose one of {', '.join(sorted(DATASETS))}"
            raise ConfigError(f"data.reasoning_gym.dataset: unknown dataset {config.dataset!r}{hint}")
        for reserved in ("seed", "size"):
            if reserved in config.params:
                raise ConfigError(f"data.reasoning_gym.params.{reserved}: set by the run, remove it")
        self._template = config.template
        try:
            self._dataset: Any = reasoning_gym.create_dataset(
                config.dataset, seed=seed * _SEED_STRIDE, size=2**31, **config.params
            )
        except (TypeError, AssertionError) as error:
            raise ConfigError(
                f"data.reasoning_gym.params: {config.dataset} refuses {config.params}: {error}"
            ) from error

    def item(self, index: int) -> TaskItem:
        entry = self._dataset[index]
        try:
            text = self._template.format(question=entry["question"], **entry["metadata"])
        except (KeyError, IndexError) as error:
            known = ", ".join(["question", *sorted(entry["metadata"])])
            raise ConfigError(f"data.reasoning_gym.template: no field {error}; this dataset has {known}") from error
        return TaskItem(text, str(entry["answer"]), {"entry": entry})

    def score(self, completion: str, item: TaskItem) -> float:
        raise RuntimeError(
            "scorers of reasoning-gym read the model's text with `eval` and take unbounded time; they run in worker "
            "processes: use `miles.rollout.rewards.build_reward` with the data section"
        )
