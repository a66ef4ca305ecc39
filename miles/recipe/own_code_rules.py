"""Functions of the user's own that a rollout calls, tried before anything starts: imported, and called where that is cheap.

A task's class is tried where prompts are drawn, an estimator or loss where it says what it needs. Left out: a generate
function, which wants an engine, and an estimator's or loss's arithmetic.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from miles.config import ConfigError
from miles.data.prompts import Prompt
from miles.data.sample import Sample, Status
from miles.recipe.schema import Recipe
from miles.rollout.config import UserFilter
from miles.rollout.errors import RewardError
from miles.rollout.filters import user_filter
from miles.rollout.own_generate import generate_function
from miles.rollout.rewards import RewardContext, RewardPool, build_reward

# Seconds of the trial call; a function may take `rollout.reward.timeout_s` in the run.
TRIAL_S = 10.0


def faults(recipe: Recipe, prompts: Sequence[Prompt]) -> Iterator[str]:
    """What would stop the run at its first group: "what; fix" each."""
    try:
        generate_function(recipe.rollout)
        for config in recipe.rollout.filters.chain:
            if isinstance(config, UserFilter):
                user_filter(config.path)([_answer(index, float(index)) for index in range(2)])
    except ConfigError as error:
        yield str(error)
    if recipe.rollout.reward.kind == "python" and prompts:
        try:
            _try_reward(recipe, prompts[0])
        except RewardError as error:
            yield f"rollout.reward: a trial call with the first prompt and its answer as completion failed: {error}"


def _answer(index: int, reward: float | None = None) -> Sample:
    return Sample(
        sample_id=f"trial-{index}",
        group_id=0,
        rollout_id=index,
        tokens=np.zeros(2, np.int64),
        prompt_length=1,
        rollout_log_probs=np.zeros(1, np.float32),
        version_spans=np.array([[0, 1]], np.int64),
        reward=reward,
        status=Status.COMPLETED,
    )


class _Said:
    """Decodes everything to one text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def decode_batch(self, rows: Sequence[Any]) -> list[str]:
        return [self._text for _ in rows]


def _try_reward(recipe: Recipe, prompt: Prompt) -> None:
    """One call where the run makes its own: in a worker process, or awaited. `RewardError` when it fails."""
    config = recipe.rollout.reward.model_copy(
        update={"on_error": "raise", "concurrency": 1, "timeout_s": min(TRIAL_S, recipe.rollout.reward.timeout_s)}
    )
    answer = prompt.answer if isinstance(prompt.answer, str) else json.dumps(prompt.answer)
    pool = RewardPool(config, build_reward(config, recipe.data, seed=recipe.seed), _Said(answer))

    def no_task(completion: str, of: Prompt) -> float:
        raise AssertionError("kind python asks no task")

    # In a thread of its own: the caller may sit in an event loop.
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, pool.judge(RewardContext(prompt, no_task), [_answer(0)])).result()
    finally:
        pool.close()
