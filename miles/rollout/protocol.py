"""`Rollout`: where a training step's samples come from, as the training loop sees it.

`miles.rollout.sync_rollout` gives samples of the very weights that are trained, `miles.rollout.async_rollout` samples
that lag by a bounded number of versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from miles.data.sample import Sample


@dataclass(slots=True)
class RolloutBatch:
    """`samples` in group order; `metrics` by name; `weight_version` the oldest one of a trained token."""

    samples: list[Sample]
    metrics: dict[str, float]
    weight_version: int


class Rollout(Protocol):
    """`start`, then for each step `collect`, perhaps `prefetch`, and one of `on_new_version` and `on_skipped_step`."""

    async def start(self, version: int) -> None:
        """Every engine serves `version`."""

    async def collect(self, step: int) -> RolloutBatch:
        """The samples of the next step."""

    async def prefetch(self, version: int) -> None:
        """`version` is being trained: what may be asked of it already is sent now."""

    async def on_new_version(self, version: int) -> None:
        """The last batch made `version`, and every engine serves it."""

    async def on_skipped_step(self) -> None:
        """The last batch changed nothing: the version that the engines serve stays."""

    async def hold(self) -> None:
        """Submit nothing new until `release`: the engines are wanted for something else. What runs goes on."""

    async def release(self) -> None:
        """Undo `hold`."""

    async def close(self) -> None:
        """Requests on their way are aborted."""

    def state(self) -> dict[str, Any]:
        """JSON from which a resumed run draws the same prompts."""

    def restore(self, state: dict[str, Any]) -> None:
        """Before `start`: go on where `state` was taken."""
