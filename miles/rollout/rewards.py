"""Rewards: from a finished sample to a finite number, in a bounded pool, with a time limit.

A reward is a float, or a dict whose key `reward` is the total and whose other keys are parts kept beside it.
Functions that only compare text are `inline`: called at once. Others run in threads, or await.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from miles.data.prompts import Prompt
from miles.data.sample import Sample
from miles.rollout.config import RewardConfig
from miles.rollout.errors import RewardError

Value = float | dict[str, float]


class Decoder(Protocol):
    def decode_batch(self, rows: Sequence[Any]) -> list[str]: ...


@dataclass(frozen=True)
class RewardContext:
    """What a reward function may use beside the completion's text."""

    prompt: Prompt
    # The task's own scorer, (completion, prompt) -> reward; of `PromptSource.score`.
    task_score: Callable[[str, Prompt], float] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardFn:
    """A named reward. `score(ctx, sample, completion)` is plain, or a coroutine function where `is_async`."""

    name: str
    score: Callable[[RewardContext, Sample, str], Value | Awaitable[Value]]
    inline: bool = False
    is_async: bool = False


class RewardPool:
    """Judges groups. `close()` when done; what hangs past its time limit is left behind and counted as an error."""

    def __init__(self, config: RewardConfig, fn: RewardFn, decoder: Decoder) -> None:
        self._config = config
        self._fn = fn
        self._decoder = decoder
        self._slots = asyncio.Semaphore(config.concurrency)
        self._threads: ThreadPoolExecutor | None = None
        self.errors = 0

    def take_errors(self) -> int:
        """Failed rewards since the last call."""
        errors, self.errors = self.errors, 0
        return errors

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def judge(self, ctx: RewardContext, group: Sequence[Sample]) -> None:
        """Set `reward` and `reward_parts` of the samples with an outcome. `RewardError` names the sample."""
        samples = [s for s in group if s.status.has_outcome]
        if not samples:
            return
        texts = self._decoder.decode_batch([s.tokens[s.prompt_length :] for s in samples])
        if self._fn.inline:
            for sample, text in zip(samples, texts, strict=True):
                try:
                    self._assign(sample, cast(Value, self._fn.score(ctx, sample, text)))
                except Exception as error:
                    self._failed(sample, error)
            return
        await asyncio.gather(*(self._one(ctx, s, t) for s, t in zip(samples, texts, strict=True)))

    async def _one(self, ctx: RewardContext, sample: Sample, text: str) -> None:
        async with self._slots:
            try:
                ask = self._fn.score if self._fn.is_async else self._in_thread
                call = cast(Awaitable[Value], ask(ctx, sample, text))
                self._assign(sample, await asyncio.wait_for(call, self._config.timeout_s))
            except TimeoutError:
                self._failed(
                    sample, TimeoutError(f"no reward within rollout.reward.timeout_s={self._config.timeout_s:g}")
                )
            except Exception as error:
                self._failed(sample, error)

    def _in_thread(self, ctx: RewardContext, sample: Sample, text: str) -> Awaitable[Value]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(min(self._config.concurrency, 8), thread_name_prefix="reward")
        plain = cast(Callable[[RewardContext, Sample, str], Value], self._fn.score)
        return asyncio.get_running_loop().run_in_executor(self._threads, plain, ctx, sample, text)

    def _assign(self, sample: Sample, value: Value) -> None:
        parts: dict[str, float] = {}
        if isinstance(value, dict):
            if "reward" not in value:
                raise RewardError(f"sample {sample.sample_id}: the reward's parts {sorted(value)} have no key 'reward'")
            parts = {k: float(v) for k, v in value.items() if k != "reward"}
            value = value["reward"]
        total = float(value)
        for name, number in (("reward", total), *parts.items()):
            if not math.isfinite(number):
                raise RewardError(
                    f"sample {sample.sample_id}: {name} is {number}; reward functions return finite numbers"
                )
        sample.reward, sample.reward_parts = total, parts

    def _failed(self, sample: Sample, error: Exception) -> None:
        """`on_error: mask` leaves the sample without a reward, which keeps it out of the loss."""
        self.errors += 1
        if self._config.on_error == "mask":
            sample.reward, sample.reward_parts = None, {}
            return
        if isinstance(error, RewardError):
            raise error
        raise RewardError(
            f"sample {sample.sample_id}: reward {self._fn.name} failed: {type(error).__name__}: {error}; fix the "
            "function, or set rollout.reward.on_error=mask"
        ) from error


def build_reward(config: RewardConfig) -> RewardFn:
    """The function of `rollout.reward.kind`; `ConfigError` for options that it does not take."""
    from miles.rollout.scorers import SCORERS

    return SCORERS[config.kind](config.options)
