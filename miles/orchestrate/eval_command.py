"""`miles eval`: the sets of a recipe, answered by a model folder or a checkpoint of its run; no training, no Ray.

The engines are those of the recipe, on this machine, so the numbers are those that the run itself would report.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from miles.config import ConfigError
from miles.config.files import storage_error
from miles.config.overrides import parse_override
from miles.data.tokenizer import Tokenizer
from miles.evaluate.best import read_best
from miles.evaluate.evaluator import Evaluator
from miles.evaluate.summary import PREFIX
from miles.orchestrate.backends import engine_token, start_engine, vocabulary
from miles.orchestrate.event_loop import run_to_end
from miles.orchestrate.run_folder import RunFolder, locate
from miles.orchestrate.startable import check_start
from miles.orchestrate.train import started_rewards
from miles.orchestrate.warm_start import start_model
from miles.recipe import Recipe
from miles.rollout.access import new_token
from miles.rollout.config import EngineConfig
from miles.rollout.pool import EnginePool

MODEL_FILES = ("config.json", "tokenizer.json")


def with_model(recipe: Recipe, model: Path) -> Recipe:
    """The recipe for a model folder of one's own. `ConfigError` when it is not complete."""
    for name in MODEL_FILES:
        if not (model / name).is_file():
            raise ConfigError(f"{model}: {name} is missing; name a complete Hugging Face model folder")
    chosen = recipe.model.model_copy(
        update={"path": str(model), "from_recipe": None, "create": type(recipe.model)().create}
    )
    return recipe.model_copy(update={"model": chosen})


@contextlib.contextmanager
def checkpoint_model(recipe: Recipe, overrides: Sequence[str], step: int) -> Iterator[Path]:
    """A model folder made of the checkpoint after `step` steps of the recipe's run; gone afterwards."""
    # What is asked of a checkpoint does not say which run wrote it.
    run = locate(recipe, [text for text in overrides if parse_override(text)[0][0] != "eval"])
    checkpoint = _checkpoint(run, step)
    from miles.train.convert import checkpoint_to_hf

    started_from = start_model(recipe) or run.created_model
    with contextlib.ExitStack() as stack:
        try:
            # Beside the run, where there is room for models.
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=run.path, prefix=".eval_"))
        except OSError as error:
            raise storage_error(run.path, error) from error
        yield checkpoint_to_hf(checkpoint, Path(folder) / "model", tokenizer_dir=started_from)


def _checkpoint(run: RunFolder, step: int) -> Path:
    steps = {int(path.name[5:]): path for path in run.checkpoints.glob("iter_*") if path.name[5:].isdecimal()}
    best = read_best(run.best)
    if best is not None:
        steps.setdefault(best.step, best.checkpoint)
    if step in steps:
        return steps[step]
    there = f"it has those of {', '.join(map(str, sorted(steps)))}" if steps else "it has none"
    raise ConfigError(f"{run.path}: has no checkpoint after {step} steps; {there}")


def evaluate(
    recipe: Recipe, model: Path, *, warn: Callable[[str], None] = lambda _: None, logs: Path | None = None
) -> dict[str, float]:
    """Metrics of every set for a model folder, by name.

    `warn` is told what the recipe's rules say; `logs`: folder for the engines' messages, else they come to stderr.
    """
    if not recipe.eval.sets:
        raise ConfigError("eval.sets is empty, so there is nothing to evaluate; name a set")
    if recipe.supervised:
        raise ConfigError(
            f"{recipe.name}: algo.loss {recipe.algo.loss} has answers to learn and no prompts to ask; evaluate its model by a "
            "recipe with prompts, e.g. that of the phase after it"
        )
    recipe = with_model(recipe, model)
    for finding in check_start(recipe):
        warn(f"{finding.severity}: {finding}")
    tokenizer, token = Tokenizer(model), new_token()
    with contextlib.ExitStack() as stack:
        rewards = stack.enter_context(started_rewards(recipe, tokenizer))
        starting = []
        for index in range(recipe.engine.count):
            log = None if logs is None else logs / f"engine-{index}.log"
            engine = start_engine(_on_device(recipe.engine, index), model, log_path=log, token=token)
            stack.callback(engine.kill)
            starting.append(engine)
        handles = [engine.wait_ready(recipe.engine.start_timeout_s) for engine in starting]

        async def measure() -> dict[str, float]:
            pool = EnginePool(
                [handle.url for handle in handles],
                token=engine_token(recipe.engine, token),
                vocab_size=vocabulary(recipe.engine, model),
                timeout_s=recipe.rollout.request_timeout_s,
            )
            async with pool:
                evaluator = Evaluator(
                    recipe.eval,
                    data=recipe.data,
                    rollout=recipe.rollout,
                    engine=pool,
                    tokenizer=tokenizer,
                    rewards=rewards,
                )
                try:
                    return await evaluator.measure(0)
                finally:
                    evaluator.close()

        return run_to_end(measure())


def _on_device(engine: EngineConfig, index: int) -> EngineConfig:
    """Engines on GPUs have one each."""
    return engine.model_copy(update={"device": f"cuda:{index}"}) if engine.device == "cuda" else engine


def show(metrics: dict[str, float], console: Console) -> None:
    """A column for each set."""
    sets: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        chosen, _, metric = name.removeprefix(PREFIX).rpartition("/")
        sets.setdefault(chosen, {})[metric] = value
    table = Table("", *sets)
    for metric in dict.fromkeys(metric for values in sets.values() for metric in values):
        table.add_row(metric, *(f"{values[metric]:.4g}" if metric in values else "" for values in sets.values()))
    console.print(table)
