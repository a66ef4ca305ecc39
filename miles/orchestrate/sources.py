"""Where a run's samples come from: its engines' answers to prompts, or the answers of the data."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from miles.data.end_tokens import read_end_tokens
from miles.data.prompts import PromptSource
from miles.data.schedule import ScheduleConfig
from miles.data.supervised.source import ExampleSource, sample_of
from miles.data.tokenizer import Tokenizer
from miles.evaluate import summary
from miles.evaluate.evaluator import Evaluator
from miles.observe.progress import Progress
from miles.orchestrate.actor_group import ActorGroup
from miles.orchestrate.backends import engine_token, open_rollout, vocabulary
from miles.orchestrate.device_sharing import DeviceSharing, Disaggregated, device_sharing
from miles.orchestrate.evaluation import Evaluation, RunEvaluation
from miles.orchestrate.held_out_loss import HeldOutLoss
from miles.orchestrate.run_folder import RunFolder
from miles.recipe import Recipe
from miles.rollout.given_answers import GivenAnswers
from miles.rollout.pool import EnginePool
from miles.rollout.protocol import Rollout
from miles.rollout.rewards import RewardPool


@dataclass(frozen=True)
class Source:
    """Samples, what is measured between steps, and who holds the devices meanwhile.

    `prompts`: those that engines answer. `opened`: closes what is open of all this, after the rollout.
    """

    rollout: Rollout
    evaluation: Evaluation | None
    devices: DeviceSharing
    prompts: PromptSource | None = None
    opened: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def close(self) -> None:
        """Requests on their way are aborted, then the clients close."""
        async with self.opened:
            await self.rollout.close()

    def notes(self) -> list[str]:
        """What a user should know of prompts that no rule could look at before the run."""
        endless = self.prompts is not None and self.prompts.task.size is None
        return self.prompts.notes() if endless and self.prompts is not None else []


@dataclass(frozen=True)
class Surroundings:
    """What both kinds of source are made from."""

    recipe: Recipe
    model_dir: Path
    tokenizer: Tokenizer
    folder: RunFolder
    progress: Progress


async def engine_answers(around: Surroundings, actors: ActorGroup, rewards: RewardPool) -> Source:
    """Answers of the run's engines to its prompts."""
    recipe = around.recipe
    async with contextlib.AsyncExitStack() as stack:
        prompts = stack.enter_context(PromptSource(recipe.data, around.tokenizer, recipe.seed))
        engines = EnginePool(
            actors.engine_urls,
            token=engine_token(recipe.engine, actors.token),
            vocab_size=vocabulary(recipe.engine, around.model_dir),
            timeout_s=recipe.rollout.request_timeout_s,
            version_wait_s=recipe.run.timeout_s,
        )
        rollout = open_rollout(recipe, engines, prompts, around.tokenizer, rewards)
        await stack.enter_async_context(engines)
        evaluation = _evaluation(around, stack, actors, engines, rewards)
        devices = device_sharing(recipe.placement.mode, actors, engines)
        return Source(rollout, evaluation, devices, prompts, stack.pop_all())


def given_answers(around: Surroundings, actors: ActorGroup, schedule: ScheduleConfig) -> Source:
    """Answers of the data. Held-out examples are measured by their loss."""
    recipe = around.recipe
    ends = read_end_tokens(around.model_dir).ids
    examples = ExampleSource(recipe.data, around.tokenizer, recipe.seed, end_ids=ends)
    held_out = [sample_of(example, index) for index, example in enumerate(examples.held_out)]
    evaluation = HeldOutLoss(held_out, actors, schedule, around.progress) if held_out else None
    return Source(GivenAnswers(examples), evaluation, Disaggregated())


def _evaluation(
    around: Surroundings,
    stack: contextlib.AsyncExitStack,
    actors: ActorGroup,
    engines: EnginePool,
    rewards: RewardPool,
) -> RunEvaluation | None:
    recipe = around.recipe
    if not recipe.eval.sets:
        return None
    evaluator = Evaluator(
        recipe.eval,
        data=recipe.data,
        rollout=recipe.rollout,
        engine=engines,
        tokenizer=around.tokenizer,
        rewards=rewards,
    )
    stack.callback(evaluator.close)
    keep = recipe.run.keep_best
    metric = None if keep is None else summary.better_when_higher(keep, recipe.eval)
    return RunEvaluation(evaluator, actors, around.folder, metric, around.progress)
