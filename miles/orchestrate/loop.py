"""The training loop: rollout, advantages, optimizer step, weight sync, record, checkpoint; then again.

Synchronous and on-policy: step k generates with weight version k and trains version k + 1. Everything that a
step depends on is in the checkpoint (weights, optimizer, prompt cursor), so a resumed run repeats it bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles.algos.estimate import prepare_steps
from miles.data.prompts import PromptSource
from miles.data.sample import Sample
from miles.data.schedule import ScheduleConfig
from miles.orchestrate.errors import RunError
from miles.orchestrate.fleet import Fleet
from miles.orchestrate.run_folder import RunFolder
from miles.recipe import Recipe
from miles.rollout.loop import SyncRollout

Row = dict[str, Any]


@dataclass
class TrainingLoop:
    """One run's loop over a started fleet. `record` receives each finished step's row."""

    recipe: Recipe
    fleet: Fleet
    rollout: SyncRollout
    prompts: PromptSource
    folder: RunFolder
    pad_id: int
    record: Callable[[Row], None]
    before_checkpoint: Callable[[], None]

    async def run(self, first_step: int) -> None:
        """Steps `first_step` to `run.steps` - 1; a checkpoint now and then and after the last."""
        recipe = self.recipe
        if first_step:
            await self.push(first_step)
        for step in range(first_step, recipe.run.steps):
            self.record(await self.one_step(step))
            done = step + 1
            if done % recipe.run.checkpoint_every == 0 or done == recipe.run.steps:
                await self.save(done)

    async def one_step(self, step: int) -> Row:
        """Generate, train, sync; returns the row of `metrics.jsonl`."""
        start = time.perf_counter()
        batch = await self.rollout.collect(step)
        generated = time.perf_counter()
        metrics = await self.train(batch.samples)
        trained = time.perf_counter()
        await self.push(step + 1)
        end = time.perf_counter()
        tokens = sum(sample.response_length for sample in batch.samples)
        return {
            "step": step,
            **batch.metrics,
            **metrics,
            "rollout/tokens_per_s": tokens / (generated - start),
            "time/rollout": generated - start,
            "time/train": trained - generated,
            "time/sync": end - trained,
            "time/step": end - start,
        }

    async def train(self, samples: list[Sample]) -> dict[str, float]:
        """Advantages, schedule and the optimizer step on every rank."""
        recipe = self.recipe
        prepared = prepare_steps(
            samples,
            recipe.algo,
            self.schedule(),
            pad_id=self.pad_id,
            pad_multiple=recipe.train.parallel.tp if recipe.train.parallel.sp else 1,
            use_support=recipe.rollout.needs_sampling_mask and recipe.algo.support_log_probs == "auto",
        )
        if len(prepared.steps) != 1:
            raise RunError(f"{len(prepared.steps)} optimizer steps were prepared for one rollout; expected 1")
        batch = prepared.steps[0]
        arguments = [(batch.for_rank(dp_rank),) for dp_rank in self.fleet.dp_ranks]
        results = await self.fleet.on_workers("step", arguments)
        return {**prepared.metrics, **batch.metrics, **results[0]}

    def schedule(self) -> ScheduleConfig:
        """The data-parallel schedule's settings for this mesh."""
        data, parallel = self.recipe.data, self.recipe.train.parallel
        return ScheduleConfig(
            data_parallel=parallel.dp,
            context_parallel=parallel.cp,
            max_tokens_per_gpu=data.max_tokens_per_gpu,
            balance=data.balance,
            layout=data.layout,
            partial_step=data.partial_step,
        )

    async def push(self, version: int) -> None:
        """Bring every engine to `version`; an engine that fails ends the run (the same command resumes)."""
        reports = await self.fleet.on_all_workers("push", version)
        failed = {url: state for url, state in reports[0]["engines"].items() if state != "serving"}
        if failed:
            lines = "; ".join(f"{url}: {state}" for url, state in failed.items())
            raise RunError(f"weight version {version} did not reach every engine: {lines}")

    async def save(self, step: int) -> None:
        """Checkpoint after `step` steps: rows up to here are durable before the checkpoint says so."""
        self.before_checkpoint()
        extra = {"step": step, "weight_version": step, "prompts": self.prompts.state()}
        await self.fleet.on_all_workers("save", self.folder.checkpoints, extra)


def accuracy(samples: list[Sample]) -> float:
    """Mean reward of evaluated samples."""
    return float(np.mean([sample.reward for sample in samples]))
