"""`SyncRollout`: the samples of one training step, on policy, the same for the same seeds whatever the timing.

Groups are asked for in waves. The verdict on each group depends on the group alone and groups are taken in the order
of their prompts, so which ones are trained on does not depend on who finished first.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from miles.data.prompts import Prompt
from miles.data.sample import Sample, Status, validate_sample
from miles.rollout.config import RolloutConfig
from miles.rollout.engine import EngineClient
from miles.rollout.errors import EngineReplyError, RolloutError
from miles.rollout.filters import ZERO_SPREAD, FilterChain, counted_rewards
from miles.rollout.generate import GenerateContext, GenerateFn, group_seeds, pending_group, single_turn
from miles.rollout.rewards import Decoder, RewardContext, RewardFn, RewardPool, build_reward


class Prompts(Protocol):
    """What a rollout needs of `miles.data.prompts.PromptSource`."""

    def next_groups(self, count: int) -> list[Prompt]: ...
    def score(self, completion: str, prompt: Prompt) -> float: ...


@dataclass(slots=True)
class RolloutBatch:
    """`samples` in group order; `metrics` by name (`rollout/...`); `weight_version` of every token when on policy."""

    samples: list[Sample]
    metrics: dict[str, float]
    weight_version: int


@dataclass(slots=True)
class _Counts:
    surplus: int = 0
    waves: int = 0
    refused: list[Sample] = field(default_factory=list)


class SyncRollout:
    """Use inside one event loop. `max_context` None: the engine's own limit."""

    def __init__(
        self,
        config: RolloutConfig,
        client: EngineClient,
        prompts: Prompts,
        decoder: Decoder,
        *,
        run_seed: int,
        generate: GenerateFn = single_turn,
        reward: RewardFn | None = None,
    ) -> None:
        self._config = config
        self._client = client
        self._prompts = prompts
        self._run_seed = run_seed
        self._generate = generate
        self._rewards = RewardPool(config.reward, reward or build_reward(config.reward), decoder)
        self._filters = FilterChain(config.filters, starvation_limit=config.starvation_limit)

    def close(self) -> None:
        self._rewards.close()

    async def collect(self, step: int, *, weight_version: int | None = None) -> RolloutBatch:
        """`batch_groups` accepted groups. With `weight_version`, tokens of any other version are an error."""
        started = time.perf_counter()
        wanted, counts = self._config.batch_groups, _Counts()
        accepted: list[list[Sample]] = []
        while len(accepted) < wanted:
            missing = wanted - len(accepted)
            prompts = self._prompts.next_groups(math.ceil(missing * self._config.over_sampling))
            groups = await run_groups(self, prompts)
            counts.waves += 1
            for group in groups:
                if len(accepted) == wanted:
                    counts.surplus += 1
                elif self._filters.judge(group).keep:
                    accepted.append(group)
                else:
                    counts.refused += group
        samples = [sample for group in accepted for sample in group]
        if weight_version is not None:
            _check_versions(samples, weight_version, self._client.url)
        metrics = rollout_metrics(accepted, counts.refused)
        metrics["rollout/waves"] = float(counts.waves)
        metrics["rollout/surplus_groups"] = float(counts.surplus)
        metrics["rollout/reward_errors"] = float(self._rewards.errors)
        self._rewards.errors = 0
        for reason, count in self._filters.take_counts().items():
            metrics[f"rollout/refused/{reason}"] = float(count)
        metrics["time/rollout"] = time.perf_counter() - started
        return RolloutBatch(samples, metrics, _version_of(samples))

    async def evaluate(self, prompts: Sequence[Prompt]) -> RolloutBatch:
        """Groups for given prompts, unfiltered, in order."""
        groups = await run_groups(self, prompts)
        samples = [sample for group in groups for sample in group]
        metrics = {k.replace("rollout/", "eval/", 1): v for k, v in rollout_metrics(groups, []).items()}
        return RolloutBatch(samples, metrics, _version_of(samples))

    async def run_group(self, prompt: Prompt, *, attempt: int = 0) -> list[Sample]:
        """One group, generated and judged."""
        config = self._config
        limit = (await self._client.info()).context_length
        bounds = [b for b in (config.max_context, limit) if b is not None]
        ctx = GenerateContext(
            client=self._client,
            config=config,
            max_context=min(bounds) if bounds else len(prompt.input_ids) + config.max_new_tokens,
            seeds=group_seeds(prompt, config, run_seed=self._run_seed, attempt=attempt),
        )
        samples = await self._generated(ctx, pending_group(prompt, config))
        await self._rewards.judge(RewardContext(prompt, self._prompts.score, config.reward.options), samples)
        return samples

    async def _generated(self, ctx: GenerateContext, pending: list[Sample]) -> list[Sample]:
        sampling = ctx.sampling()
        whole_group: Any = getattr(self._generate, "group", None)
        if whole_group is not None:
            return await whole_group(ctx, pending, sampling)
        results = await asyncio.gather(*(self._generate(ctx, sample, sampling) for sample in pending))
        samples: list[Sample] = []
        for result in results:
            samples += result if isinstance(result, list) else [result]
        return [validate_sample(sample) for sample in samples]


async def run_groups(rollout: SyncRollout, prompts: Sequence[Prompt]) -> list[list[Sample]]:
    """All groups at once, results in the order of the prompts. The first error cancels the others."""
    tasks = [asyncio.ensure_future(rollout.run_group(prompt)) for prompt in prompts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _check_versions(samples: Sequence[Sample], wanted: int, engine: str) -> None:
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


def _version_of(samples: Sequence[Sample]) -> int:
    versions = [
        int(s.version_spans[:, 0].max()) for s in samples if s.version_spans is not None and len(s.version_spans)
    ]
    if not versions:
        raise RolloutError("no sample of this step has a token; every request was aborted")
    return min(versions)


def rollout_metrics(groups: Sequence[Sequence[Sample]], refused: Sequence[Sample]) -> dict[str, float]:
    """Means over samples, from raw lengths and statuses. `reward_mean_all` includes refused groups."""
    samples = [s for group in groups for s in group]
    rewards = np.array([s.reward for s in samples if s.reward is not None], dtype=np.float64)
    every = np.concatenate((rewards, [s.reward for s in refused if s.reward is not None]))
    lengths = np.array([len(s.tokens) - s.prompt_length for s in samples], dtype=np.float64)
    n = max(len(samples), 1)
    spreads = [float(np.ptp(r)) if len(r := counted_rewards(group)) else 0.0 for group in groups]
    prompt_tokens = sum(s.prefix_cache.get("prompt_tokens", 0) for s in samples)
    cached = sum(s.prefix_cache.get("cached_tokens", 0) for s in samples)
    return {
        "rollout/reward_mean": float(rewards.mean()) if len(rewards) else 0.0,
        "rollout/reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "rollout/reward_mean_all": float(every.mean()) if len(every) else 0.0,
        "rollout/samples": float(len(samples)),
        "rollout/response_tokens": float(lengths.sum()),
        "rollout/response_length_mean": float(lengths.mean()) if len(lengths) else 0.0,
        "rollout/response_length_max": float(lengths.max()) if len(lengths) else 0.0,
        "rollout/truncated_frac": sum(s.status == Status.TRUNCATED for s in samples) / n,
        "rollout/aborted_frac": sum(not s.status.has_outcome for s in samples) / n,
        "rollout/zero_std_frac": sum(s <= ZERO_SPREAD for s in spreads) / max(len(groups), 1),
        "rollout/prefix_cached_frac": cached / max(prompt_tokens, 1),
    }
