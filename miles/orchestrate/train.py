"""`miles train`: one recipe from start or last checkpoint to a finished run folder."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from miles.config.files import write_atomic
from miles.config.metric_names import unregistered
from miles.data.packing import FlopsShape
from miles.data.tokenizer import Tokenizer
from miles.evaluate import summary
from miles.evaluate.best import read_best
from miles.observe import samples_log
from miles.observe.metrics_log import MetricsLog, read_rows, require_steps, rewind
from miles.observe.progress import Progress, open_progress
from miles.observe.reward_report import LOSS, MEAN_OVER, REWARD, write_reward_report
from miles.observe.samples_log import SamplesLog
from miles.observe.trackers.feed import Trackers
from miles.orchestrate.actor_group import ActorGroup, running_actors
from miles.orchestrate.errors import ExpectationMissed
from miles.orchestrate.event_loop import run_to_end
from miles.orchestrate.gradient_watch import GradientWatch
from miles.orchestrate.input_record import check_or_record
from miles.orchestrate.loop import Row, TrainingLoop
from miles.orchestrate.model_folder import prepare_model
from miles.orchestrate.placed_cluster import check_placement, placed_cluster
from miles.orchestrate.placement import Placement
from miles.orchestrate.run_folder import RunFolder, claimed, locate
from miles.orchestrate.run_result import RunResult
from miles.orchestrate.schedule import schedule_config
from miles.orchestrate.sources import Surroundings, engine_answers, given_answers
from miles.orchestrate.startable import check_start
from miles.orchestrate.sweeper_handle import announce_stop, marked
from miles.recipe import Recipe, digest
from miles.recipe.dtype_rules import measured_gap
from miles.recipe.schema import settings
from miles.recipe.warm_start import first_recipe
from miles.rollout.protocol import Rollout
from miles.rollout.rewards import RewardPool, build_reward
from miles.train import installed


def train(
    recipe: Recipe,
    overrides: Sequence[str],
    *,
    fresh: bool,
    console: Console,
    on_step: Callable[[Row], object] | None = None,
) -> RunResult:
    """Run the recipe to its end, after the phase before it (`model.from_recipe`) where there is one that is not finished.

    `fresh` starts both over. `on_step` is of the last phase. See `train_phase`.
    """
    first = first_recipe(recipe)
    if first is not None:
        # What is wrong with the second is told before the first has taken its time.
        check_start(recipe)
        done = train_phase(first, (), fresh=fresh, console=console)
        console.print(done.line, highlight=False, soft_wrap=True)
    return train_phase(recipe, overrides, fresh=fresh, console=console, on_step=on_step)


def train_phase(
    recipe: Recipe,
    overrides: Sequence[str],
    *,
    fresh: bool,
    console: Console,
    on_step: Callable[[Row], object] | None = None,
) -> RunResult:
    """One recipe to its end. A run that is already finished is only reported.

    `on_step` gets a copy of each row of the log as it is recorded; what it raises ends the run.
    """
    started = time.monotonic()
    # Rows are a few tokens long: handing them to a thread pool costs more than decoding them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for finding in check_start(recipe):
        console.print(f"{finding.severity}: {finding}", highlight=False, markup=False, soft_wrap=True)
    located = locate(recipe, overrides)
    # A finished run is reported on any machine.
    if fresh or not located.result.exists():
        installed.require()
        check_placement(recipe)
    with claimed(located, recipe, fresh=fresh) as folder:
        finished = folder.read_result()
        # A log that cannot be read is refused before anything starts.
        rows = read_rows(folder.metrics)
        if finished is not None:
            require_steps(folder.metrics, _steps(recipe, rows), recipe.run.steps, needed_by="the finished run")
            console.print(
                f"{folder.path}: this run is finished; --fresh starts it over", highlight=False, soft_wrap=True
            )
            _check_expectations(recipe, rows)
            return RunResult(finished["line"], finished, folder.path, rows)
        check_or_record(recipe, folder)
        model_dir = prepare_model(recipe, folder)
        with (
            contextlib.closing(
                open_progress(name=recipe.name, total_steps=recipe.run.steps, console=console)
            ) as progress,
            contextlib.closing(_trackers(recipe, folder, progress)) as trackers,
        ):
            tokenizer = Tokenizer(model_dir)
            progress.stage("starting Ray")
            with (
                # The report is drawn while Ray's processes stop.
                ThreadPoolExecutor(1) as drawing,
                marked(),
                # Worker processes of rewards start beside Ray's.
                contextlib.nullcontext() if recipe.supervised else started_rewards(recipe, tokenizer) as rewards,
                placed_cluster(recipe, note=progress.stage) as placement,
            ):
                session = _Session(
                    recipe, placement, folder, model_dir, progress, tokenizer, rewards, trackers, on_step
                )
                rows = run_to_end(session.run())
                result = _result(recipe, rows, folder, started)
                curve = LOSS if recipe.supervised else REWARD
                drawn = drawing.submit(
                    write_reward_report, _steps(recipe, rows), folder.path, name=recipe.name, curve=curve
                )
            drawn.result()
        # After the trackers: a finished run is only reported, so they have to have it all.
        write_atomic(folder.result, json.dumps(result, indent=1) + "\n")
    _check_expectations(recipe, rows)
    return RunResult(result["line"], result, folder.path, rows)


@contextlib.contextmanager
def started_rewards(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[RewardPool]:
    """The pool of the recipe's reward function; its processes start and end here."""
    config = recipe.rollout.reward
    pool = RewardPool(config, build_reward(config, recipe.data, seed=recipe.seed), tokenizer)
    pool.start()
    try:
        yield pool
    finally:
        pool.close()


