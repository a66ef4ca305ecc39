"""Evaluations between steps leave training's samples as they are, with any timing, on policy and behind it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.data.config import DataConfig
from miles.data.prompts import PromptSource
from miles.evaluate.config import EvalConfig
from miles.evaluate.evaluator import Evaluator, sampling_of
from miles.rollout.async_rollout import AsyncRollout
from miles.rollout.config import FiltersConfig, RolloutConfig
from miles.rollout.errors import EngineReplyError
from miles.rollout.rewards import RewardPool, build_reward
from miles.rollout.sync_rollout import SyncRollout

DATA = DataConfig()
SETS = [
    {"name": "a", "prompts": 6, "samples_per_prompt": 4, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 2},
    {"name": "b", "prompts": 3},
]
FILTERS = FiltersConfig(chain=[{"kind": "check_reward_nonzero_std"}])


class Digits:
    """Ids 0..9 are digits, 10 is the sign between prompt and answer."""

    def encode(self, text: str) -> np.ndarray:
        return np.array(["0123456789=".index(letter) for letter in text], dtype=np.int64)

    def decode_batch(self, rows: Any) -> list[str]:
        return ["".join("0123456789="[int(token) % 10] for token in row) for row in rows]


def evaluator_of(config: RolloutConfig, engine: FakeEngine, rewards: RewardPool, *sets: dict[str, Any]) -> Evaluator:
    chosen = EvalConfig.model_validate_json(json.dumps({"sets": sets or SETS}))
    return Evaluator(chosen, data=DATA, rollout=config, engine=engine, tokenizer=Digits(), rewards=rewards)


def curve(config: RolloutConfig, engine: FakeEngine, *, steps: int = 5, every: int | None, pause: float = 0.0) -> Any:
    """What training saw in each step, its cursor at the end, and what the evaluations found."""

    async def main() -> Any:
        source, seen, measured = PromptSource(DATA, Digits(), 7), [], []
        rewards = RewardPool(config.reward, build_reward(config.reward, DATA), Digits())
        kind = AsyncRollout if config.max_staleness else SyncRollout
        rollout = kind(config, engine, source, Digits(), run_seed=7, rewards=rewards)
        evaluator = evaluator_of(config, engine, rewards)
        await rollout.start(0)
        for step in range(steps):
            if every is not None and step % every == 0:
                await rollout.hold()
                measured.append(await evaluator.measure(step))
                await rollout.release()
            batch = await asyncio.wait_for(rollout.collect(step), 20)
            seen.append(([(s.sample_id, s.tokens.tolist(), s.reward) for s in batch.samples], batch.metrics))
            await rollout.prefetch(step + 1)
            await asyncio.sleep(pause)
            await engine.serve(step + 1)
            await rollout.on_new_version(step + 1)
        state = rollout.state()
        await rollout.close()
        evaluator.close()
        return seen, state, measured

    return asyncio.run(main())


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("filters", [FiltersConfig(), FILTERS], ids=["plain", "filtered"])
def test_training_draws_the_same_samples_with_and_without_evaluation(staleness: int, filters: FiltersConfig) -> None:
    config = RolloutConfig(batch_groups=3, group_size=4, max_new_tokens=3, max_staleness=staleness, filters=filters)
    without, cursor, _ = curve(config, FakeEngine(holds_requests=True), every=None)
    with_, same, measured = curve(config, FakeEngine(holds_requests=True), every=2)
    assert [samples for samples, _ in with_] == [samples for samples, _ in without]
    assert same == cursor
    assert len(measured) == 3
    if not staleness:
        assert [metrics for _, metrics in with_] == [metrics for _, metrics in without]


@settings(max_examples=10)
@given(slowest=st.sampled_from([0.0, 0.002, 0.005]), every=st.integers(1, 3), pause=st.sampled_from([0.0, 0.004]))
def test_behind_the_policy_a_prompt_gives_the_same_samples_whenever_it_comes(slowest, every, pause) -> None:
    config = RolloutConfig(batch_groups=2, group_size=2, max_new_tokens=3, max_staleness=2)

    def by_sample(every: int | None, slowest: float) -> dict[str, Any]:
        engine = FakeEngine(delay=lambda request: slowest * (request.seed % 7) / 7)
        seen, _, _ = curve(config, engine, every=every, pause=pause)
        return {sample[0]: sample for samples, _ in seen for sample in samples}

    without, with_ = by_sample(None, 0.0), by_sample(every, slowest)
    both = without.keys() & with_.keys()
    assert both
    assert [with_[name] for name in both] == [without[name] for name in both]


def test_the_same_weights_give_the_same_numbers_whatever_else_was_evaluated() -> None:
    config = RolloutConfig(batch_groups=1, group_size=2, max_new_tokens=3)

    def measure(*sets: dict[str, Any], times: int = 1) -> list[dict[str, float]]:
        async def main() -> list[dict[str, float]]:
            rewards = RewardPool(config.reward, build_reward(config.reward, DATA), Digits())
            evaluator = evaluator_of(config, FakeEngine(), rewards, *sets)
            return [await evaluator.measure(0) for _ in range(times)]

        return asyncio.run(main())

    first, again = measure(*SETS, times=2)
    assert first == again
    alone = measure(SETS[1])[0]
    assert alone == {name: value for name, value in first.items() if name.startswith("eval/b/")}
    assert {name.split("/")[1] for name in first} == {"a", "b"}


def test_what_is_asked_for_is_the_sets_sampling_and_not_trainings() -> None:
    config = RolloutConfig(
        batch_groups=1, group_size=2, max_new_tokens=3, top_k=5, min_p=0.1, top_p=0.5, temperature=1.3
    )
    engine = FakeEngine()

    async def main() -> None:
        rewards = RewardPool(config.reward, build_reward(config.reward, DATA), Digits())
        await evaluator_of(config, engine, rewards).measure(0)

    asyncio.run(main())
    kinds = {
        (r.sampling.temperature, r.sampling.top_p, r.sampling.top_k, r.sampling.min_p, r.sampling.max_new_tokens)
        for r in engine.requests
    }
    assert kinds == {(0.7, 0.9, -1, 0.0, 2), (0.0, 1.0, -1, 0.0, 3)}
    assert len(engine.requests) == 6 * 4 + 3
    partial = RolloutConfig(partial=True, mask_offpolicy_in_partial=True)
    asked = sampling_of(EvalConfig().sets[0], partial)
    assert (asked.group_size, asked.partial, asked.mask_offpolicy_in_partial) == (1, False, False)


def test_tokens_of_other_weights_are_refused() -> None:
    config = RolloutConfig(batch_groups=1, group_size=2, max_new_tokens=3)

    async def main() -> None:
        rewards = RewardPool(config.reward, build_reward(config.reward, DATA), Digits())
        await evaluator_of(config, FakeEngine(version=3), rewards).measure(4)

    with pytest.raises(EngineReplyError, match="tokens of weight version 3, this step is on version 4"):
        asyncio.run(main())


def test_failures_of_the_reward_in_an_evaluation_are_not_counted_as_trainings() -> None:
    # No sample's metadata has the key.
    reward = {"kind": "from_metadata", "options": {"key": "absent"}, "on_error": "mask"}
    config = RolloutConfig.model_validate({"batch_groups": 1, "group_size": 2, "max_new_tokens": 3, "reward": reward})
    rewards = RewardPool(config.reward, build_reward(config.reward, DATA), Digits())

    async def main() -> dict[str, float]:
        return await evaluator_of(config, FakeEngine(), rewards).measure(0)

    found = asyncio.run(main())
    assert {name: value for name, value in found.items() if name.endswith("unjudged_frac")} == {
        "eval/a/unjudged_frac": 1.0,
        "eval/b/unjudged_frac": 1.0,
    }
    assert rewards.take_errors() == 0


def test_seeds_follow_from_the_evaluations_own_seed() -> None:
    config = RolloutConfig(batch_groups=1, group_size=2, max_new_tokens=3)

    def seeds(seed: int) -> list[int]:
        engine = FakeEngine()
        chosen = EvalConfig.model_validate_json(json.dumps({"sets": SETS, "seed": seed}))

        async def main() -> None:
            rewards = RewardPool(config.reward, build_reward(config.reward, DATA), Digits())
            evaluator = Evaluator(chosen, data=DATA, rollout=config, engine=engine, tokenizer=Digits(), rewards=rewards)
            await evaluator.measure(0)

        asyncio.run(main())
        return sorted(request.seed for request in engine.requests)

    assert seeds(0) == seeds(0)
    assert set(seeds(0)).isdisjoint(seeds(1))
