"""`SyncRollout`: the samples of one training step, on policy, the same for the same seeds whatever the timing.

Groups are asked for in waves. The verdict on each group depends on the group alone and groups are taken in the order
of their prompts, so which ones are trained on does not depend on who finished first. The first wave may be sent while
the weights that it is for are still being trained: the engine holds it back until it serves them. The asynchronous
form is `AsyncRollout`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles.config import ConfigError
from miles.data.prompts import Prompt
from miles.data.sample import Sample
from miles.rollout.config import RolloutConfig
from miles.rollout.engine import Engine
from miles.rollout.errors import RolloutError, RolloutStarved
from miles.rollout.filters import FilterChain
from miles.rollout.generate import GenerateFn, TextCodec
from miles.rollout.groups import GroupRunner, Prompts, check_versions
from miles.rollout.metrics import oldest_version, rollout_metrics
from miles.rollout.protocol import RolloutBatch
from miles.rollout.rewards import RewardPool


class SyncRollout:
    """`start(version)`, then for each step `collect`, train, sync, `on_new_version(version)`; `close()` at the end.

    `prefetch` may be called while a step trains. Use inside one event loop.
    """

    def __init__(
        self,
        config: RolloutConfig,
        client: Engine,
        prompts: Prompts,
        tokenizer: TextCodec,
        *,
        run_seed: int,
        generate: GenerateFn | None = None,
        rewards: RewardPool | None = None,
    ) -> None:
        if config.max_staleness:
            raise ConfigError(
                f"rollout.max_staleness is {config.max_staleness}, but the loop is synchronous; set it to 0, or run the "
                "asynchronous loop"
            )
        self._config = config
        self._prompts = prompts
        self._runner = GroupRunner(
            config, client, prompts, tokenizer, run_seed=run_seed, generate=generate, rewards=rewards
        )
        self._filters = FilterChain(config.filters, starvation_limit=config.starvation_limit)
        self._version: int | None = None
        self._prefetched: _Wave | None = None
        # Where the stream stood before prompts were drawn for the prefetched wave: what a checkpoint must hold.
        self._cursor: dict[str, Any] | None = None

    async def start(self, version: int) -> None:
        """Every engine serves `version`; tokens of any other are an error from here on."""
        self._version = version

    async def prefetch(self, version: int) -> None:
        """Send the first wave of the next `collect` now, to be started by the engine once it serves `version`.

        Nothing is drawn or sent where the engine or the generate function cannot wait for a version.
        """
        if await self._runner.may_prefetch():
            self._cursor = self._prompts.state()
            self._prefetched = self._wave(self._config.batch_groups, version)

    async def on_new_version(self, version: int) -> None:
        """Every engine serves `version`."""
        self._version = version

    async def hold(self) -> None:
        """Nothing: between steps nothing is submitted."""

    async def release(self) -> None:
        """Nothing was held back."""

    async def on_skipped_step(self) -> None:
        """The version that `prefetch` named does not come: the same prompts, of what is served."""
        if self._prefetched is not None:
            await self._prefetched.cancel()
            self._prefetched = self._send(self._prefetched.prompts, 0)

    async def close(self) -> None:
        """Requests on their way are aborted."""
        if self._prefetched is not None:
            await self._prefetched.cancel()
        self._runner.close()

    def state(self) -> dict[str, Any]:
        """JSON cursor of the stream, before the prompts that were prefetched but not collected."""
        return {"prompts": self._prompts.state() if self._cursor is None else self._cursor}

    def restore(self, state: dict[str, Any]) -> None:
        """Before `start`: the stream goes on from where `state` was taken."""
        self._prompts.restore(state["prompts"])

    async def collect(self, step: int) -> RolloutBatch:
        """`batch_groups` groups, every token of the version that the engines serve.

        All of them are accepted ones, unless `filters.max_waves` ended the search and `filters.at_limit` is train: then
        refused groups fill the batch, marked `removed`, so that they are in no loss and the step keeps its size.
        """
        if self._version is None:
            raise RolloutError(
                f"step {step} has no weight version to check its tokens against; call start(version) first"
            )
        wanted = self._config.batch_groups
        accepted: list[list[Sample]] = []
        refused: list[list[Sample]] = []
        waves = surplus = 0
        while len(accepted) < wanted and waves != self._config.filters.max_waves:
            wave, self._prefetched = self._prefetched or self._wave(wanted - len(accepted), 0), None
            waves += 1
            for group in await wave.groups():
                if len(accepted) == wanted:
                    surplus += 1
                elif self._filters.judge(group).keep:
                    accepted.append(group)
                else:
                    refused.append(group)
        self._cursor = None
        counts = self._filters.take_counts()
        fill = self._fill(step, wanted - len(accepted), refused, counts)
        accepted += fill
        refused = refused[len(fill) :]
        samples = [sample for group in accepted for sample in group]
        check_versions(samples, self._version, self._runner.engine.url)
        metrics = rollout_metrics(accepted, [sample for group in refused for sample in group])
        metrics["rollout/waves"] = float(waves)
        metrics["rollout/surplus_groups"] = float(surplus)
        metrics["rollout/filled_groups"] = float(len(fill))
        metrics |= {f"rollout/refused/{reason}": float(n) for reason, n in counts.items()}
        metrics["rollout/reward_errors"] = float(self._runner.rewards.take_errors())
        return RolloutBatch(samples, metrics, _version_of(samples))

    def _fill(
        self, step: int, missing: int, refused: Sequence[list[Sample]], counts: Mapping[str, int]
    ) -> list[list[Sample]]:
        """The first refused groups in the place of missing ones, marked as removed. `RolloutStarved` under
        `filters.at_limit` error."""
        filters = self._config.filters
        if missing and filters.at_limit == "error":
            reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(counts.items()))
            raise RolloutStarved(
                f"step {step}: {filters.max_waves} waves of requests (rollout.filters.max_waves) left {missing} of "
                f"{self._config.batch_groups} groups missing, {len(refused)} were refused ({reasons}); raise max_waves or "
                "rollout.over_sampling, use easier or harder prompts, or set rollout.filters.at_limit=train"
            )
        fill = list(refused[:missing])
        for group in fill:
            for sample in group:
                sample.removed = True
        return fill

    def _wave(self, missing: int, min_weight_version: int) -> _Wave:
        """Draw prompts for `missing` groups and ask for them."""
        return self._send(
            self._prompts.next_groups(math.ceil(missing * self._config.over_sampling)), min_weight_version
        )

    def _send(self, prompts: Sequence[Prompt], min_weight_version: int) -> _Wave:
        groups = self._runner.run_all(prompts, min_weight_version=min_weight_version, for_training=True)
        return _Wave(prompts, asyncio.ensure_future(groups))


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


def _version_of(samples: Sequence[Sample]) -> int:
    version = oldest_version(samples)
    if version is None:
        raise RolloutError("no sample of this step has a token; every request was aborted")
    return version
