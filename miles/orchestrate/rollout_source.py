"""Where a step's samples come from: on-policy batches, or batches that may lag by a bounded number of versions.

Both begin at a version, give the next batch, may ask ahead while the next version is trained, take note of a new
version (or of a step that made none) and say what to store so that a resumed run draws the same prompts.
"""

from __future__ import annotations

from typing import Any, Protocol

from miles.data.prompts import PromptSource
from miles.data.tokenizer import Tokenizer
from miles.recipe import Recipe
from miles.rollout.async_rollout import AsyncRollout
from miles.rollout.engine import Engine
from miles.rollout.groups import RolloutBatch
from miles.rollout.sync_rollout import SyncRollout


class RolloutSource(Protocol):
    """`version` is the weight version that every engine serves."""

    async def start(self, version: int) -> None: ...
    async def collect(self, step: int) -> RolloutBatch: ...
    async def ahead(self, version: int) -> None: ...
    async def advance(self, version: int) -> None: ...
    async def skipped(self) -> None: ...
    async def close(self) -> None: ...
    def state(self) -> dict[str, Any]: ...


class OnPolicy:
    """Step k's samples come from the weights that step k trains, token for token.

    The requests of step k + 1 are made and sent while step k trains; the engine starts them with the new weights.
    """

    def __init__(self, recipe: Recipe, engine: Engine, prompts: PromptSource, tokenizer: Tokenizer) -> None:
        self._prompts, self._version = prompts, 0
        # Where the stream stood before prompts were drawn ahead: what a checkpoint must hold.
        self._cursor: dict[str, Any] | None = None
        self._rollout = SyncRollout(recipe.rollout, engine, prompts, tokenizer, run_seed=recipe.seed)

    async def start(self, version: int) -> None:
        self._version = version

    async def collect(self, step: int) -> RolloutBatch:
        batch = await self._rollout.collect(step, weight_version=self._version)
        self._cursor = None
        return batch

    async def ahead(self, version: int) -> None:
        cursor = self._prompts.state()
        if await self._rollout.ask_early(version):
            self._cursor = cursor

    async def advance(self, version: int) -> None:
        self._version = version

    async def skipped(self) -> None:
        await self._rollout.ask_again()

    async def close(self) -> None:
        await self._rollout.close()

    def state(self) -> dict[str, Any]:
        return {"prompts": self._prompts.state() if self._cursor is None else self._cursor}

    def restore(self, state: dict[str, Any]) -> None:
        self._prompts.restore(state["prompts"])


class BoundedStaleness:
    """Engines generate while the trainer trains; a sample is at most `rollout.max_staleness` versions old."""

    def __init__(self, recipe: Recipe, engine: Engine, prompts: PromptSource, tokenizer: Tokenizer) -> None:
        self._rollout = AsyncRollout(recipe.rollout, engine, prompts, tokenizer, run_seed=recipe.seed)

    async def start(self, version: int) -> None:
        await self._rollout.start(version)

    async def collect(self, step: int) -> RolloutBatch:
        return await self._rollout.collect(step)

    async def ahead(self, version: int) -> None:
        """Nothing: what the bound allows is on its way already."""

    async def advance(self, version: int) -> None:
        await self._rollout.advance(version)

    async def skipped(self) -> None:
        await self._rollout.skipped()

    async def close(self) -> None:
        await self._rollout.close()

    def state(self) -> dict[str, Any]:
        return {"rollout": self._rollout.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self._rollout.restore(state["rollout"])


def open_source(
    recipe: Recipe, engine: Engine, prompts: PromptSource, tokenizer: Tokenizer
) -> OnPolicy | BoundedStaleness:
    """The source that `rollout.max_staleness` asks for."""
    kind = BoundedStaleness if recipe.rollout.max_staleness else OnPolicy
    return kind(recipe, engine, prompts, tokenizer)
