"""`miles replay`: one recorded optimizer step in fresh processes, compared with what was recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

from rich.console import Console

from miles.config import ConfigError
from miles.config.overrides import apply_overrides
from miles.config.validation import validate
from miles.data.step_bundle import StepBundle, StepFailure, load_bundle
from miles.orchestrate.actor_group import ActorGroup, running_trainers
from miles.orchestrate.errors import RunError
from miles.orchestrate.placed_cluster import placed_cluster
from miles.orchestrate.placement import Placement
from miles.recipe.placement import ClusterConfig
from miles.recipe.schema import Recipe
from miles.train.step_replay import COMPARED, ReplayReport, manifest_value

Mode = Literal["bit", "close"]


def replay(
    folder: Path,
    *,
    mode: str,
    rank: int | None,
    console: Console,
    model: Path | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Print what each rank found. `RunError` (exit code 1) when the step was not reproduced.

    `model`: the model folder, when it is not where it was recorded; `overrides`: `--set` on the recorded recipe.
    """
    if mode not in ("bit", "close"):
        raise ConfigError(f"--mode {mode}: use bit or close")
    if overrides and mode == "bit":
        raise ConfigError(f"--set {overrides[0]}: identical bits need the recorded settings; use --mode close")
    bundle = load_bundle(folder)
    # Replayed here, or on the cluster of RAY_ADDRESS: the recorded one says where the run was.
    recipe = _recipe(bundle, folder, overrides).model_copy(update={"cluster": ClusterConfig()})
    model_dir = model_folder(folder, Path(manifest_value(bundle, folder, "model_dir")), model)
    world = recipe.train.parallel.world_size
    if rank is not None and not 0 <= rank < world:
        raise ConfigError(f"--rank {rank}: the step is replayed by ranks 0 to {world - 1}")
    with placed_cluster(recipe, engines=False) as placement:
        reports = asyncio.run(_run(folder, recipe, placement, model_dir, cast(Mode, mode), bundle.failure))
    chosen = [report for number, report in sorted(reports.items()) if rank in (None, number)]
    if not chosen:
        raise RunError(f"{folder}: rank {rank} waited for another rank, whose step failed; leave --rank out")
    for report in chosen:
        _print(report, console)
    differences = [text for report in chosen for text in report.differences]
    if differences:
        raise RunError(f"{folder}: not reproduced ({mode}): " + "; ".join(differences[:10]))
    console.print(f"{folder}: reproduced ({mode}) on {len(chosen)} rank(s)", highlight=False, soft_wrap=True)


def model_folder(bundle: Path, recorded: Path, given: Path | None) -> Path:
    """The model folder that the step needs: the given one, the run's own beside the bundle, or the recorded one."""
    if given is not None:
        if not (given / "config.json").is_file():
            raise ConfigError(f"--model {given}: holds no config.json; give the model folder that the run started from")
        return given
    # A run folder may have been moved, with the model that the run made.
    runs = [parent.parent for parent in bundle.resolve().parents if parent.name == "replay"]
    places = list(dict.fromkeys([*(run / "model" for run in runs[:1]), recorded]))
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise ConfigError(
        f"{bundle}: the model folder of the recording is not here (looked for {' and '.join(map(str, places))}); name "
        "it with --model DIR"
    )


def _recipe(bundle: StepBundle, folder: Path, overrides: Sequence[str]) -> Recipe:
    data, origin = apply_overrides(manifest_value(bundle, folder, "recipe"), overrides)

    def locate(path: tuple[str | int, ...]) -> str:
        set_here = [text for key, text in origin.items() if key[: len(path)] == path or path[: len(key)] == key]
        return set_here[-1] if set_here else f"{folder}/manifest.json"

    return validate(Recipe, data, locate=locate)


def _print(report: ReplayReport, console: Console) -> None:
    for name in COMPARED:
        if name in report.recorded:
            found = report.results.get(name)
            console.print(f"step {report.step}: {name} {found!r}, recorded {report.recorded[name]!r}")
    if report.failure is not None:
        text = f"step {report.step} fails: {report.failure}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)


async def _run(
    folder: Path, recipe: Recipe, placement: Placement, model_dir: Path, mode: Mode, failure: StepFailure | None
) -> dict[int, ReplayReport]:
    """Reports by rank."""
    async with running_trainers(recipe, placement, model_dir, folder) as actors:
        address, port = (await actors.on_workers("offer_port", [(placement.meeting_address,)], ranks=[0]))[0]
        arguments = (address, port, folder.resolve(), mode)
        if failure is None:
            return dict(enumerate(await actors.on_all_workers("replay", *arguments)))
        return await until_failure(actors, failure.rank if mode == "bit" else None, arguments)


async def until_failure(actors: ActorGroup, rank: int | None, arguments: tuple[Any, ...]) -> dict[int, ReplayReport]:
    """Reports by rank, up to the failure of `rank` (None: of any): the others may wait for that rank in vain."""
    calls = {
        asyncio.ensure_future(actors.on_workers("replay", [arguments], ranks=[number])): number
        for number in range(len(actors.workers))
    }
    reports: dict[int, ReplayReport] = {}
    waiting = set(calls)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            reports |= {calls[call]: call.result()[0] for call in done}
            failed = {number for number, report in reports.items() if report.failure is not None}
            if rank in failed or (rank is None and failed):
                break
    finally:
        for call in waiting:
            call.cancel()
    return reports
