"""The loss of examples that training never sees, measured between steps by the trainer itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles.algos.step_batches import prepare_scoring
from miles.config.metric_table import HELD_OUT_LOSS
from miles.data.sample import Sample
from miles.data.schedule import ScheduleConfig
from miles.observe.progress import Progress
from miles.orchestrate.actor_group import ActorGroup
from miles.orchestrate.evaluation import TIME
from miles.orchestrate.scores import score_batch


@dataclass(frozen=True)
class HeldOutLoss:
    """`samples`: those of all held-out examples."""

    samples: list[Sample]
    actors: ActorGroup
    schedule: ScheduleConfig
    progress: Progress

    async def after(self, step: int, version: int, extra: dict[str, Any]) -> dict[str, float]:
        """Mean -log-prob of a learnt token under the weights after `step` steps, in nats, and `time/evaluate` in s."""
        del version, extra
        begun = time.perf_counter()
        batch = prepare_scoring(self.samples, self.schedule)
        scores = await score_batch(batch, len(self.samples), self.actors, "policy", "log_probs")
        masks = [np.asarray(sample.loss_mask, dtype=bool) for sample in self.samples]
        learnt = np.concatenate([values[mask] for values, mask in zip(scores, masks, strict=True)])
        loss = -float(learnt.astype(np.float64).mean())
        self.progress.say(f"after {step} steps: held-out loss {loss:.4f}")
        return {HELD_OUT_LOSS: loss, TIME: time.perf_counter() - begun}
