"""What `miles replay` does before and around the replayed step: no Ray, no model."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from miles.config import ConfigError
from miles.data.batch import Denominators, RankBatch
from miles.data.step_bundle import RankRecord, StepFailure
from miles.orchestrate import replay_command as module
from miles.orchestrate.replay_command import model_folder, replay, until_failure
from miles.recipe.schema import canonical_json
from miles.train.step_replay import ReplayReport

FAILURE = StepFailure(1, "NonFiniteError", "sample 'a'")


def made_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("place", ["replay/step_3", "replay/optimizer_step_1/step_3"])
def test_the_model_of_a_moved_run_is_found_beside_its_bundles(place: str, tmp_path: Path) -> None:
    bundle = tmp_path / "moved" / place
    bundle.mkdir(parents=True)
    mine = made_model(tmp_path / "moved/model")
    assert model_folder(bundle, tmp_path / "gone/model", None) == mine
    assert model_folder(bundle, made_model(tmp_path / "elsewhere"), None) == mine


def test_the_recorded_model_is_used_where_the_run_made_none(tmp_path: Path) -> None:
    bundle = tmp_path / "run/replay/step_3"
    bundle.mkdir(parents=True)
    recorded = made_model(tmp_path / "models/qwen")
    assert model_folder(bundle, recorded, None) == recorded


def test_a_given_model_comes_first_and_must_be_one(tmp_path: Path) -> None:
    bundle = tmp_path / "run/replay/step_3"
    made_model(tmp_path / "run/model")
    given = made_model(tmp_path / "given")
    assert model_folder(bundle, tmp_path / "gone", given) == given
    with pytest.raises(ConfigError, match=r"--model .*nowhere: holds no config\.json; give the model folder"):
        model_folder(bundle, tmp_path / "gone", tmp_path / "nowhere")


def test_a_missing_model_says_where_it_was_looked_for_and_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"step_3: .*run/model and .*gone\); name it with --model DIR"):
        model_folder(tmp_path / "run/replay/step_3", tmp_path / "gone", None)


@pytest.fixture
def bundle(recipe: Any, write_bundle: Any, tmp_path: Path) -> Path:
    made_model(tmp_path / "run/model")
    manifest = {"recipe": json.loads(canonical_json(recipe())), "model_dir": str(tmp_path / "gone")}
    record = RankRecord(RankBatch(0, 1, (), Denominators(0, 0)))
    return write_bundle(tmp_path / "run/replay", 3, manifest, {0: record})


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Recipes that were replayed; every rank reports success."""
    recipes: list[Any] = []

    async def run(folder: Path, recipe: Any, *_: Any) -> dict[int, ReplayReport]:
        recipes.append(recipe)
        return {rank: ReplayReport(3, "close", {}, {}, ()) for rank in range(recipe.train.parallel.world_size)}

    monkeypatch.setattr(module, "_run", run)
    monkeypatch.setattr(module, "placed_cluster", lambda *_, **__: contextlib.nullcontext())
    return recipes


def test_close_runs_on_the_mesh_that_is_set(bundle: Path, ran: list[Any]) -> None:
    replay(bundle, mode="close", rank=1, console=Console(), overrides=["train.parallel.tp=2"])
    assert ran[0].train.parallel.tp == 2


def test_what_is_set_wrongly_is_named(bundle: Path, ran: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"--set train\.parallel\.tp=0: train\.parallel\.tp: "):
        replay(bundle, mode="close", rank=None, console=Console(), overrides=["train.parallel.tp=0"])
    with pytest.raises(ConfigError, match=r"--set train\.parallel\.tp=2: identical bits need .*use --mode close"):
        replay(bundle, mode="bit", rank=None, console=Console(), overrides=["train.parallel.tp=2"])
    with pytest.raises(ConfigError, match=r"--rank 2: the step is replayed by ranks 0 to 1"):
        replay(bundle, mode="close", rank=2, console=Console(), overrides=["train.parallel.tp=2"])
    assert not ran


class FakeActorGroup:
    """Ranks that report after a while, or never (None)."""

    def __init__(self, reports: dict[int, tuple[float, StepFailure | None] | None]) -> None:
        self.reports, self.workers = reports, list(reports)

    async def on_workers(self, method: str, arguments: Any, *, ranks: Any) -> list[ReplayReport]:
        outcome = self.reports[ranks[0]]
        if outcome is None:
            await asyncio.Event().wait()
        assert outcome is not None
        await asyncio.sleep(outcome[0])
        return [ReplayReport(3, "bit", {}, {}, (), outcome[1])]


async def bounded(actors: Any, rank: int | None) -> dict[int, ReplayReport]:
    async with asyncio.timeout(5.0):
        return await until_failure(actors, rank, ())


def test_ranks_that_wait_for_the_failed_one_are_not_waited_for() -> None:
    actors = FakeActorGroup({0: None, 1: (0.0, FAILURE), 2: None})
    assert list(asyncio.run(bounded(actors, 1))) == [1]
    assert list(asyncio.run(bounded(actors, None))) == [1]


def test_a_failure_of_another_rank_does_not_stand_for_the_recorded_one() -> None:
    actors = FakeActorGroup({0: (0.0, StepFailure(0, "NonFiniteError", "sample 'b'")), 1: (0.05, FAILURE)})
    assert asyncio.run(bounded(actors, 1))[1].failure == FAILURE


def test_all_ranks_report_when_none_fails() -> None:
    assert sorted(asyncio.run(bounded(FakeActorGroup({0: (0.0, None), 1: (0.01, None)}), 1))) == [0, 1]
