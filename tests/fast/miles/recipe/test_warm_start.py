"""A recipe that starts from the model of another recipe's run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles.config import ConfigError
from miles.orchestrate.run_folder import locate
from miles.orchestrate.startable import check_start
from miles.orchestrate.warm_start import start_model
from miles.recipe import load
from miles.recipe.rules import model_facts
from miles.recipe.warm_start import first_recipe, origin

FIRST = """
schema_version: 1
name: first
model: {create: {num_layers: 3}}
data:
  task: jsonl
  jsonl: {path: rows.jsonl}
  supervised: {batch_examples: 4}
algo: {loss: sft}
"""
SECOND = """
schema_version: 1
name: second
model: {from_recipe: first.yaml}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{i:03d}=", "answer": f"{i:03d}"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "first.yaml").write_text(FIRST)
    (tmp_path / "second.yaml").write_text(SECOND)
    return tmp_path


def second(folder: Path, *sets: str, text: str = SECOND):
    (folder / "second.yaml").write_text(text)
    return load(folder / "second.yaml", [f"run.directory={folder / 'runs'}", *sets])


def test_the_path_begins_at_the_recipes_folder_and_runs_lie_together(folder):
    made = second(folder)
    assert made.model.from_recipe == folder / "first.yaml"
    first = first_recipe(made)
    assert first.name == "first"
    assert locate(first, ()).path == folder / "runs" / "first"


def test_rules_look_at_the_model_that_the_first_phase_makes(folder):
    made = second(folder)
    facts = model_facts(made)
    assert facts.hf_config["num_hidden_layers"] == 3
    # The vocabulary is that of the first phase's rows.
    assert facts.hf_config["vocab_size"] == model_facts(first_recipe(made)).hf_config["vocab_size"] == 13
    assert {finding.rule for finding in check_start(made)} == {"VALIDATION"}


def test_a_fault_of_either_phase_is_told_before_the_first_begins(folder):
    with pytest.raises(ConfigError, match="SEQ-FIT"):
        check_start(second(folder, "rollout.max_new_tokens=600"))
    (folder / "rows.jsonl").write_text('{"prompt": "1"}\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: no text under 'answer'"):
        check_start(second(folder))


def test_prompts_that_the_first_phases_tokenizer_lacks_are_refused(folder):
    made = second(folder, "data.task=reasoning_gym")
    with pytest.raises(ConfigError, match="characters"):
        check_start(made)


def test_there_is_no_model_before_the_first_phase_is_finished(folder):
    made = second(folder)
    with pytest.raises(ConfigError, match=r"runs/first: the run of model.from_recipe is not finished"):
        start_model(made)
    run = folder / "runs" / "first"
    run.mkdir(parents=True)
    (run / "result.json").write_text("{}")
    assert start_model(made) == run / "hf_model"
    assert start_model(load(folder / "first.yaml")) is None
    assert start_model(load(folder / "first.yaml", ["model.path=/models/x"])) == Path("/models/x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SECOND.replace("second", "first"), "both recipes are called first; give one another name"),
        (SECOND.replace("first.yaml", "none.yaml"), r"model.from_recipe .*none.yaml"),
        (SECOND.replace("{from", "{create: {num_layers: 2, hidden_size: 32}, from"), "model.create is not that of"),
        (SECOND.replace("{from", "{path: m, from"), "path and from_recipe both say"),
    ],
)
def test_phases_that_do_not_fit_are_refused(folder, text, said):
    with pytest.raises(ConfigError, match=said):
        first_recipe(second(folder, text=text))


def test_an_equal_shape_beside_it_is_no_fault(folder):
    text = SECOND.replace("{from", "{create: {num_layers: 3}, from")
    assert origin(second(folder, text=text)).name == "first"


def test_a_third_phase_is_refused(folder):
    (folder / "third.yaml").write_text(SECOND.replace("second", "third").replace("first.yaml", "second.yaml"))
    with pytest.raises(ConfigError, match="only one phase may come before another"):
        first_recipe(load(folder / "third.yaml"))
