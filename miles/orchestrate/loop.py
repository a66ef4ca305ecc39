"""The training loop: rollout, advantages, optimizer step, weight sync, record, checkpoint; then again.

A step that trains makes the next weight version; one that counts nothing makes none. On policy, everything that a
step depends on is in the checkpoint (weights, optimizer, prompt cursor), so a resumed run repeats it bit for bit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles.algos.config import AlgoConfig
from miles.algos.step_batches import gather_scores, prepare_scoring, prepare_steps
from miles.data.packing import FlopsShape
from miles.data.sample import Sample
from miles.data.schedule import ScheduleConfig
from miles.orchestrate.actor_group import RESUME_HINT, ActorGroup
from miles.orchestrate.actors import BundlePlace
from miles.orchestrate.errors import RunError
from miles.orchestrate.rollout_source import RolloutSource
from miles.orchestrate.run_folder import RunFolder
from miles.recipe import Recipe

Row = dict[str, Any]


@dataclass
class TrainingLoop:
    """One run's loop over a started actor group. `record` receives each finished step's row."""

    recipe: Recipe
    actors: ActorGroup
    source: RolloutSource
    folder: RunFolder
    pad_id: int
    record: Callable[[Row], None]
    before_checkpoint: Callable[[], None]
    version: int = 0
    # What balancing by FLOPs needs to know of the model.
    flops: FlopsShape | None = None

    async def run(self, first_step: int) -> None:
        """Steps `first_step` to `run.steps` - 1; a checkpoint now and then and after the last."""
        recipe = self.recipe
        if self.version:
            check_engines(self.version, (await self.actors.on_all_workers("push", self.version))[0])
        await self.source.start(self.version)
        for step in range(first_step, recipe.run.steps):
            self.record(await self.one_step(step))
            done = step + 1
            if done % recipe.run.checkpoint_every == 0 or done == recipe.run.steps:
                await self.save(done)

    async def one_step(self, step: int) -> Row:
        """Generate, train, sync; returns the row of `metrics.jsonl`."""
        start = time.perf_counter()
        batch = await self.source.collect(step)
        generated = time.perf_counter()
        metrics = await self.train(step, batch.samples)
        end = time.perf_counter()
        tokens = sum(sample.response_length for sample in batch.samples)
        row = {
            "step": step,
            "weight_version": self.version,
            **batch.metrics,
            **metrics,
            "rollout/tokens_per_s": tokens / (end - start),
            "time/rollout": generated - start,
            "time/step": end - start,
        }
        if not metrics["train/step_skipped"]:
            self.recipe.quant.check_gates(row)
        return row

    async def train(self, step: int, samples: list[Sample]) -> dict[str, float]:
        """Advantages and schedule here, then the optimizer steps and the weight sync on every rank."""
        recipe = self.recipe
        await self.score_for(recipe.algo, samples)
        prepared = prepare_steps(
            samples,
            recipe.algo,
            self.schedule(),
            pad_id=self.pad_id,
            pad_multiple=self.pad_multiple,
            use_support=self.use_support,
        )
        if not prepared.steps:
            raise RunError(
                f"{len(samples)} samples made no whole optimizer step; lower data.global_batch_size, or set "
                "data.partial_step=train"
            )
        version = self.version + 1
        bundle = BundlePlace(self.folder.replay, step) if step in recipe.run.replay_steps else None
        arguments = [
            (tuple(batch.for_rank(dp_rank) for batch in prepared.steps), version, bundle)
            for dp_rank in self.actors.dp_ranks
        ]
        more = self.source.ahead(version) if step + 1 < recipe.run.steps else asyncio.sleep(0)
        results, _ = await asyncio.gather(self.actors.on_workers("advance", arguments), more)
        result = results[0]
        if result["metrics"]["train/step_skipped"]:
            await self.source.skipped()
        else:
            check_engines(version, result["engines"])
            self.version = version
            await self.source.advance(version)
        return {**prepared.metrics, **result["metrics"]}

    async def score_for(self, algo: AlgoConfig, samples: list[Sample]) -> None:
        """Write into the samples what the algorithm needs beside what the engine gave."""
        # After the first of several optimizer steps the policy is no longer the one that the ratio is taken to.
        if algo.needs_old_log_probs or (self.recipe.several_steps and not algo.correction.bypass):
            await self.score(samples, "log_probs", "old_log_probs")
        if algo.needs_reference_support:
            for sample, scores in zip(samples, await self.scores(samples, "reference_support"), strict=True):
                # A sample without a response has no mask.
                if sample.sampling_mask is not None:
                    sample.sampling_mask = sample.sampling_mask.with_ref_log_probs(scores)
        elif algo.needs_reference:
            await self.score(samples, "ref_log_probs", "ref_log_probs")
        if algo.needs_teacher:
            await self.score(samples, "teacher_log_probs", "teacher_log_probs")
        if algo.needs_values:
            await self.score(samples, "values", "values")

    async def score(self, samples: list[Sample], method: str, field: str) -> None:
        """One number per response token from every worker's `method`, written into the samples' `field`."""
        for sample, scores in zip(samples, await self.scores(samples, method), strict=True):
            setattr(sample, field, scores)

    async def scores(self, samples: list[Sample], method: str) -> list[np.ndarray]:
        """What every worker's `method` gives for each sample, in their order."""
        batch = prepare_scoring(
            samples, self.schedule(), pad_id=self.pad_id, pad_multiple=self.pad_multiple, use_support=self.use_support
        )
        arguments = [(batch.for_rank(dp_rank),) for dp_rank in self.actors.dp_ranks]
        results = dict(zip(self.actors.dp_ranks, await self.actors.on_workers(method, arguments), strict=True))
        by_rank = [results[dp_rank] for dp_rank in range(len(batch.ranks))]
        return gather_scores(batch, by_rank, len(samples))

    @property
    def use_support(self) -> bool:
        """Score on the sampler's support: sampling cuts the distribution, and the recipe does not say otherwise."""
        return self.recipe.rollout.needs_sampling_mask and self.recipe.algo.support_log_probs == "auto"

    @property
    def pad_multiple(self) -> int:
        """Sequence parallelism cuts rows over the tensor-parallel ranks."""
        parallel = self.recipe.train.parallel
        return parallel.tp if parallel.sp else 1

    def schedule(self) -> ScheduleConfig:
        """The data-parallel schedule's settings for this mesh."""
        data, parallel = self.recipe.data, self.recipe.train.parallel
        return ScheduleConfig(
            data_parallel=parallel.dp,
            context_parallel=parallel.cp,
            context_layout=parallel.cp_layout,
            pad_multiple=self.pad_multiple,
            max_tokens_per_gpu=data.max_tokens_per_gpu,
            # Interleaved pipelines take micro-batches in groups of the stages.
            micro_batch_multiple=parallel.pp if parallel.vpp else 1,
            balance=data.balance,
            layout=data.layout,
            partial_step=data.partial_step,
            flops=self.flops,
            global_batch_size=data.global_batch_size,
        )

    async def save(self, step: int) -> None:
        """Checkpoint after `step` steps: rows up to here are durable before the checkpoint says so."""
        self.before_checkpoint()
        extra = {"step": step, "weight_version": self.version, "source": self.source.state()}
        await self.actors.on_all_workers("save", self.folder.checkpoints, extra)


def check_engines(version: int, engines: dict[str, str]) -> None:
    """An engine that did not take `version` ends the run (the same command resumes)."""
    failed = {url: state for url, state in engines.items() if state != "serving"}
    if failed:
        lines = "; ".join(f"{url}: {state}" for url, state in failed.items())
        raise RunError(f"weight version {version} did not reach every engine: {lines}; {RESUME_HINT}")


def accuracy(samples: list[Sample]) -> float:
    """Mean reward of evaluated samples."""
    return float(np.mean([sample.reward for sample in samples]))
