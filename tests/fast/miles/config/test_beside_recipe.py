"""Paths of the data begin at the folder of the file that names them, wherever the command is run."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from miles.config.beside_recipe import RecipePath, with_absolute_paths
from miles.data.config import DataConfig
from miles.recipe import load


class Inner(BaseModel):
    file: RecipePath | None = None
    other: Path = Path("x")


class Outer(BaseModel):
    inner: Inner | None = None
    several: tuple[Inner, ...] = ()
    file: RecipePath = Path("x")
    free: dict[str, str] = {}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"file": "a"}, {"file": "/r/a"}),
        ({"file": "../a"}, {"file": "/a"}),
        ({"file": "/a"}, {"file": "/a"}),
        ({"file": ""}, {"file": ""}),
        ({"file": 3, "inner": None}, {"file": 3, "inner": None}),
        ({"inner": {"file": "a", "other": "b"}}, {"inner": {"file": "/r/a", "other": "b"}}),
        ({"several": [{"file": "a"}, 3]}, {"several": [{"file": "/r/a"}, 3]}),
        ({"free": {"file": "a"}, "unknown": {"file": "a"}}, {"free": {"file": "a"}, "unknown": {"file": "a"}}),
        ([], []),
    ],
)
def test_marked_fields_alone_are_made_absolute(data, expected):
    assert with_absolute_paths(Outer, data, Path("/r")) == expected


def test_words_of_a_field_are_no_paths():
    def made(value):
        return with_absolute_paths(DataConfig, {"chat_template": value}, Path("/r"))["chat_template"]

    assert (made("tokenizer"), made("own.jinja"), made(None)) == ("tokenizer", "/r/own.jinja", None)


def test_each_file_of_an_extended_recipe_counts_from_its_own_folder(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "base.yaml").write_text(
        "name: base\ndata: {task: jsonl, jsonl: {path: rows.jsonl}, held_out_path: held.jsonl}\n"
        "rollout: {reward: {kind: python, options: {path: 'own.py:f'}}}\n"
    )
    (tmp_path / "top.yaml").write_text("extends: base/base.yaml\nname: top\ndata: {chat_template: own.jinja}\n")
    monkeypatch.chdir("/")
    recipe = load(tmp_path / "top.yaml", ["data.held_out_path=other.jsonl"])
    assert recipe.data.jsonl.path == tmp_path / "base" / "rows.jsonl"
    assert recipe.data.held_out_path == tmp_path / "other.jsonl"
    assert recipe.data.chat_template == str(tmp_path / "own.jinja")
    assert recipe.rollout.reward.options["path"] == f"python:{tmp_path}/base/own.py:f"


def test_an_own_task_needs_no_prefix(tmp_path):
    (tmp_path / "r.yaml").write_text("name: r\ndata: {task: python, python: {path: 'own/task.py:Sums'}}\n")
    assert load(tmp_path / "r.yaml").data.python.path == f"python:{tmp_path}/own/task.py:Sums"
    assert load(tmp_path / "r.yaml", ["data.python.path=pkg.mod:Sums"]).data.python.path == "python:pkg.mod:Sums"
