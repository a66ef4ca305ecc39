"""`AsyncRollout`: groups are generated while the trainer trains, at most `max_staleness` versions behind.

Group n (0-based; refused and dropped ones give their number back) is submitted only if
floor(n / batch_groups) <= trained version + max_staleness. At drain, a group whose oldest trained token is more than
max_staleness versions old is dropped and its prompt submitted anew. With max_staleness 0 a step has the same samples
as `SyncRollout` with over_sampling 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.config import ConfigError
from miles.data.prompts import Prompt
from miles.data.sample import Sample, Status
from miles.rollout.config import RolloutConfig
from miles.rollout.engine import Engine
from miles.rollout.errors import RolloutError
from miles.rollout.filters import FilterChain
from miles.rollout.generate import GenerateFn, TextCodec
from miles.rollout.groups import GroupRunner, Prompts
from miles.rollout.metrics import oldest_version, rollout_metrics
from miles.rollout.protocol import RolloutBatch
from miles.rollout.rewards import RewardPool

MAX_ATTEMPTS = 64


@dataclass(slots=True)
class _Submission:
    prompt: Prompt
    attempt: int = 0
    task: asyncio.Task[None] | None = None
    samples: list[Sample] | None = None


@dataclass
class GroupBuffer:
    """Finished, accepted groups in order of completion, and what is still under way. Plain bookkeeping."""

    finished: list[_Submission] = field(default_factory=list)
    running: dict[int, _Submission] = field(default_factory=dict)
    again: list[_Submission] = field(default_factory=list)  # to be submitted before new prompts

    @property
    def undelivered(self) -> list[_Submission]:
        everything = [*self.again, *self.running.values(), *self.finished]
        return sorted(everything, key=lambda s: s.prompt.prompt_id)


class AsyncRollout:
    """`start(version)`, then for each step `collect`, train, sync, `on_new_version(version)`; `close()` at the end."""

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
        if config.over_sampling != 1.0:
            raise ConfigError(
                f"rollout.over_sampling is {config.over_sampling:g}, but asynchronous rollouts keep max_staleness batches "
                "in flight instead; set rollout.over_sampling to 1"
            )
        self.config = config
        self.buffer = GroupBuffer()
        self.trained_version = 0
        self._prompts = prompts
        self._runner = GroupRunner(
            config, client, prompts, tokenizer, run_seed=run_seed, generate=generate, rewards=rewards
        )
        self._filters = FilterChain(config.filters, starvation_limit=config.starvation_limit)
        self._submitted = 0  # numbers given out and not given back
        self._closed = False
        self._held = False
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._refused: list[Sample] = []
        self._dropped = self._resubmitted = 0

    async def start(self, version: int) -> None:
        """Begin to submit. `version` is the one that the trainer has; numbers start with its step."""
        self.trained_version = version
        self._submitted += version * self.config.batch_groups
        self._submit()

    async def prefetch(self, version: int) -> None:
        """Nothing: what the bound allows is on its way already."""

    async def on_new_version(self, version: int) -> None:
        """The trainer finished a step and every engine has `version`."""
        if version < self.trained_version:
            raise RolloutError(f"weight version {version} is below {self.trained_version}; versions only grow")
        self.trained_version = version
        self._submit()

    async def on_skipped_step(self) -> None:
        """The last batch counted nothing, so no version came of it: its numbers are free again."""
        self._submitted -= self.config.batch_groups
        self._submit()

    async def hold(self) -> None:
        """Groups under way go on; no other is submitted until `release`."""
        self._held = True

    async def release(self) -> None:
        """Submit what the rule allows by now."""
        self._held = False
        self._submit()

    async def collect(self, step: int) -> RolloutBatch:
        """The next `batch_groups` groups to finish, within the staleness bound, in the order of their prompts."""
        wanted = self.config.batch_groups
        accepted: list[_Submission] = []
        while len(accepted) < wanted:
            self._raise_error()
            self._changed.clear()
            while self.buffer.finished and len(accepted) < wanted:
                submission = self.buffer.finished.pop(0)
                if self._staleness(submission) > self.config.max_staleness:
                    self._dropped += 1
                    self._give_back(submission)
                else:
                    accepted.append(submission)
            if len(accepted) < wanted:
                if not self.buffer.running:
                    raise RolloutError(
                        f"step {step} has {len(accepted)} of {wanted} groups and nothing runs; call "
                        "on_new_version(version) after each step"
                    )
                await self._changed.wait()
        accepted.sort(key=lambda s: s.prompt.prompt_id)
        return self._batch(accepted)

    def state(self) -> dict[str, Any]:
        """JSON cursor: the stream's, and the prompts that were drawn but not delivered."""
        undelivered = [[s.prompt.prompt_id, s.attempt] for s in self.buffer.undelivered]
        return {"prompts": self._prompts.state(), "undelivered": undelivered}

    def restore(self, state: dict[str, Any]) -> None:
        """Before `start`: undelivered prompts are drawn again, first and with the same seeds."""
        for prompt_id, attempt in state["undelivered"]:
            self._prompts.restore({**state["prompts"], "next_index": prompt_id})
            self.buffer.again.append(_Submission(self._prompts.next_groups(1)[0], attempt))
        self._prompts.restore(state["prompts"])

    async def close(self) -> None:
        """Requests on their way are aborted."""
        self._closed = True
        tasks = [s.task for s in self.buffer.running.values() if s.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._runner.close()

    def _submit(self) -> None:
        """Start whatever the rule allows."""
        if self._closed or self._held or self._error is not None:
            return
        limit = (self.trained_version + self.config.max_staleness + 1) * self.config.batch_groups
        while self._submitted < limit:
            if self.buffer.again:
                submission = self.buffer.again.pop(0)
            else:
                submission = _Submission(self._prompts.next_groups(1)[0])
            self._submitted += 1
            self.buffer.running[submission.prompt.prompt_id] = submission
            submission.task = asyncio.ensure_future(self._run(submission))

    async def _run(self, submission: _Submission) -> None:
        try:
            samples = await self._runner.run(submission.prompt, attempt=submission.attempt, for_training=True)
            del self.buffer.running[submission.prompt.prompt_id]
            if any(s.status == Status.ABORTED for s in samples):
                self._resubmitted += 1
                self._give_back(submission)
            elif self._filters.judge(samples).keep:
                submission.samples = samples
                self.buffer.finished.append(submission)
            else:
                self._refused += samples
                self._submitted -= 1
                self._submit()
        except Exception as error:
            self._error = self._error or error
        finally:
            self._changed.set()

    def _give_back(self, submission: _Submission) -> None:
        """Its number is free again and the prompt goes to the front of the line."""
        if submission.attempt + 1 >= MAX_ATTEMPTS:
            raise RolloutError(
                f"prompt {submission.prompt.prompt_id} was dropped or aborted {MAX_ATTEMPTS} times; raise "
                "rollout.max_staleness, or shorten responses"
            )
        self._submitted -= 1
        self.buffer.again.append(_Submission(submission.prompt, submission.attempt + 1))
        self._submit()

    def _staleness(self, submission: _Submission) -> int:
        oldest = oldest_version(submission.samples or [])
        return 0 if oldest is None else self.trained_version - oldest

    def _batch(self, accepted: Sequence[_Submission]) -> RolloutBatch:
        groups = [s.samples or [] for s in accepted]
        metrics = rollout_metrics(groups, self._refused)
        staleness = [self._staleness(s) for s in accepted]
        metrics |= {
            "rollout/staleness_mean": sum(staleness) / len(staleness),
            "rollout/staleness_max": float(max(staleness)),
            "rollout/dropped_stale": float(self._dropped),
            "rollout/resubmitted_aborted": float(self._resubmitted),
            "rollout/reward_errors": float(self._runner.rewards.take_errors()),
        }
        metrics |= {f"rollout/refused/{reason}": float(n) for reason, n in self._filters.take_counts().items()}
        self._refused, self._dropped, self._resubmitted = [], 0, 0
        samples = [sample for group in groups for sample in group]
        oldest = oldest_version(samples)
        return RolloutBatch(samples, metrics, self.trained_version if oldest is None else oldest)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
