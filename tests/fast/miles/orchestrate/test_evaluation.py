"""Which checkpoint a run keeps, and that one that is killed and goes on keeps the same. No Ray, no model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from miles.evaluate.best import read_best
from miles.orchestrate.evaluation import TIME, RunEvaluation
from miles.orchestrate.run_folder import RunFolder

METRIC = "eval/a/reward_mean"


class FakeEvaluator:
    def __init__(self, values: dict[int, float]) -> None:
        self.values = values

    async def measure(self, version: int) -> dict[str, float]:
        return {METRIC: self.values[version], "eval/a/pass_at_1": 0.0}


class FakeActors:
    """Writes what ranks would; `fails`: the method that a rank does not survive."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.calls = fails, []

    async def on_all_workers(self, method: str, directory: Path, *arguments: Any) -> list[Any]:
        self.calls.append((method, directory.name, *arguments))
        if method == self.fails:
            raise RuntimeError("a rank died")
        target = directory / f"iter_{arguments[0]['step']}" if method == "save" else directory
        target.mkdir(parents=True)
        return [None]


class Said:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def stage(self, text: str) -> None: ...
    def say(self, text: str) -> None:
        self.lines.append(text)


def evaluation(
    folder: Path, values: dict[int, float], *, keep: str | None = METRIC, actors: Any = None
) -> RunEvaluation:
    return RunEvaluation(FakeEvaluator(values), actors or FakeActors(), RunFolder(folder), keep, Said())


def after(made: RunEvaluation, step: int) -> dict[str, float]:
    return asyncio.run(made.after(step, step, {"step": step, "weight_version": step}))


def test_metrics_come_with_their_time_and_are_told_in_one_line(tmp_path: Path) -> None:
    made = evaluation(tmp_path, {3: 0.5}, keep=None)
    metrics = after(made, 3)
    assert metrics.pop(TIME) >= 0.0
    assert metrics == {METRIC: 0.5, "eval/a/pass_at_1": 0.0}
    assert made.progress.lines == ["after 3 steps: a reward 0.500 pass@1 0.000"]
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_and_export_of_the_highest_value_are_kept(tmp_path: Path) -> None:
    made = evaluation(tmp_path, {0: 0.25, 4: 0.75, 8: 0.5, 12: 0.75})
    for step in (0, 4, 8, 12):
        after(made, step)
    found = read_best(tmp_path / "best")
    assert (found.step, found.value, found.metric) == (4, 0.75, METRIC)
    assert found.checkpoint.is_dir()
    assert found.exported_model.is_dir()
    saves = [call for call in made.actors.calls if call[0] == "save"]
    assert [call[2]["step"] for call in saves] == [0, 4]
    assert made.progress.lines[-1] == "after 12 steps: a reward 0.750 pass@1 0.000"


@pytest.mark.parametrize("fails", ["save", "export"])
def test_a_run_that_dies_while_it_keeps_one_has_the_one_before_and_goes_on_to_the_same(
    tmp_path: Path, fails: str
) -> None:
    values = {0: 0.25, 4: 0.75, 8: 0.5}
    after(evaluation(tmp_path, values), 0)
    with pytest.raises(RuntimeError):
        after(evaluation(tmp_path, values, actors=FakeActors(fails)), 4)
    assert read_best(tmp_path / "best").step == 0
    resumed = evaluation(tmp_path, values)
    for step in (0, 4, 8):
        after(resumed, step)
    assert read_best(tmp_path / "best").step == 4
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step_4"]
    assert json.loads((tmp_path / "best" / "step_4" / "best.json").read_text())["value"] == 0.75
