"""What `miles.train` and `miles.evaluate` refuse before anything starts, and where their runs lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles import api
from miles.config import ConfigError
from miles.orchestrate.run_folder import claimed
from miles.recipe import digest, load
from miles.recipe.rules import check_or_raise

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"


def reward(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    return float(completion == answer)


async def later(row: dict[str, Any]) -> None: ...


REFUSED = {
    "a text of overrides": ({"overrides": "seed=1"}, r'overrides: is one text; write a list, \["seed=1"\]'),
    "a coroutine": ({"on_step": later}, "on_step: is no plain function"),
    "no function to call": ({"on_step": 3}, "on_step: is no plain function"),
    "a reward of one argument": ({"reward": len}, r"reward: len does not take \(completion, answer, metadata\)"),
    "no reward": ({"reward": 3}, "reward: 3 is no function"),
    "an unknown key": ({"overrides": ["run.stepps=1"]}, "run.stepps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_train_refuses(case: str) -> None:
    options, said = REFUSED[case]
    with pytest.raises(ConfigError, match=said):
        api.train(QUICKSTART, **options)


def test_a_recipe_object_has_its_overrides_already() -> None:
    with pytest.raises(ConfigError, match="overrides: are for a recipe's path; give them to load_recipe"):
        api.train(api.load_recipe(QUICKSTART), overrides=["seed=1"])


@pytest.mark.parametrize("given", [{}, {"model": "x", "checkpoint": 3}])
def test_evaluate_wants_one_model(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give either model=DIR or checkpoint=N"):
        api.evaluate(QUICKSTART, **given)


def test_misspelt_variables_of_ours_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_RUN_DIR", "x")
    with pytest.raises(ConfigError, match="MILES_RUN_DIR"):
        api.train(QUICKSTART)


def test_a_finished_run_is_given_with_its_rows(tmp_path: Path) -> None:
    sets = [f"run.directory={tmp_path}", "run.steps=2", "expect={}"]
    loaded = load(QUICKSTART, sets)
    folder = tmp_path / f"quickstart-{digest(loaded)[:8]}"
    with claimed(api.training.locate(loaded, sets), loaded, fresh=False) as run:
        assert run.path == folder
        rows = [{"step": 0, "rollout/reward_mean": 0.25}, {"step": 1, "rollout/reward_mean": 0.5}]
        run.metrics.write_text(
            "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 2, "eval/a/reward_mean": 1.0}])
        )
        run.result.write_text('{"line": "done", "steps": 2}')
    seen: list[Any] = []
    result = api.train(str(QUICKSTART), overrides=sets, on_step=seen.append, quiet=True)
    assert (str(result), result.folder, result.result["steps"]) == ("done", folder, 2)
    assert result.metric("rollout/reward_mean") == [0.25, 0.5]
    assert result.metric("eval/a/reward_mean") == [1.0]
    assert (result.model, result.best) == (folder / "hf_model", None)
    assert seen == []
    with pytest.raises(KeyError, match="rollout/reward: no row of"):
        result.metric("rollout/reward")


def test_a_second_run_of_a_process_is_refused_while_the_first_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(*arguments: Any, **options: Any) -> str:
        with pytest.raises(ConfigError, match="this process has a run under way"):
            api.train(QUICKSTART)
        return "done"

    monkeypatch.setattr(api.training, "train", first)
    assert [api.train(QUICKSTART), api.train(QUICKSTART)] == ["done", "done"]


def test_a_function_makes_another_run_of_the_recipe() -> None:
    plain, _ = api._loaded(QUICKSTART, ["seed=1"], None)
    given, overrides = api._loaded(QUICKSTART, ["seed=1"], reward)
    assert digest(given) != digest(plain)
    assert overrides == ["seed=1", "rollout.reward.kind=callable"]
    assert api.training.locate(given, overrides).path.name == f"quickstart-{digest(given)[:8]}"
    assert given.rollout.reward.options["name"] == "reward"
    assert [finding for finding in check_or_raise(given) if finding.severity == "error"] == []


def test_a_recipe_file_cannot_name_the_kind() -> None:
    loaded = load(QUICKSTART, ["rollout.reward={kind: callable, options: {name: f, fingerprint: '00'}}"])
    with pytest.raises(
        ConfigError, match=r"this process does not have the function f; give it to miles\.train .*kind python"
    ):
        check_or_raise(loaded)
