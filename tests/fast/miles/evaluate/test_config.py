"""What an evaluation may be asked for, and the one line that refuses the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from miles.evaluate.config import EvalConfig
from miles.recipe.schema import Recipe


def config(*sets: dict[str, Any], **options: Any) -> EvalConfig:
    return EvalConfig.model_validate_json(json.dumps({"sets": sets, **options}))


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"path": "x.jsonl", "task": "copy_digits"}, "path and task both say where its prompts come from"),
        ({"options": {"digits": 2}}, "options has no effect without path or task"),
        ({"samples_per_prompt": 2}, "temperature 0 makes them all equal"),
        ({"top_p": 0.5}, "top_p has no effect with temperature 0"),
        ({"temperature": 1e-9}, "is neither 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"name": "a/b"}, "name"),
        ({"samples_per_prompt": 2000, "temperature": 1.0}, "1024"),
        ({"prompts": 0}, "prompts"),
        ({"temprature": 1.0}, "temprature"),
    ],
    ids=str,
)
def test_a_set_that_says_two_things_is_refused(chosen: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config({"name": "a", **chosen})


def test_names_are_unique_and_every_needs_a_set() -> None:
    with pytest.raises(ValidationError, match="has the name a more than once"):
        config({"name": "a"}, {"name": "b"}, {"name": "a"})
    with pytest.raises(ValidationError, match=r"eval\.every has no effect"):
        config(every=5)


def test_evaluations_come_before_the_first_step_every_so_many_steps_and_at_the_end() -> None:
    def steps(chosen: EvalConfig) -> list[int]:
        return [step for step in range(11) if chosen.due(step, 10)]

    assert steps(config({"name": "a"}, every=4)) == [0, 4, 8, 10]
    assert steps(config({"name": "a"})) == [10]
    assert steps(config()) == []


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate_json(json.dumps({"name": "r", **sections}))


SETS = {"sets": [{"name": "a", "samples_per_prompt": 4, "temperature": 1.0}]}


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        ("eval/b", "eval/b is no set of eval.sets; did you mean 'eval/a"),
        ("eval/a/truncated_frac", "does not say which checkpoint is best; use one of eval/a, eval/a/reward_mean"),
        ("rollout/reward_mean", "is no set of eval.sets"),
        ("eval/a/pass_at_3", "is no set of eval.sets"),
    ],
)
def test_best_must_name_a_set_or_a_metric_that_is_better_when_higher(keep: str, said: str) -> None:
    with pytest.raises(ValidationError, match=r"run\.keep_best") as raised:
        recipe(eval=SETS, run={"keep_best": keep})
    assert said in str(raised.value)
    with pytest.raises(ValidationError, match=r"add a set to eval\.sets"):
        recipe(eval={"sets": []}, run={"keep_best": keep})


@pytest.mark.parametrize("keep", ["eval/a", "eval/a/pass_at_4", "eval/a/best_of_2"])
def test_sets_and_metrics_that_rank_checkpoints_are_taken(keep: str) -> None:
    assert recipe(eval=SETS, run={"keep_best": keep}).run.keep_best == keep


def test_expectations_of_sets_are_known_by_their_names() -> None:
    bound = {"min": 0.5}
    assert recipe(eval=SETS, expect={"eval/a/pass_at_4": bound}).expect["eval/a/pass_at_4"].min == 0.5
    with pytest.raises(ValidationError, match=r"is no metric of eval\.sets; did you mean 'eval/a/pass_at_\d'"):
        recipe(eval=SETS, expect={"eval/a/pass_at_5": bound})
    with pytest.raises(ValidationError, match="is measured by no set"):
        recipe(eval={"sets": []}, expect={"eval/a/pass_at_4": bound})
    with pytest.raises(ValidationError, match="a gate needs its metric in every step"):
        recipe(eval=SETS, quant={"gates": [{"name": "eval/a/pass_at_4", "max_abs": 1.0}]})


def test_held_out_prompts_need_a_share_of_the_data() -> None:
    with pytest.raises(
        ValidationError, match=r"eval\.sets held_out takes held-out prompts but data\.held_out_fraction is 0"
    ):
        recipe(data={"held_out_fraction": 0.0})
    recipe(data={"held_out_fraction": 0.0}, eval={"sets": []})


def test_options_that_the_task_of_a_set_lacks_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"eval\.sets a: .*digts"):
        recipe(eval={"sets": [{"name": "a", "task": "copy_digits", "options": {"digts": 2}}]})
    with pytest.raises(ValidationError, match=r"eval\.sets a.*nonsense"):
        recipe(eval={"sets": [{"name": "a", "task": "nonsense"}]})
