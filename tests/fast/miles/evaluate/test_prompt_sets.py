"""Prompts of sets: which they are, that training's stream stays where it was, and how many training sees too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles.config import ConfigError
from miles.data.config import DataConfig
from miles.data.prompts import PromptSource
from miles.evaluate.config import DEFAULT_PROMPTS, EvalSet
from miles.evaluate.prompt_sets import FIRST_ID, data_of, read_prompts, seen_in_training


class Letters:
    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(letter) for letter in text], dtype=np.int64)


def chosen(**options: Any) -> EvalSet:
    return EvalSet.model_validate_json(json.dumps({"name": "a", **options}))


def rows(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))
    return path


def texts(one: EvalSet, data: DataConfig, seed: int = 0) -> list[str]:
    return [prompt.text for prompt in read_prompts(one, data, Letters(), seed)[1]]


DATA = DataConfig()


def test_without_a_place_of_its_own_a_set_is_what_training_never_draws() -> None:
    held_out = texts(chosen(prompts=20), DATA)
    assert len(held_out) == 20
    assert len(texts(chosen(), DATA)) == DEFAULT_PROMPTS
    trained = {prompt.text for prompt in PromptSource(DATA, Letters(), 3).next_groups(400)}
    assert trained.isdisjoint(held_out)


def test_each_row_of_a_file_comes_once(tmp_path: Path) -> None:
    path = rows(tmp_path / "e.jsonl", [f"{n}=" for n in range(30)])
    found = texts(chosen(path=str(path)), DATA)
    assert sorted(found) == sorted(f"{n}=" for n in range(30))
    assert len(texts(chosen(path=str(path), prompts=7), DATA)) == 7
    with pytest.raises(ConfigError, match=r"eval\.sets a: prompts is 31, but there are 30; lower it to 30"):
        texts(chosen(path=str(path), prompts=31), DATA)


def test_a_file_is_read_as_trainings_file_is_unless_the_set_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text('{"q": "1=", "a": "1"}\n')
    keys = {"prompt_key": "q", "answer_key": "a"}
    section = {"path": str(rows(tmp_path / "t.jsonl", ["2=", "3="])), **keys}
    data = DataConfig.model_validate_json(json.dumps({"task": "jsonl", "jsonl": section}))
    assert texts(chosen(path=str(tmp_path / "e.jsonl")), data) == ["1="]
    assert texts(chosen(path=str(tmp_path / "e.jsonl"), options=keys), DATA) == ["1="]
    with pytest.raises(ConfigError, match="prompt"):
        texts(chosen(path=str(tmp_path / "e.jsonl")), DATA)


def test_another_task_has_its_own_options_and_nothing_of_trainings() -> None:
    data = DataConfig.model_validate_json(json.dumps({"copy_digits": {"digits": 2}}))
    assert {len(text) for text in texts(chosen(task="copy_digits", options={"digits": 5}), data)} == {6}
    assert {len(text) for text in texts(chosen(task="copy_digits"), data)} == {3}
    gym = data_of(chosen(task="reasoning_gym", options={"dataset": "basic_arithmetic"}), data)
    assert (gym.task, gym.held_out_fraction, gym.copy_digits.digits) == ("reasoning_gym", 0.0, 3)


def test_options_that_do_not_exist_name_the_set() -> None:
    with pytest.raises(ConfigError, match=r"eval\.sets a.*digts"):
        data_of(chosen(task="copy_digits", options={"digts": 5}), DATA)


def test_prompts_are_the_same_for_every_seed_of_a_run_and_ids_are_far_from_trainings() -> None:
    def ids(name: str) -> list[int]:
        return [
            p.prompt_id
            for p in read_prompts(chosen(prompts=5).model_copy(update={"name": name}), DATA, Letters(), 0)[1]
        ]

    assert texts(chosen(prompts=5), DATA) == texts(chosen(prompts=5), DATA)
    assert min(ids("a") + ids("b")) >= FIRST_ID
    assert set(ids("a")).isdisjoint(ids("b"))
    assert ids("a") == list(range(ids("a")[0], ids("a")[0] + 5))


def test_overlap_is_counted_by_text(tmp_path: Path) -> None:
    path = rows(tmp_path / "e.jsonl", ["1=", " 2=\n", "3=", "4="])
    _, prompts = read_prompts(chosen(path=str(path)), DATA, Letters(), 0)
    assert seen_in_training(prompts, ["2=", "4= ", "5="]) == 2
    assert seen_in_training(prompts, []) == 0


def test_the_suffix_of_a_file_decides_its_form_and_keys_are_trainings(tmp_path: Path) -> None:
    section = {"path": str(rows(tmp_path / "t.jsonl", ["2=", "3="])), "prompt_key": "q"}
    data = DataConfig.model_validate_json(
        json.dumps({"task": "dataset", "dataset": {**section, "split": "train"}, "held_out_path": section["path"]})
    )
    found = data_of(chosen(path=str(tmp_path / "e.parquet")), data)
    assert (found.task, found.dataset, found.held_out_path, found.held_out_fraction) == ("parquet", None, None, 0.0)
    assert found.parquet is not None
    assert (found.parquet.prompt_key, found.parquet.path) == ("q", tmp_path / "e.parquet")
    assert data_of(chosen(path=str(tmp_path / "e.jsonl")), data).task == "jsonl"
    assert data_of(chosen(path=str(tmp_path / "folder")), data).dataset.split == "train"
    assert data_of(chosen(path=str(tmp_path / "folder")), DATA).task == "jsonl"


def test_a_held_out_file_is_evaluated_whole_and_once(tmp_path: Path) -> None:
    held = rows(tmp_path / "h.jsonl", ["7=", "8=", "9="])
    section = {"path": str(rows(tmp_path / "t.jsonl", ["2=", "3="]))}
    data = DataConfig.model_validate_json(json.dumps({"task": "jsonl", "jsonl": section, "held_out_path": str(held)}))
    assert texts(chosen(), data) == ["7=", "8=", "9="]
    assert texts(chosen(prompts=2), data) == ["7=", "8="]
