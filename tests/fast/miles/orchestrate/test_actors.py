"""A rank's process: what it sends of a step that it was asked to train and to send at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles.orchestrate.actors import TrainWorker
from miles.orchestrate.errors import RunError
from miles.orchestrate.placement import Device
from miles.recipe import Recipe
from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=4, suite="stage-a-cpu")

HERE = Device(node="here", kind="cpu", index=0, bundle=0)


class Steps:
    """A backend whose steps end as told: trained, skipped, or an exception."""

    def __init__(self, *ends: bool | Exception) -> None:
        self._ends = iter(ends)
        self.sent = 0

    def step(self, batch: Any) -> dict[str, float]:
        end = next(self._ends)
        if isinstance(end, Exception):
            raise end
        return {"train/step_skipped": float(not end)}

    def state_for_sync(self) -> list[Any]:
        self.sent += 1
        return []


class Batch:
    micro_batches = (None,)


@pytest.fixture
def worker(recipe: Callable[..., Recipe]) -> Callable[[Steps], TrainWorker]:
    def make(backend: Steps) -> TrainWorker:
        made = TrainWorker(recipe(), Path("model"), 0, HERE)
        made._backend = backend
        made._hook = type("Hook", (), {"after_step": staticmethod(lambda count: None)})
        return made

    return make


def test_trained_weights_are_sent_and_those_of_a_skipped_step_are_not(worker) -> None:
    backend = Steps(True, False, True)
    rank = worker(backend)
    sent = []
    for version in (1, 2, 2):
        rank.train([Batch()])
        rank.send_trained(version)
        sent.append(backend.sent)
    assert sent == [1, 1, 2]


@pytest.mark.parametrize("before", [(), (True,)])
def test_a_step_that_failed_has_nothing_to_send(worker, before: tuple[bool, ...]) -> None:
    backend = Steps(*before, ValueError("no memory"))
    rank = worker(backend)
    for _ in before:
        rank.train([Batch()])
    with pytest.raises(ValueError, match="no memory"):
        rank.train([Batch()])
    with pytest.raises(RunError, match="rank 0 did not finish its step: no weights to send as version 7"):
        rank.send_trained(7)
    assert backend.sent == 0
