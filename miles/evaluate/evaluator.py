"""`Evaluator`: the sets of a run, answered by engines that serve one weight version, judged and summarised.

Everything random about it follows from `eval.seed` and a prompt's place in its set: nothing of training's streams is
touched, and the same weights give the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles.data.config import DataConfig
from miles.data.prompts import Prompt, PromptSource
from miles.data.sample import Sample
from miles.data.tokenizer import Tokenizer
from miles.evaluate.config import EvalConfig, EvalSet
from miles.evaluate.prompt_sets import read_prompts
from miles.evaluate.summary import summarise
from miles.rollout.config import RolloutConfig
from miles.rollout.engine import Engine
from miles.rollout.groups import GroupRunner, check_versions
from miles.rollout.rewards import RewardPool, build_reward

# Sequences that are asked for at once; more wait here instead of in the engine.
AT_ONCE = 4096


@dataclass(frozen=True)
class _Prepared:
    chosen: EvalSet
    prompts: Sequence[Prompt]
    runner: GroupRunner


class Evaluator:
    """Reads the sets when it is made; `ConfigError` for one that cannot be read. `close()` when done."""

    def __init__(
        self,
        config: EvalConfig,
        *,
        data: DataConfig,
        rollout: RolloutConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        rewards: RewardPool,
    ) -> None:
        """`rewards`: the training's pool, whose processes are shared; its owner closes it."""
        self._engine_url = engine.url
        self._own_pools: list[RewardPool] = []
        self._sets: list[_Prepared] = []
        for chosen in config.sets:
            source, prompts = read_prompts(chosen, data, tokenizer, config.seed)
            pool = self._judges(source, data, rollout, tokenizer, rewards, config.seed)
            runner = GroupRunner(
                sampling_of(chosen, rollout), engine, source, tokenizer, run_seed=config.seed, rewards=pool
            )
            self._sets.append(_Prepared(chosen, prompts, runner))

    def _judges(
        self,
        source: PromptSource,
        data: DataConfig,
        rollout: RolloutConfig,
        tokenizer: Tokenizer,
        rewards: RewardPool,
        seed: int,
    ) -> RewardPool:
        # A task's own scorer is the set's task's; any other reward judges whatever it is given.
        if rollout.reward.kind != "task" or source.config == data:
            return rewards.counting_apart()
        pool = RewardPool(rollout.reward, build_reward(rollout.reward, source.config, seed=seed), tokenizer)
        self._own_pools.append(pool)
        return pool

    async def measure(self, version: int) -> dict[str, float]:
        """Metrics of every set, by name. Each token must be of weight version `version`."""
        found: dict[str, float] = {}
        for prepared in self._sets:
            groups: list[list[Sample]] = []
            wave = max(1, AT_ONCE // prepared.chosen.samples_per_prompt)
            for start in range(0, len(prepared.prompts), wave):
                groups += await prepared.runner.run_all(prepared.prompts[start : start + wave])
            check_versions([sample for group in groups for sample in group], version, self._engine_url)
            found |= summarise(prepared.chosen, groups)
        return found

    def close(self) -> None:
        """The processes of scorers that belong to sets alone are gone."""
        for pool in self._own_pools:
            pool.close()


def sampling_of(chosen: EvalSet, rollout: RolloutConfig) -> RolloutConfig:
    """The rollout section with the set's sampling: drawn from the whole vocabulary unless the set cuts it."""
    return rollout.model_copy(
        update={
            "group_size": chosen.samples_per_prompt,
            "temperature": chosen.temperature,
            "top_p": chosen.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "max_new_tokens": chosen.max_new_tokens or rollout.max_new_tokens,
            "partial": False,
            "mask_offpolicy_in_partial": False,
        }
    )
