"""Evaluation inside a run: measured between steps on the run's own engines, told, and the best checkpoint kept."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from miles.evaluate import best
from miles.evaluate.evaluator import Evaluator
from miles.evaluate.summary import said
from miles.observe.progress import Progress
from miles.orchestrate.actor_group import ActorGroup
from miles.orchestrate.run_folder import RunFolder

TIME = "time/evaluate"


class Evaluation(Protocol):
    """What the loop measures between steps."""

    async def after(self, step: int, version: int, extra: dict[str, Any]) -> dict[str, float]:
        """Metrics of the weights after `step` steps; `time/evaluate` in seconds."""
        ...


@dataclass(frozen=True)
class RunEvaluation:
    """`keep_best`: the metric whose highest value keeps its checkpoint and export."""

    evaluator: Evaluator
    actors: ActorGroup
    folder: RunFolder
    keep_best: str | None
    progress: Progress

    async def after(self, step: int, version: int, extra: dict[str, Any]) -> dict[str, float]:
        """Metrics of the weights after `step` steps, which every engine serves as `version`; `time/evaluate` in seconds.

        `extra`: what a checkpoint of this moment holds beside the trainer's state.
        """
        begun = time.perf_counter()
        self.progress.stage(f"evaluating after {step} steps")
        metrics = await self.evaluator.measure(version)
        self.progress.say(f"after {step} steps: {said(metrics)}")
        if self.keep_best is not None:
            await self._keep(step, self.keep_best, metrics[self.keep_best], extra)
        return {**metrics, TIME: time.perf_counter() - begun}

    async def _keep(self, step: int, metric: str, value: float, extra: dict[str, Any]) -> None:
        # The disk says what is best: an evaluation that a resumed run repeats is not better than itself.
        if not best.is_better(value, best.read_best(self.folder.best)):
            return
        temporary = best.begin(self.folder.best.absolute(), step)
        await self.actors.on_all_workers("save", temporary / "checkpoints", extra)
        await self.actors.on_all_workers("export", temporary / "hf_model")
        best.publish(temporary, step=step, metric=metric, value=value)
        self.progress.say(f"kept the checkpoint after {step} steps: {metric} {value:.3f}")