def _trackers(recipe: Recipe, folder: RunFolder, progress: Progress) -> Trackers:
    return Trackers(recipe.observe, name=recipe.name, folder=folder.path, settings=settings(recipe), warn=progress.warn)


class _Session:
    """Everything that lives while actors do."""

    def __init__(
        self,
        recipe: Recipe,
        placement: Placement,
        folder: RunFolder,
        model_dir: Path,
        progress: Progress,
        tokenizer: Tokenizer,
        rewards: RewardPool | None,
        trackers: Trackers,
        on_step: Callable[[Row], object] | None,
    ) -> None:
        self.on_step = on_step
        self.placement = placement
        self.recipe, self.folder, self.model_dir, self.progress = recipe, folder, model_dir, progress
        self.tokenizer, self.rewards, self.trackers = tokenizer, rewards, trackers

    async def run(self) -> list[Row]:
        """Rows of the metrics log; however it ends, what waits for Ray in other threads waits no longer than the sweeper."""
        try:
            return await self._run()
        finally:
            announce_stop()

    async def _run(self) -> list[Row]:
        recipe, folder = self.recipe, self.folder
        self.progress.stage("starting the trainer" if recipe.supervised else "starting trainer and engine")
        async with running_actors(recipe, self.placement, self.model_dir, folder) as actors:
            async with contextlib.AsyncExitStack() as stack:
                schedule = schedule_config(recipe, pad_id=self.tokenizer.pad_id, flops=self._flops())
                around = Surroundings(recipe, self.model_dir, self.tokenizer, folder, self.progress)
                if self.rewards is None:
                    source = given_answers(around, actors, schedule)
                else:
                    source = await engine_answers(around, actors, self.rewards)
                stack.push_async_callback(source.close)
                first_step, version = self._resume(actors, source.rollout)
                rows = rewind(folder.metrics, first_dropped_step=first_step)
                samples_log.rewind(folder.path, first_dropped_step=first_step, warn=self.progress.warn)
                self.trackers.start(rows)
                log = stack.enter_context(MetricsLog(folder.metrics))
                samples = SamplesLog(folder.path, recipe.observe.samples, self.tokenizer, self.progress.warn)
                stack.callback(samples.close)

                def make_durable() -> None:
                    samples.sync()
                    log.sync()

                loop = TrainingLoop(
                    recipe,
                    actors,
                    source.rollout,
                    folder,
                    schedule,
                    self._recorder(log, rows),
                    samples.append,
                    make_durable,
                    devices=source.devices,
                    version=version,
                    evaluation=source.evaluation,
                    watch=GradientWatch(recipe.algo, recipe.run.no_gradient_warning_steps, self.progress.warn, rows),
                )
                # What start-up made lives to the end: collections during the steps need not walk over it.
                gc.collect()
                gc.freeze()
                stack.callback(gc.unfreeze)  # a program or notebook goes on afterwards
                await loop.run(first_step)
                for note in source.notes():
                    self.progress.warn(note)
            self.trackers.end()
            self.progress.stage("exporting the model")
            await actors.on_all_workers("export", folder.exported_model)
            self.progress.stage("done")
        return rows

    def _flops(self) -> FlopsShape | None:
        if self.recipe.data.balance != "flops":
            return None
        from miles.models.family import read_hf_config
        from miles.train.flops import flops_shape

        rope_kind, where = self.recipe.model.rope.type, str(self.model_dir / "config.json")
        return flops_shape(read_hf_config(self.model_dir), rope_kind=rope_kind, where=where)

    def _resume(self, actors: ActorGroup, rollout: Rollout) -> tuple[int, int]:
        """(first step to run, weight version that the trainer holds)."""
        for note in actors.notes:
            self.progress.say(f"checkpoint passed over: {note}")
        if actors.resumed is None:
            return 0, 0
        rollout.restore(actors.resumed["rollout"])
        step = int(actors.resumed["step"])
        self.progress.say(f"resuming after step {step}")
        return step, int(actors.resumed["weight_version"])

    def _recorder(self, log: MetricsLog, rows: list[Row]) -> Any:
        first = len(rows)

        def record(row: Row) -> None:
            trained = row["step"] < self.recipe.run.steps
            # Our fault and not the user's, so no reason to end the run; told in the first step.
            if len(rows) == first and (unknown := unregistered(row)):
                self.progress.warn(f"{', '.join(unknown)}: written, but missing in miles/config/metric_table.py")
            if trained and (gap := measured_gap(self.recipe, row, rows)) is not None:
                self.progress.warn(gap)
            rows.append(row)
            log.append(row)
            self.trackers.append(row)
            if trained:
                self.progress.step(row)
            if self.on_step is not None:
                self.on_step(dict(row))

        return record


