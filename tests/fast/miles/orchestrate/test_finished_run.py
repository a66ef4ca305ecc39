"""The same command on a finished run: it is reported and checked again, nothing is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from miles.config import ConfigError
from miles.orchestrate.errors import ExpectationMissed, PlacementError
from miles.orchestrate.run_folder import RunFolder, claimed, locate
from miles.orchestrate.train import train
from miles.recipe.schema import Recipe

REWARDS = (0.1, 0.2, 0.3)


@pytest.fixture
def finished(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> Callable[[float], tuple[Recipe, RunFolder]]:
    """A finished run of three steps whose recipe expects a reward of at least the argument."""

    def start(*_: object, **__: object) -> None:
        pytest.fail("a finished run starts nothing")

    monkeypatch.setattr("miles.orchestrate.train.placed_cluster", start)

    def make(least: float) -> tuple[Recipe, RunFolder]:
        made = recipe(run={"steps": 3}, expect={"rollout/reward_mean": {"min": least, "over": 2}})
        with claimed(locate(made, []), made, fresh=False) as folder:
            rows = [{"step": step, "rollout/reward_mean": reward} for step, reward in enumerate(REWARDS)]
            folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
            folder.result.write_text('{"line": "tiny: done"}')
        return made, folder

    return make


def again(made: Recipe) -> str:
    return train(made, [], fresh=False, console=Console(quiet=True)).line


def test_closing_line_is_given_again_while_the_run_meets_what_is_expected(finished) -> None:
    made, _ = finished(0.25)
    assert (again(made), again(made)) == ("tiny: done", "tiny: done")


def test_missed_expectation_stays_missed_at_every_call(finished) -> None:
    made, _ = finished(0.26)
    for _ in range(2):
        with pytest.raises(ExpectationMissed, match=r"mean of the last 2 steps is 0\.25, expected") as raised:
            again(made)
        assert raised.value.exit_code == 1


def test_rows_that_were_lost_since_are_named_with_the_way_on(finished) -> None:
    made, folder = finished(0.0)
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(lines[:2]))
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: holds 2 rows, the finished run needs 3 .*restore the file"):
        again(made)


@pytest.mark.parametrize(
    "damage", [Path.touch, lambda path: path.write_text("{}"), Path.mkdir], ids=["empty", "{}", "folder"]
)
def test_damaged_result_is_refused_before_anything_starts(finished, damage: Callable[[Path], object]) -> None:
    made, folder = finished(0.0)
    folder.result.unlink()
    damage(folder.result)
    with pytest.raises(ConfigError, match=r"result\.json: is not the result of a run .*; remove it and run the same"):
        again(made)


def test_log_that_cannot_be_read_is_refused_before_anything_starts(finished) -> None:
    made, folder = finished(0.0)
    folder.result.unlink()
    folder.metrics.unlink()
    folder.metrics.mkdir()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: is not a file"):
        again(made)


def test_a_finished_run_is_reported_where_it_could_not_run(finished, monkeypatch) -> None:
    monkeypatch.setattr("miles.orchestrate.train.check_placement", lambda _: pytest.fail("nothing is placed"))
    made, _ = finished(0.2)
    assert again(made) == "tiny: done"


@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_without_a_place_leaves_its_folder_as_it_was(finished, monkeypatch, recipe, fresh: bool) -> None:
    def refuse(_: Recipe) -> None:
        raise PlacementError("needs 9 GPUs")

    made, folder = finished(0.2) if fresh else (recipe(), locate(recipe(), []))
    monkeypatch.setattr("miles.orchestrate.train.check_placement", refuse)
    with pytest.raises(PlacementError, match="needs 9 GPUs"):
        train(made, [], fresh=fresh, console=Console(quiet=True))
    assert folder.result.exists() == fresh
    assert folder.path.exists() == fresh


def test_the_row_of_the_last_evaluation_is_no_step_and_is_what_expectations_of_sets_ask(finished, recipe) -> None:
    made = recipe(run={"steps": 3}, expect={"eval/held_out/reward_mean": {"min": 0.6, "over": 2}}, name="evaluated")
    with claimed(locate(made, []), made, fresh=False) as other:
        rows = [{"step": step, "rollout/reward_mean": 0.0} for step in range(3)]
        rows[0]["eval/held_out/reward_mean"] = 0.0
        rows[2]["eval/held_out/reward_mean"] = 0.5
        rows.append({"step": 3, "weight_version": 3, "eval/held_out/reward_mean": 0.75})
        other.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        other.result.write_text('{"line": "tiny: done"}')
    assert again(made) == "tiny: done"
    rows[-1]["eval/held_out/reward_mean"] = 0.25
    other.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ExpectationMissed, match=r"mean of the last 2 evaluations is 0\.375"):
        again(made)
