"""`miles replay`: one recorded optimizer step in fresh processes, compared with what was recorded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal, cast

from rich.console import Console

from miles.config import ConfigError
from miles.config.validation import validate
from miles.data.replay import load_bundle
from miles.orchestrate.cluster import local_cluster
from miles.orchestrate.errors import RunError
from miles.orchestrate.fleet import running_trainers
from miles.recipe.schema import Recipe
from miles.train.replay import ReplayReport, manifest_value

Mode = Literal["bit", "close"]


def replay(folder: Path, *, mode: str, rank: int | None, console: Console) -> None:
    """Print what each rank found. `RunError` (exit code 1) when the step was not reproduced."""
    if mode not in ("bit", "close"):
        raise ConfigError(f"--mode {mode}: use bit or close")
    bundle = load_bundle(folder)
    recipe = validate(Recipe, manifest_value(bundle, folder, "recipe"), locate=lambda _: f"{folder}/manifest.json")
    model_dir = Path(manifest_value(bundle, folder, "model_dir"))
    world = recipe.train.parallel.world_size
    if rank is not None and not 0 <= rank < world:
        raise ConfigError(f"--rank {rank}: the step was recorded by ranks 0 to {world - 1}")
    with local_cluster(cpus=world):
        reports = asyncio.run(_run(folder, recipe, model_dir, cast(Mode, mode)))
    chosen = reports if rank is None else [reports[rank]]
    for report in chosen:
        for name in sorted(report.recorded.keys() & {"train/loss", "train/grad_norm", "train/value_loss"}):
            console.print(f"step {report.step}: {name} {report.results[name]!r}, recorded {report.recorded[name]!r}")
    differences = [text for report in chosen for text in report.differences]
    if differences:
        raise RunError(f"{folder}: not reproduced ({mode}): " + "; ".join(differences[:10]))
    console.print(f"{folder}: reproduced ({mode}) on {len(chosen)} rank(s)", highlight=False, soft_wrap=True)


async def _run(folder: Path, recipe: Recipe, model_dir: Path, mode: Mode) -> list[ReplayReport]:
    async with running_trainers(recipe, model_dir) as fleet:
        address, port = (await fleet.on_workers("offer_port", [()], ranks=[0]))[0]
        return await fleet.on_all_workers("replay", address, port, folder.resolve(), mode)