def _steps(recipe: Recipe, rows: list[Row]) -> list[Row]:
    """Without the row of the evaluation after the last step."""
    return [row for row in rows if row["step"] < recipe.run.steps]


def _result(recipe: Recipe, rows: list[Row], folder: RunFolder, started: float) -> dict[str, Any]:
    steps = _steps(recipe, rows)
    curve = LOSS if recipe.supervised else REWARD
    # A skipped step has no loss.
    values = [float(row[curve.metric]) for row in steps if curve.metric in row]
    training_s = sum(float(row["time/step"]) for row in steps)
    first, last, course = None, None, "every step was skipped"
    if values:
        first, last = values[0], sum(values[-MEAN_OVER:]) / len(values[-MEAN_OVER:])
        course = f"{curve.word} {first:.3f} -> {last:.3f}"
    line = f"{recipe.name}: {course} in {training_s:.1f} s ({len(steps)} steps)"
    evaluation = {name: value for name, value in rows[-1].items() if name.startswith(summary.PREFIX)}
    best = None if recipe.run.keep_best is None else read_best(folder.best)
    return {
        "schema": 1,
        "line": line,
        "digest": digest(recipe),
        "seed": recipe.seed,
        f"{curve.word}_first": first,
        f"{curve.word}_last": last,
        "steps": len(steps),
        "training_s": training_s,
        "wall_s": time.monotonic() - started,
        **evaluation,
        **({} if best is None else {"best": {"step": best.step, "metric": best.metric, "value": best.value}}),
    }


def _check_expectations(recipe: Recipe, rows: list[Row]) -> None:
    missed = []
    for name, bound in recipe.expect.items():
        # Steps report their own metrics each, evaluations come now and then.
        evaluated = name.startswith(summary.PREFIX)
        considered = [row for row in rows if name in row] if evaluated else _steps(recipe, rows)
        values = [float(row[name]) for row in considered[-bound.over :] if name in row]
        what = "evaluations" if evaluated else "steps"
        if not values:
            missed.append(f"{name}: no step reported it")
            continue
        mean = sum(values) / len(values)
        if not (bound.min is None or mean >= bound.min) or not (bound.max is None or mean <= bound.max):
            missed.append(f"{name}: mean of the last {len(values)} {what} is {mean:.4g}, expected {bound}")
    if missed:
        raise ExpectationMissed("the run finished but misses what the recipe expects: " + "; ".join(missed))
