"""One group of samples from prompt to rewards: what synchronous and asynchronous rollouts have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from miles.data.prompts import Prompt, PromptSource
from miles.data.sample import Sample, Status, validate_sample
from miles.rollout.config import RolloutConfig
from miles.rollout.engine import Engine
from miles.rollout.errors import EngineReplyError, RolloutError
from miles.rollout.generate import GenerateContext, GenerateFn, TextCodec, group_seeds, pending_group
from miles.rollout.own_generate import generate_function
from miles.rollout.rewards import RewardContext, RewardPool, build_reward, shape_rewards

# How often a partial response may be aborted and continued before the run gives up.
MAX_CONTINUATIONS = 64


class Prompts(Protocol):
    """What a rollout needs of `miles.data.prompts.PromptSource`. The state is JSON and has the key `next_index`."""

    def next_groups(self, count: int) -> list[Prompt]: ...
    def score(self, completion: str, prompt: Prompt) -> float: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


class GroupRunner:
    """Generates and judges groups. `generate`: instead of what `rollout.generate` names."""

    def __init__(
        self,
        config: RolloutConfig,
        engine: Engine,
        prompts: Prompts,
        tokenizer: TextCodec,
        *,
        run_seed: int,
        generate: GenerateFn | None = None,
        rewards: RewardPool | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        # A pool that was handed in is shared, and its owner closes it.
        self._owns_rewards = rewards is None
        if rewards is None:
            data = prompts.config if isinstance(prompts, PromptSource) else None
            rewards = RewardPool(config.reward, build_reward(config.reward, data, seed=run_seed), tokenizer)
        self.rewards = rewards
        self._prompts = prompts
        self._run_seed = run_seed
        self._tokenizer = tokenizer
        self._generate = generate or generate_function(config)

    def close(self) -> None:
        if self._owns_rewards:
            self.rewards.close()

    async def may_prefetch(self) -> bool:
        """Whether requests can wait in the engine for a weight version that it does not serve yet."""
        if not getattr(self._generate, "waits_for_version", False):
            return False
        return "min_weight_version" in (await self.engine.info()).capabilities

    async def run(
        self, prompt: Prompt, *, attempt: int = 0, min_weight_version: int = 0, for_training: bool = False
    ) -> list[Sample]:
        """The group's samples, generated and judged. `attempt` > 0 draws anew, with other seeds. `for_training`: with
        what `rollout.reward` adds for their lengths."""
        config = self.config
        limit = (await self.engine.info()).context_length
        bounds = [b for b in (config.max_context, limit) if b is not None]
        ctx = GenerateContext(
            client=self.engine,
            config=config,
            max_context=min(bounds) if bounds else len(prompt.input_ids) + config.max_new_tokens,
            seeds=group_seeds(prompt, config, run_seed=self._run_seed, attempt=attempt),
            min_weight_version=min_weight_version,
            tokenizer=self._tokenizer,
        )
        samples = await self._generated(ctx, pending_group(prompt, config))
        if config.partial:
            samples = await self._continued(ctx, samples)
        await self.rewards.judge(RewardContext(prompt, self._prompts.score), samples)
        if for_training:
            shape_rewards(samples, config.reward, max_new_tokens=config.max_new_tokens)
        return samples

    async def run_all(
        self, prompts: Sequence[Prompt], *, min_weight_version: int = 0, for_training: bool = False
    ) -> list[list[Sample]]:
        """All groups at once, results in the order of the prompts. The first error cancels the others."""
        # Known before the tasks start, so that their requests travel in one call, in the first step of a life too.
        await self.engine.info()
        options: dict[str, Any] = {"min_weight_version": min_weight_version, "for_training": for_training}
        tasks = [asyncio.ensure_future(self.run(prompt, **options)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _generated(self, ctx: GenerateContext, pending: Sequence[Sample]) -> list[Sample]:
        sampling = ctx.sampling()
        whole_group: Any = getattr(self._generate, "group", None)
        if whole_group is not None:
            return await whole_group(ctx, pending, sampling)
        results = await asyncio.gather(*(self._generate(ctx, sample, sampling) for sample in pending))
        samples: list[Sample] = []
        for result in results:
            samples += result if isinstance(result, list) else [result]
        return [validate_sample(sample) for sample in samples]

    async def _continued(self, ctx: GenerateContext, samples: list[Sample]) -> list[Sample]:
        """Go on with aborted responses: what they have is kept, the rest of the budget is asked for."""
        for _ in range(MAX_CONTINUATIONS):
            aborted = [i for i, s in enumerate(samples) if s.status == Status.ABORTED]
            if not aborted:
                return samples
            continued = await self._generated(ctx, [samples[i] for i in aborted])
            if len(continued) != len(aborted):
                raise RolloutError("rollout.partial needs a generate function that returns one sample for each sample")
            for index, sample in zip(aborted, continued, strict=True):
                samples[index] = sample
        raise RolloutError(
            f"engine {self.engine.url}: sample {samples[aborted[0]].sample_id} was aborted {MAX_CONTINUATIONS} times in "
            "a row; see the engine's log"
        )


def check_versions(samples: Sequence[Sample], wanted: int, engine: str) -> None:
    """`EngineReplyError` for a sample with a token of another weight version than `wanted`."""
    for sample in samples:
        spans = sample.version_spans
        if spans is None:
            continue
        versions = set(spans[:, 0].tolist()) - {-1, wanted}
        if versions:
            raise EngineReplyError(
                f"engine {engine}: sample {sample.sample_id} has tokens of weight version "
                f"{', '.join(map(str, sorted(versions)))}, this step is on version {wanted}"
            )
