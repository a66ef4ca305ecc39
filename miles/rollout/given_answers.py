"""`GivenAnswers`: a step's samples are examples of the data, with their answers. No engine is asked."""

from __future__ import annotations

from typing import Any

import numpy as np

from miles.data.supervised.source import ExampleSource
from miles.rollout.protocol import RolloutBatch


class GivenAnswers:
    """The form of `miles.rollout.protocol.Rollout` over the examples of `source`, `batch_examples` a step."""

    def __init__(self, source: ExampleSource) -> None:
        self._source = source
        self._version = 0

    async def start(self, version: int) -> None:
        self._version = version

    async def collect(self, step: int) -> RolloutBatch:
        samples = self._source.next_samples(self._source.config.supervised.batch_examples)
        learnt = sum(int(np.asarray(sample.loss_mask).sum()) for sample in samples)
        metrics = {
            "data/examples": float(len(samples)),
            "data/trained_tokens": float(learnt),
            "data/epoch": self._source.epoch,
        }
        return RolloutBatch(samples, metrics, self._version)

    async def prefetch(self, version: int) -> None:
        """Nothing: examples need no time."""

    async def on_new_version(self, version: int) -> None:
        self._version = version

    async def on_skipped_step(self) -> None:
        """Nothing: the next step goes on with the next examples."""

    async def hold(self) -> None:
        """Nothing is on its way."""

    async def release(self) -> None:
        """Nothing was held."""

    async def close(self) -> None:
        """Nothing is open."""

    def state(self) -> dict[str, Any]:
        return {"examples": self._source.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self._source.restore(state["examples"])
