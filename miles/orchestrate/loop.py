"""The training loop: collect, score, prepare, train, sync weights, record; now and then a checkpoint; then again.

A step that trains makes the next weight version; one that counts nothing makes none. On policy, everything that a
step depends on is in the checkpoint (weights, optimizer, prompt cursor), so a resumed run repeats it bit for bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from miles.algos.step_batches import PreparedSteps, prepare_scoring, prepare_steps
from miles.data.sample import Sample
from miles.data.schedule import ScheduleConfig
from miles.orchestrate.actor_group import RESUME_HINT, ActorGroup
from miles.orchestrate.actors import Recording
from miles.orchestrate.device_sharing import DeviceSharing, Disaggregated
from miles.orchestrate.errors import RunError
from miles.orchestrate.evaluation import Evaluation
from miles.orchestrate.gradient_watch import GradientWatch
from miles.orchestrate.run_folder import RunFolder
from miles.orchestrate.scores import put_scores, score_batch, scores_needed
from miles.orchestrate.stopwatch import Stopwatch
from miles.recipe import Recipe
from miles.rollout.protocol import Rollout, RolloutBatch

Row = dict[str, Any]


@dataclass
class TrainingLoop:
    """One run's loop over a started actor group. `show_samples` receives each step's samples, then `record` its row."""

    recipe: Recipe
    actors: ActorGroup
    rollout: Rollout
    folder: RunFolder
    schedule: ScheduleConfig
    record: Callable[[Row], None]
    show_samples: Callable[[int, list[Sample]], None]
    before_checkpoint: Callable[[], None]
    watch: GradientWatch
    devices: DeviceSharing = field(default_factory=Disaggregated)
    version: int = 0
    evaluation: Evaluation | None = None
    # The wait for the engines to have what the step in progress makes, when that was asked for with the step.
    sent: Callable[[], Awaitable[list[Any]]] | None = None

    async def run(self, first_step: int) -> None:
        """Steps `first_step` to `run.steps` - 1; a checkpoint now and then and after the last."""
        recipe = self.recipe
        if self.version:
            await self.send_weights(self.version)
        await self.rollout.start(self.version)
        for step in range(first_step, recipe.run.steps):
            await self.one_step(step)
            done = step + 1
            if done % recipe.run.checkpoint_every == 0 or done == recipe.run.steps:
                await self.save(done)
        if measured := await self.evaluate(recipe.run.steps):
            self.record({"step": recipe.run.steps, "weight_version": self.version, **measured})

    async def one_step(self, step: int) -> None:
        """One step of training, as a textbook has it; before it, perhaps, an evaluation of the weights it starts from."""
        measured = await self.evaluate(step)
        clock = Stopwatch()
        with clock.measure("time/rollout"):
            batch = await self.rollout.collect(step)
            await self.devices.to_trainer()
        with clock.measure("time/score"):
            await self.score(batch.samples)
        with clock.measure("time/prepare"):
            prepared = self.prepare(batch.samples)
        with clock.measure("time/train"):
            trained = await self.train(step, prepared)
        with clock.measure("time/sync"):
            await self.sync_weights(skipped=bool(trained["train/step_skipped"]))
        self.show_samples(step, batch.samples)
        self.record(self.row(step, batch, prepared.metrics | trained, clock.finish()) | measured)

    async def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of the evaluation after `step` steps; empty when none is due."""
        if self.evaluation is None or not self.recipe.eval.due(step, self.recipe.run.steps):
            return {}
        await self.rollout.hold()
        try:
            return await self.evaluation.after(step, self.version, self.checkpoint_extra(step))
        finally:
            await self.rollout.release()

    async def score(self, samples: list[Sample]) -> None:
        """Write into the samples what the algorithm needs beside what the engine gave: one pass for each score."""
        needed = scores_needed(self.recipe)
        if not needed:
            return
        batch = prepare_scoring(samples, self.schedule)
        for score in needed:
            put_scores(samples, score, await score_batch(batch, len(samples), self.actors, score.model, score.output))

    def prepare(self, samples: list[Sample]) -> PreparedSteps:
        """Advantages, and which rank trains which samples in which optimizer step."""
        prepared = prepare_steps(samples, self.recipe.algo, self.schedule)
        if not prepared.steps:
            raise RunError(
                f"{len(samples)} samples made no whole optimizer step; lower data.global_batch_size, or set "
                "data.partial_step=train"
            )
        return prepared

    async def train(self, step: int, prepared: PreparedSteps) -> dict[str, float]:
        """The optimizer steps on every rank, while the requests of the next step are on their way; their metrics.

        Engines on devices of their own get the weights right behind it: `sync_weights` waits for that."""
        run = self.recipe.run
        recording = Recording(self.folder.replay, step, self.version) if step in run.replay_steps else None
        arguments = [
            (tuple(batch.for_rank(dp_rank) for batch in prepared.steps), recording) for dp_rank in self.actors.dp_ranks
        ]
        more = self.devices.engines_keep_weights and step + 1 < run.steps
        prefetch = self.rollout.prefetch(self.version + 1) if more else asyncio.sleep(0)
        trained = self.actors.ask_workers("train", arguments)
        self.sent = None
        if self.devices.engines_keep_weights and self.actors.engines:
            # Ranks go on to it by themselves: hearing of the step first would cost a round trip.
            self.sent = self.actors.ask_workers("send_trained", [(self.version + 1,)] * len(arguments))
        metrics, _ = await asyncio.gather(trained(), prefetch)
        return metrics[0]

    async def sync_weights(self, *, skipped: bool) -> None:
        """Every engine serves the next version from here on; a skipped step made none."""
        if skipped:
            if not self.devices.engines_keep_weights:
                await self.send_weights_again()
            await self.rollout.on_skipped_step()
            return
        if self.sent is None:
            await self.send_weights(self.version + 1)
        else:
            check_engines(self.version + 1, (await self.sent())[0])
        self.version += 1
        await self.rollout.on_new_version(self.version)

    async def send_weights(self, version: int) -> None:
        """The trainer's weights to every engine as `version`; an engine that does not serve it ends the run. Without
        engines (given answers) there is nobody to send to."""
        if not self.actors.engines:
            return
        await self.devices.to_weight_sync()
        check_engines(version, (await self.actors.on_all_workers("send_weights", version))[0])
        await self.devices.to_engines()

    async def send_weights_again(self) -> None:
        """The version that engines gave out of their hands: under a new sync id, as a version of one id only rises."""
        await self.actors.connect()
        await self.send_weights(self.version)

    def row(self, step: int, batch: RolloutBatch, metrics: dict[str, float], times: dict[str, float]) -> Row:
        """The row of `metrics.jsonl`; bounds of `quant` are checked on a step that trained."""
        tokens = sum(sample.response_length for sample in batch.samples)
        row = {
            "step": step,
            "weight_version": self.version,
            **batch.metrics,
            **metrics,
            "rollout/tokens_per_s": tokens / times["time/step"],
            **times,
        }
        row |= self.watch.see(row)
        if not metrics["train/step_skipped"]:
            self.recipe.quant.check_gates(row)
        return row

    async def save(self, step: int) -> None:
        """Checkpoint after `step` steps: rows up to here are durable before the checkpoint says so."""
        self.before_checkpoint()
        await self.actors.on_all_workers("save", self.folder.checkpoints, self.checkpoint_extra(step))

    def checkpoint_extra(self, step: int) -> dict[str, Any]:
        """What a checkpoint after `step` steps holds beside the trainer's state."""
        return {"step": step, "weight_version": self.version, "rollout": self.rollout.state()}


def check_engines(version: int, engines: dict[str, str]) -> None:
    """An engine that did not take `version` ends the run (the same command resumes)."""
    failed = {url: state for url, state in engines.items() if state != "serving"}
    if failed:
        lines = "; ".join(f"{url}: {state}" for url, state in failed.items())
        raise RunError(f"weight version {version} did not reach every engine: {lines}; {RESUME_HINT}")
