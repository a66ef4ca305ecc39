"""Miles from Python: what `import miles` offers (`miles.train`, `miles.evaluate`, ...).

    result = miles.train("recipes/quickstart.yaml", reward=my_reward, on_step=print)

The same runs as `miles train` starts: the same run folder, so the same call resumes or reports them. It works in a
program, below a running event loop (a notebook, a coroutine; the call blocks it) and in a thread.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from miles.config import ConfigError, MilesError, environment
from miles.data.sample import Sample, Status
from miles.orchestrate import eval_command
from miles.orchestrate import train as training
from miles.orchestrate.event_loop import interruptible
from miles.orchestrate.run_result import RunResult
from miles.recipe import Recipe, load
from miles.rollout.rewards import give

# Ray has one cluster in a process.
_one_run = threading.Lock()

Reward = Callable[..., Any]
OnStep = Callable[[dict[str, Any]], object]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe file with `--set` overrides ("run.steps=20") as one typed object. `ConfigError` lists every fault."""
    return load(Path(path), overrides)


def train(
    recipe: Recipe | str | Path,
    *,
    overrides: Sequence[str] = (),
    reward: Reward | None = None,
    on_step: OnStep | None = None,
    fresh: bool = False,
    quiet: bool = False,
) -> RunResult:
    """Run a recipe to its end; the same call again resumes, or reports what is finished.

    `reward`: (completion, answer, metadata) -> number or mapping, of any module, notebook cell or closure; it runs in
    worker processes, a coroutine function in the run's event loop. Its source is part of the run's digest.
    `on_step`: called with each finished step's row of `metrics.jsonl`, and with that of the last evaluation; what it
    raises ends the run. `overrides`: as `--set`, for a path; `fresh` removes an earlier run; `quiet` shows no progress.

    Raises `ConfigError` for what the caller can mend, `MilesError` for a run that failed or missed what its recipe
    expects, `KeyboardInterrupt` for Ctrl-C; in each case every process of the run is gone.
    """
    if on_step is not None and (not callable(on_step) or inspect.iscoroutinefunction(on_step)):
        raise ConfigError("on_step: is no plain function; define one that takes the step's row")
    loaded, given = _loaded(recipe, overrides, reward)
    with _only_run(), interruptible():
        return training.train(loaded, given, fresh=fresh, console=Console(quiet=quiet), on_step=on_step)


def evaluate(
    recipe: Recipe | str | Path,
    *,
    model: str | Path | None = None,
    checkpoint: int | None = None,
    overrides: Sequence[str] = (),
    reward: Reward | None = None,
) -> dict[str, float]:
    """Metrics of the recipe's evaluation sets ("eval/<set>/reward_mean", ...) for a Hugging Face model folder, or for
    the recipe's run after `checkpoint` steps. Errors as of `train`."""
    if (model is None) == (checkpoint is None):
        raise ConfigError("give either model=DIR or checkpoint=N: what to evaluate")
    loaded, given = _loaded(recipe, overrides, reward)
    with contextlib.ExitStack() as stack:
        stack.enter_context(interruptible())
        if checkpoint is not None:
            model = stack.enter_context(eval_command.checkpoint_model(loaded, given, checkpoint))
        assert model is not None
        return eval_command.evaluate(loaded, Path(model))


@contextlib.contextmanager
def _only_run() -> Iterator[None]:
    if not _one_run.acquire(blocking=False):
        raise ConfigError("this process has a run under way; wait for its end, or start the other from another process")
    try:
        yield
    finally:
        _one_run.release()


def _loaded(recipe: Recipe | str | Path, overrides: Sequence[str], reward: Reward | None) -> tuple[Recipe, list[str]]:
    """The recipe with the function in it, and the overrides that made it."""
    environment.refuse_unknown()
    if isinstance(overrides, str):
        raise ConfigError(f'overrides: is one text; write a list, ["{overrides}"]')
    if isinstance(recipe, Recipe):
        if overrides:
            raise ConfigError("overrides: are for a recipe's path; give them to load_recipe")
        loaded = recipe
    else:
        loaded = load(Path(recipe), overrides)
    if reward is None:
        return loaded, list(overrides)
    section = loaded.rollout.reward.model_copy(update={"kind": "callable", "options": give(reward)})
    rollout = loaded.rollout.model_copy(update={"reward": section})
    # Like any other override it leads to a run folder of its own, unless the run is named.
    return loaded.model_copy(update={"rollout": rollout}), [*overrides, "rollout.reward.kind=callable"]


__all__ = [
    "ConfigError",
    "MilesError",
    "Recipe",
    "RunResult",
    "Sample",
    "Status",
    "evaluate",
    "load_recipe",
    "train",
]
