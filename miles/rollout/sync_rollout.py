"""`SyncRollout`: the samples of one training step, on policy, the same for the same seeds whatever the timing.

Groups are asked for in waves. The verdict on each group depends on the group alone and groups are taken in the order
of their prompts, so which ones are trained on does not depend on who finished first. The first wave may be sent while
the weights that it is for are still being trained: the engine holds it back until it serves them. The asynchronous
form is `AsyncRollout`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from miles.config import ConfigError
from miles.data.prompts import Prompt
from miles.data.sample import Sample
from miles.rollout.async_rollout import AsyncRollout, GroupBuffer
from miles.rollout.config import RolloutConfig
from miles.rollout.engine import Engine
from miles.rollout.errors import EngineReplyError, RolloutError
from miles.rollout.filters import FilterChain
from miles.rollout.generate import GenerateFn, single_turn
from miles.rollout.groups import GroupRunner, Prompts, RolloutBatch
from miles.rollout.metrics import oldest_version, rollout_metrics
from miles.rollout.rewards import Decoder, RewardFn

__all__ = ["AsyncRollout", "GroupBuffer", "RolloutBatch", "SyncRollout"]


class SyncRollout:
    """Use inside one event loop. Call `close` when done."""

    def __init__(
        self,
        config: RolloutConfig,
        client: Engine,
        prompts: Prompts,
        decoder: Decoder,
        *,
        run_seed: int,
        generate: GenerateFn = single_turn,
        reward: RewardFn | None = None,
    ) -> None:
        if config.max_staleness:
            raise ConfigError(
                f"rollout.max_staleness is {config.max_staleness}, but the loop is synchronous; set it to 0, or run the "
                "asynchronous loop"
            )
        self._config = config
        self._prompts = prompts
        self._runner = GroupRunner(
            config, client, prompts, decoder, run_seed=run_seed, generate=generate, reward=reward
        )
        self._filters = FilterChain(config.filters, starvation_limit=config.starvation_limit)
        self._early: _Wave | None = None

    async def close(self) -> None:
        """Requests on their way are aborted."""
        if self._early is not None:
            await self._early.cancel()
        self._runner.close()

    async def ask_early(self, weight_version: int) -> bool:
        """Send the first wave of the next `collect` now, to be started by the engine once it serves `weight_version`.

        False, and nothing was drawn or sent, where the engine or the generate function cannot wait for a version.
        """
        if not await self._runner.may_ask_early():
            return False
        self._early = self._wave(self._config.batch_groups, weight_version)
        return True

    async def ask_again(self) -> None:
        """The version that `ask_early` named does not come: the same prompts, of whatever is served."""
        if self._early is not None:
            await self._early.cancel()
            self._early = self._send(self._early.prompts, 0)

    async def collect(self, step: int, *, weight_version: int | None = None) -> RolloutBatch:
        """`batch_groups` accepted groups. With `weight_version`, tokens of any other version are an error."""
        started = time.perf_counter()
        wanted = self._config.batch_groups
        accepted: list[list[Sample]] = []
        refused: list[Sample] = []
        waves = surplus = 0
        while len(accepted) < wanted:
            wave, self._early = self._early or self._wave(wanted - len(accepted), 0), None
            waves += 1
            for group in await wave.groups():
                if len(accepted) == wanted:
                    surplus += 1
                elif self._filters.judge(group).keep:
                    accepted.append(group)
                else:
                    refused += group
        samples = [sample for group in accepted for sample in group]
        if weight_version is not None:
            _check_versions(samples, weight_version, self._runner.engine.url)
        metrics = rollout_metrics(accepted, refused)
        metrics["rollout/waves"] = float(waves)
        metrics["rollout/surplus_groups"] = float(surplus)
        metrics |= {f"rollout/refused/{reason}": float(n) for reason, n in self._filters.take_counts().items()}
        metrics["rollout/reward_errors"] = float(self._runner.rewards.take_errors())
        metrics["time/rollout"] = time.perf_counter() - started
        return RolloutBatch(samples, metrics, _version_of(samples))

    def _wave(self, missing: int, min_weight_version: int) -> _Wave:
        """Draw prompts for `missing` groups and ask for them."""
        return self._send(
            self._prompts.next_groups(math.ceil(missing * self._config.over_sampling)), min_weight_version
        )

    def _send(self, prompts: Sequence[Prompt], min_weight_version: int) -> _Wave:
        return _Wave(
            prompts, asyncio.ensure_future(self._runner.run_all(prompts, min_weight_version=min_weight_version))
        )

    async def evaluate(self, prompts: Sequence[Prompt]) -> RolloutBatch:
        """Groups for given prompts, unfiltered, in order."""
        groups = await self._runner.run_all(prompts)
        samples = [sample for group in groups for sample in group]
        metrics = {k.replace("rollout/", "eval/", 1): v for k, v in rollout_metrics(groups, []).items()}
        return RolloutBatch(samples, metrics, _version_of(samples))


@dataclass(frozen=True)
class _Wave:
    """Prompts and the task that generates their groups."""

    prompts: Sequence[Prompt]
    task: asyncio.Task[list[list[Sample]]]

    async def groups(self) -> list[list[Sample]]:
        """Cancelling the caller aborts the requests."""
        return await self.task

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


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
    version = oldest_version(samples)
    if version is None:
        raise RolloutError("no sample of this step has a token; every request was aborted")
    return version
