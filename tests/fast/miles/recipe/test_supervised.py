"""Recipes whose answers are given: what fits them, what acts nowhere, what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from miles.algos.config import AlgoConfig
from miles.config import ConfigError
from miles.orchestrate.placement import ClusterFacts, NodeFacts, place
from miles.orchestrate.scores import scores_needed
from miles.recipe.idle_rules import objections
from miles.recipe.rules import check_or_raise
from miles.recipe.schema import Recipe


@pytest.fixture
def recipe(tmp_path: Path):
    def make(rows: list[dict[str, Any]] | None = None, **sections: Any) -> Recipe:
        path = tmp_path / "rows.jsonl"
        rows = rows or [{"prompt": f"{i}=", "answer": str(i)} for i in range(20)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"task": "jsonl", "jsonl": {"path": str(path)}, **sections.pop("data", {})}
        algo = {"loss": "sft", **sections.pop("algo", {})}
        return Recipe.model_validate_json(json.dumps({"name": "r", "data": data, "algo": algo, **sections}))

    return make


def test_a_supervised_recipe_is_fine_and_starts_no_engine(recipe):
    made = recipe()
    assert made.supervised
    assert [finding.rule for finding in check_or_raise(made)] == ["VALIDATION"]
    node = NodeFacts("n", "127.0.0.1", cpus=1, gpus=0)
    placement = place(made, ClusterFacts((node,), "n"))
    assert (len(placement.trainer_devices), placement.engine_devices) == (1, ())


def test_a_step_is_a_number_of_examples(recipe):
    made = recipe(data={"supervised": {"batch_examples": 24}, "global_batch_size": 8})
    assert made.samples_per_step == 24
    assert made.several_steps
    # Nothing is compared with the policy before the step.
    assert scores_needed(made) == []
    kept = recipe(algo={"kl": {"where": "loss", "estimator": "k2", "coef": 0.1}})
    assert [score.model for score in scores_needed(kept)] == ["reference"]
    with pytest.raises(
        ValidationError, match=r"global_batch_size is 32, but a step has data.supervised.batch_examples = 24"
    ):
        recipe(data={"supervised": {"batch_examples": 24}, "global_batch_size": 32})


@pytest.mark.parametrize("name", ["dpo", "DPO", "kto", "orpo"])
def test_losses_of_pairs_are_refused_by_name_with_what_to_use(name):
    with pytest.raises(
        ValidationError, match=rf"loss {name} learns from pairs .*use loss sft on the better .*TRL's DPOTrainer"
    ):
        AlgoConfig(loss=name)


@pytest.mark.parametrize(
    "option",
    [
        {"advantage": "rloo"},
        {"normalize_std": False},
        {"gamma": 0.9},
        {"zero_variance": "drop"},
        {"mask_truncated": True},
    ],
)
def test_options_of_advantages_are_refused(option):
    (name,) = option
    with pytest.raises(ValidationError, match=f"algo.{name} has no effect with loss sft"):
        AlgoConfig(loss="sft", **option)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"run": {"keep_best": "eval/held_out"}}, "run.keep_best is eval/held_out, but algo.loss sft starts no engine"),
        ({"data": {"too_long": "truncate_left"}}, "cuts the question from its answer"),
    ],
)
def test_what_asks_for_an_engine_or_cuts_examples_is_refused(recipe, sections, said):
    with pytest.raises(ValidationError, match=said):
        recipe(**sections)


def test_examples_beside_a_loss_of_advantages_are_refused(recipe):
    with pytest.raises(
        ValidationError, match=r"data.supervised has no effect with algo.loss ppo_clip; set algo.loss to sft"
    ):
        recipe(algo={"loss": "ppo_clip"}, data={"supervised": {"batch_examples": 8}})


def test_options_of_sampling_act_nowhere_and_are_told(recipe):
    made = recipe(rollout={"temperature": 0.5, "max_new_tokens": 9}, engine={"count": 2}, eval={"every": 5})
    said = [message for message, _ in objections(made)]
    assert len(said) == 2
    assert said[0].startswith("rollout.temperature, rollout.max_new_tokens act nowhere: algo.loss sft")
    assert said[1].startswith("engine.count acts nowhere")


def test_an_example_above_the_models_positions_is_refused(recipe):
    rows = [{"prompt": "1=", "answer": "1" * 40}, {"prompt": "2=", "answer": "2"}]
    with pytest.raises(ConfigError, match=r"\[SEQ-FIT\] an example has 43 tokens, above the model's 32 positions"):
        check_or_raise(recipe(rows, model={"create": {"max_positions": 32}}))


def test_rows_that_are_no_examples_are_told_before_the_run(recipe):
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: no text under 'answer'"):
        check_or_raise(recipe([{"prompt": "1", "answer": "1"}, {"prompt": "2"}]))
    with pytest.raises(ConfigError, match=r"data.task is copy_digits, which asks and gives no answers to learn"):
        check_or_raise(Recipe.model_validate_json('{"name": "r", "algo": {"loss": "sft"}}'))


def test_left_out_examples_are_a_warning(recipe):
    rows = [{"prompt": "1=", "answer": "1" * 40}, {"prompt": "2=", "answer": "2"}]
    found = check_or_raise(
        recipe(rows, data={"too_long": "drop", "supervised": {"max_tokens": 9}, "held_out_fraction": 0.0})
    )
    assert any(finding.rule == "PROMPTS" and "1 examples have more than" in finding.message for finding in found)


def test_a_bound_on_the_held_out_loss_needs_given_answers(recipe):
    bound = {"expect": {"eval/held_out/loss": {"max": 1.0}}}
    assert [finding.rule for finding in check_or_raise(recipe(**bound))] == ["VALIDATION"]
    with pytest.raises(ConfigError, match=r"\[MEASURED\] expect.eval/held_out/loss"):
        check_or_raise(recipe(data={"held_out_fraction": 0.0}, **bound))
    with pytest.raises(ConfigError, match=r"\[MEASURED\] expect.rollout/reward_mean"):
        check_or_raise(recipe(expect={"rollout/reward_mean": {"min": 0.1}}))
