"""`RewardPool`: judges the samples of a group, a bounded number at once, each with a time limit.

A sample's reward depends on the sample alone, never on who finished first; of several failures the first in the order
of the samples is raised.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Sequence
from typing import Any

from miles.data.sample import Sample
from miles.rollout.reward_worker.values import reward_and_parts
from miles.rollout.rewards.config import RewardConfig
from miles.rollout.rewards.failures import Failed
from miles.rollout.rewards.function import Decoder, RewardContext, RewardFn
from miles.rollout.rewards.processes import WorkerProcesses


class RewardPool:
    """`start()` early, so that worker processes are there when the first sample is; `close()` when done."""

    def __init__(self, config: RewardConfig, fn: RewardFn, decoder: Decoder) -> None:
        self._config = config
        self._fn = fn
        self._decoder = decoder
        self._masks = config.on_error == "mask" or (config.on_error == "auto" and fn.masks_errors)
        self._timeout_s = config.timeout_s
        at_once = config.concurrency
        self._processes: WorkerProcesses | None = None
        if fn.worker is not None:
            self._timeout_s = min(config.timeout_s, fn.worker.timeout_s or config.timeout_s)
            if fn.worker.computes:
                at_once = min(at_once, len(os.sched_getaffinity(0)))
            self._processes = WorkerProcesses(fn.worker, memory_gib=fn.worker.memory_gib or config.memory_gib)
        self._slots = asyncio.Semaphore(at_once)
        self.errors = 0

    def counting_apart(self) -> RewardPool:
        """The same function, processes and slots with a count of errors of its own; closing it is this pool's part."""
        other = copy.copy(self)
        other.errors = 0
        return other

    def start(self) -> None:
        """Start what worker processes are copied from; returns at once."""
        if self._processes is not None:
            self._processes.start()

    def take_errors(self) -> int:
        """Failed rewards since the last call."""
        errors, self.errors = self.errors, 0
        return errors

    def close(self) -> None:
        """No process is left, whatever it was doing."""
        if self._processes is not None:
            self._processes.close()

    async def judge(self, ctx: RewardContext, group: Sequence[Sample]) -> None:
        """Set `reward` and `reward_parts` of the samples with an outcome. `RewardError` names the sample."""
        samples = [s for s in group if s.status.has_outcome]
        if not samples:
            return
        texts = self._decoder.decode_batch([s.tokens[s.prompt_length :] for s in samples])
        if self._fn.inline is not None:
            failures = [self._at_once(ctx, s, t) for s, t in zip(samples, texts, strict=True)]
        else:
            failures = await asyncio.gather(*(self._one(ctx, s, t) for s, t in zip(samples, texts, strict=True)))
        failed = [failure for failure in failures if failure is not None]
        self.errors += len(failed)
        if failed and not self._masks:
            raise failed[0].raised()

    def _at_once(self, ctx: RewardContext, sample: Sample, text: str) -> Failed | None:
        assert self._fn.inline is not None
        try:
            sample.reward, sample.reward_parts = reward_and_parts(self._fn.inline(ctx, sample, text))
            return None
        except Exception as error:
            return self._failed(sample, text, error)

    async def _one(self, ctx: RewardContext, sample: Sample, text: str) -> Failed | None:
        try:
            quick = self._fn.quick(text, ctx.prompt.answer) if self._fn.quick is not None else None
            if quick is not None:
                sample.reward, sample.reward_parts = quick, {}
                return None
            async with self._slots:
                ask = self._awaited if self._processes is None else self._in_worker
                sample.reward, sample.reward_parts = await ask(ctx, sample, text)
            return None
        except Exception as error:
            return self._failed(sample, text, error)

    async def _in_worker(self, ctx: RewardContext, sample: Sample, text: str) -> tuple[float, dict[str, float]]:
        assert self._processes is not None
        return await self._processes.call(
            completion=text,
            answer=ctx.prompt.answer,
            metadata=ctx.prompt.metadata,
            seed_text=sample.sample_id,
            timeout_s=self._timeout_s,
        )

    async def _awaited(self, ctx: RewardContext, sample: Sample, text: str) -> tuple[float, dict[str, float]]:
        assert self._fn.awaited is not None
        task: asyncio.Future[Any] = asyncio.ensure_future(self._fn.awaited(ctx, sample, text))
        try:
            # A coroutine that ignores its cancellation is left behind: nobody waits for it.
            done, _ = await asyncio.wait((task,), timeout=self._timeout_s)
        except BaseException:
            task.cancel()
            raise
        if not done:
            task.cancel()
            raise TimeoutError(f"no reward within rollout.reward.timeout_s={self._timeout_s:g}")
        if task.cancelled():
            raise RuntimeError("the function cancelled its own task")
        return reward_and_parts(task.result())

    def _failed(self, sample: Sample, text: str, error: Exception) -> Failed:
        """Without a reward the sample is kept out of the loss, where the run goes on."""
        sample.reward, sample.reward_parts = None, {}
        return Failed(sample.sample_id, self._fn.name, text, error)
