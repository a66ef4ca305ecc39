"""Sets whose answers do not fit are errors; prompts that training sees too are a warning with their number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles.config import ConfigError
from miles.recipe.evaluation_rules import objections
from miles.recipe.rules import check_or_raise
from miles.recipe.schema import Recipe


def recipe(*sets: dict[str, Any], **sections: Any) -> Recipe:
    return Recipe.model_validate_json(json.dumps({"name": "r", "eval": {"sets": sets}, **sections}))


def said(
    made: Recipe, *, positions: int | None = 64, trained: int = 2, longest: int = 10, overlap: int = 0
) -> list[tuple[str, ...]]:
    made = made.model_copy(update={"rollout": made.rollout.model_copy(update={"max_new_tokens": 8})})
    return list(objections(made, positions=positions, trained=trained, longest={"a": longest}, overlap={"a": overlap}))


def test_answers_must_fit_every_limit() -> None:
    made = recipe({"name": "a", "max_new_tokens": 60}, engine={"context_length": 32})
    problems = said(made)
    assert [severity for severity, _, _ in problems] == ["error", "error"]
    assert (
        "a prompt of 10 tokens and its answer need 70 positions, but the limit of the model's positions is 64"
        in problems[0][1]
    )
    assert problems[0][2] == "set its max_new_tokens to at most 54"
    assert "limit of engine.context_length is 32" in problems[1][1]
    assert said(made.model_copy(update={"engine": recipe().engine}), positions=70) == []
    (problem,) = said(recipe({"name": "a", "max_new_tokens": 1}), longest=64)
    assert problem[2] == "shorten the prompts"


def test_max_context_bounds_the_answer_and_must_leave_a_token() -> None:
    made = recipe({"name": "a", "max_new_tokens": 60}, rollout={"max_context": 20})
    assert said(made) == []
    (problem,) = said(made, longest=20)
    assert problem[0] == "error"
    assert problem[2] == "raise it to at least 21, or shorten the prompts"


def test_what_training_cannot_do_either_is_told_once_by_its_own_rule() -> None:
    made = recipe({"name": "a"})
    assert len(said(made, positions=17)) == 1
    assert said(made, positions=17, trained=10) == []
    assert said(made, positions=17, trained=9) != []
    short = recipe({"name": "a"}, rollout={"max_context": 10})
    assert len(said(short)) == 1
    assert said(short, trained=10) == []


def test_overlap_is_a_warning_with_the_number() -> None:
    (problem,) = said(recipe({"name": "a", "max_new_tokens": 8}), overlap=3)
    assert problem[:2] == ("warning", "eval.sets a: 3 of its prompts are among training's, word for word")


def file(path: Path, numbers: range) -> str:
    path.write_text("".join(json.dumps({"prompt": f"{n}=", "answer": str(n)}) + "\n" for n in numbers))
    return str(path)


def test_a_recipe_whose_set_overlaps_training_is_told_before_it_starts(tmp_path: Path) -> None:
    data = {"task": "jsonl", "jsonl": {"path": file(tmp_path / "t.jsonl", range(100))}, "held_out_fraction": 0.0}
    files = {
        name: file(tmp_path / f"{name}.jsonl", numbers)
        for name, numbers in (("part", range(95, 110)), ("none", range(200, 210)))
    }
    made = recipe(*({"name": name, "path": path} for name, path in files.items()), data=data)
    warnings = [finding for finding in check_or_raise(made) if finding.rule == "EVALUATION"]
    assert [finding.severity for finding in warnings] == ["warning"]
    assert "eval.sets part: 5 of its prompts are among training's" in str(warnings[0])


def test_what_training_holds_out_is_no_overlap(tmp_path: Path) -> None:
    path = file(tmp_path / "t.jsonl", range(300))
    data = {"task": "jsonl", "jsonl": {"path": path}, "held_out_fraction": 0.5}
    assert [
        f for f in check_or_raise(recipe({"name": "held", "prompts": 8}, data=data)) if f.rule == "EVALUATION"
    ] == []
    (warning,) = [f for f in check_or_raise(recipe({"name": "all", "path": path}, data=data)) if f.rule == "EVALUATION"]
    count = int(str(warning).split("eval.sets all: ")[1].split()[0])
    # All but what is held out; never all of them.
    assert 100 < count < 200


def test_a_set_that_cannot_fit_stops_the_recipe() -> None:
    with pytest.raises(
        ConfigError, match=r"\[EVALUATION\] eval\.sets a: a prompt of 4 tokens and its answer need 100004 positions"
    ):
        check_or_raise(recipe({"name": "a", "max_new_tokens": 100_000}))
