"""A resumed run goes on with the data and the model that it was started with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from miles.config import ConfigError
from miles.orchestrate import input_record
from miles.orchestrate.errors import RunFolderError
from miles.orchestrate.input_record import check_or_record, fingerprint, input_files
from miles.orchestrate.run_folder import RunFolder, claimed, locate
from miles.recipe.schema import Recipe

Make = Callable[..., Recipe]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return path


@pytest.fixture
def reads_file(recipe: Make, data: Path) -> Recipe:
    return recipe(data={"task": "jsonl", "jsonl": {"path": str(data)}})


def start(recipe: Recipe, *, checkpoint: bool = False) -> RunFolder:
    with claimed(locate(recipe, []), recipe, fresh=False) as folder:
        check_or_record(recipe, folder)
        if checkpoint:
            (folder.checkpoints / "iter_5").mkdir()
        return folder


def test_size_and_hash_are_recorded_and_the_same_content_resumes(reads_file: Recipe, data: Path) -> None:
    folder = start(reads_file, checkpoint=True)
    assert json.loads(folder.inputs.read_text())["files"] == {str(data): fingerprint(data)}
    data.write_text(data.read_text())
    start(reads_file)


def test_changed_data_file_is_refused_on_resume_with_file_and_ways_out(reads_file: Recipe, data: Path) -> None:
    start(reads_file, checkpoint=True)
    data.write_text(data.read_text().replace("2", "3"))
    with pytest.raises(RunFolderError, match=rf"{data}: is not what this run was started with .*restore it.*--fresh"):
        start(reads_file)
    with claimed(locate(reads_file, []), reads_file, fresh=True) as folder:
        check_or_record(reads_file, folder)


def test_run_that_saved_nothing_takes_the_new_content_and_makes_its_model_again(reads_file: Recipe, data: Path) -> None:
    folder = start(reads_file)
    folder.created_model.mkdir()
    start(reads_file)
    assert folder.created_model.exists()
    data.write_text(data.read_text() * 2)
    start(reads_file, checkpoint=True)
    assert not folder.created_model.exists()
    start(reads_file)


def test_changed_code_of_one_s_own_is_refused_on_resume(recipe: Make, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def f(inputs):\n    return inputs.per_token(inputs.rewards)\n")
    given = recipe(algo={"advantage": f"python:{own}:f"})
    start(given, checkpoint=True)
    own.write_text(own.read_text().replace("rewards", "rewards * 2"))
    with pytest.raises(RunFolderError, match=r"own\.py: is not what this run was started with"):
        start(given)


def test_changed_and_missing_model_files_are_refused(recipe: Make, tmp_path: Path) -> None:
    model = tmp_path / "weights"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        (model / name).write_text(name)
    given = recipe(model={"path": str(model)})
    assert {path.name for path in input_files(given)} == {"config.json", "tokenizer.json", "model.safetensors"}
    start(given, checkpoint=True)
    (model / "README.md").write_text("other words change nothing")
    start(given)
    (model / "model.safetensors").write_text("model.safetensorS")
    with pytest.raises(RunFolderError, match=r"model\.safetensors: is not what .*17 bytes, .* then, 17 bytes"):
        start(given)
    (model / "model.safetensors").unlink()
    with pytest.raises(RunFolderError, match=r"model\.safetensors: is not what .*no file now"):
        start(given)


def test_large_file_is_told_apart_by_evenly_spread_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_record, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(input_record, "BLOCK_BYTES", 10)
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(5000))
    before = fingerprint(path)
    for place in (0, 4999):
        changed = bytearray(5000)
        changed[place] = 1
        path.write_bytes(changed)
        assert fingerprint(path) != before
    path.write_bytes(bytes(5001))
    assert fingerprint(path) != before


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"files": 3}'])
def test_damaged_record_is_refused_with_a_way_out(reads_file: Recipe, text: str) -> None:
    folder = start(reads_file, checkpoint=True)
    folder.inputs.write_text(text)
    with pytest.raises(RunFolderError, match=r"inputs\.json: is not a record .*; remove it to go on"):
        start(reads_file)
    folder.inputs.unlink()
    folder.inputs.mkdir()
    with pytest.raises(RunFolderError, match=r"inputs\.json: is not a record .*; remove it to go on"):
        start(reads_file)
    folder.inputs.rmdir()
    start(reads_file)


def test_input_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent: cannot be read \(No such file or directory\)"):
        fingerprint(tmp_path / "absent")


def test_every_file_that_decides_prompts_is_recorded(recipe: Make, data: Path, tmp_path: Path) -> None:
    named = {name: tmp_path / name for name in ("held.jsonl", "own.jinja", "eval.jsonl")}
    made = recipe(
        data={
            "task": "jsonl",
            "jsonl": {"path": str(data)},
            "held_out_path": str(named["held.jsonl"]),
            "chat_template": str(named["own.jinja"]),
        },
        eval={"sets": [{"name": "other", "path": str(named["eval.jsonl"])}]},
    )
    assert sorted(input_files(made)) == sorted([data, *named.values()])
