"""The loss of held-out examples is the mean over learnt tokens, whichever rank scored them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from miles.data.sample import Sample, Status
from miles.data.schedule import ScheduleConfig
from miles.orchestrate.held_out_loss import HeldOutLoss


class Ranks:
    """Scores token t of a sample as -t."""

    def __init__(self, dp: int) -> None:
        # Not in the order of the ranks.
        self.dp_ranks = list(reversed(range(dp)))
        self.asked: list[Any] = []

    async def on_workers(self, method: str, arguments: Any) -> list[list[np.ndarray]]:
        self.asked.append((method, arguments[0][1:]))
        return [self._scores(batch) for batch, _, _ in arguments]

    def _scores(self, batch: Any) -> list[np.ndarray]:
        found = []
        for micro in batch.micro_batches:
            for row in np.flatnonzero(micro.sample_index >= 0):
                found.append(LOG_PROBS[int(micro.sample_index[row])])
        return found


SAMPLES = [
    Sample(f"e{i}", i, i, np.arange(2, 5 + i), 2, loss_mask=np.array(mask, dtype=np.uint8), status=Status.COMPLETED)
    for i, mask in enumerate([[1], [0, 1], [1, 0, 1]])
]
LOG_PROBS = [-np.arange(1, s.response_length + 1, dtype=np.float32) for s in SAMPLES]


@pytest.mark.parametrize("dp", [1, 2])
def test_the_mean_is_over_learnt_tokens(dp: int) -> None:
    ranks, told = Ranks(dp), []
    progress: Any = SimpleNamespace(say=told.append)
    measured = HeldOutLoss(SAMPLES, ranks, ScheduleConfig(data_parallel=dp, max_tokens_per_gpu=64), progress)  # type: ignore[arg-type]
    row = asyncio.run(measured.after(7, 7, {}))
    # Tokens 1; 2; 1 and 3.
    assert row["eval/held_out/loss"] == pytest.approx((1 + 2 + 1 + 3) / 4)
    assert row["time/evaluate"] >= 0
    assert ranks.asked == [("score", ("policy", "log_probs"))]
    assert told == ["after 7 steps: held-out loss 1.7500"]
