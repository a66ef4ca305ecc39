"""`miles eval` finds a checkpoint of the run, makes a model of it and leaves nothing; what is missing is said in a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from miles.config import ConfigError
from miles.evaluate import best
from miles.orchestrate.eval_command import checkpoint_model, evaluate, show, with_model
from miles.orchestrate.model_folder import prepare_model
from miles.orchestrate.run_folder import claimed, locate
from miles.train.convert import hf_to_checkpoint

SETS = [{"name": "a", "prompts": 3}, {"name": "b", "prompts": 2, "samples_per_prompt": 2, "temperature": 1.0}]


@pytest.fixture
def run(recipe):
    """A run folder whose start is its checkpoint after 0 steps, kept as the best one."""
    made = recipe(eval={"sets": SETS}, rollout={"max_new_tokens": 4})
    with claimed(locate(made, []), made, fresh=False) as folder:
        model = prepare_model(made, folder)
        temporary = best.begin(folder.best, 0)
        hf_to_checkpoint(model, temporary / "checkpoints")
        best.publish(temporary, step=0, metric="eval/a/reward_mean", value=0.5)
    return made, folder


def test_a_checkpoint_is_evaluated_as_its_model_is_and_nothing_is_left(run) -> None:
    made, folder = run
    before = sorted(path.name for path in folder.path.iterdir())
    with checkpoint_model(made, [], 0) as model:
        found = evaluate(made, model)
    assert sorted(path.name for path in folder.path.iterdir()) == before
    assert found["eval/a/prompts"] == 3.0
    assert 0.0 <= found["eval/b/pass_at_2"] <= 1.0
    assert found == evaluate(made, folder.created_model, logs=folder.logs)
    assert (folder.logs / "engine-0.log").exists()


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(run) -> None:
    made, folder = run
    with pytest.raises(ConfigError, match=rf"{folder.path}: has no checkpoint after 7 steps; it has those of 0"):
        checkpoint_model(made, [], 7).__enter__()
    other = made.model_copy(update={"name": "other"})
    with pytest.raises(ConfigError, match="other: has no checkpoint after 7 steps; it has none"):
        checkpoint_model(other, [], 7).__enter__()


def test_other_sets_are_asked_of_the_same_run(run) -> None:
    made, _ = run
    with checkpoint_model(made, ["eval.sets=[{name: c}]"], 0) as model:
        assert json.loads((model / "config.json").read_text())["model_type"] == "qwen3"
    with pytest.raises(ConfigError, match="has no checkpoint"):
        checkpoint_model(made, ["seed=4"], 0).__enter__()


def test_a_folder_that_is_no_model_and_a_recipe_without_sets_are_refused(run, recipe, tmp_path: Path) -> None:
    made, folder = run
    with pytest.raises(ConfigError, match=rf"{tmp_path}: config.json is missing; name a complete Hugging Face model"):
        with_model(made, tmp_path)
    with pytest.raises(ConfigError, match=r"eval\.sets is empty"):
        evaluate(recipe(eval={"sets": []}), folder.created_model)


def test_a_recipe_of_given_answers_has_no_prompts_to_evaluate(recipe, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algo.loss sft has answers to learn and no prompts to ask"):
        evaluate(recipe(algo={"loss": "sft"}), tmp_path)


def test_the_table_has_a_column_for_each_set() -> None:
    console = Console(width=80, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    show({"eval/a/reward_mean": 0.5, "eval/a/pass_at_1": 0.25, "eval/b/reward_mean": 1.0}, console)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["│", "reward_mean", "│", "0.5", "│", "1", "│"] in lines
    assert ["│", "pass_at_1", "│", "0.25", "│", "│"] in lines
