"""Rows of Parquet files and of folders that Hugging Face `datasets` wrote are those of the same JSON lines."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from miles.config import ConfigError
from miles.data.config import DataConfig, DatasetConfig, JsonlConfig, ParquetConfig
from miles.data.tasks import build_task
from miles.data.tasks.row_sources import source_files

ROWS = [
    {"question": f"{n} + {n}?", "answer": {"value": 2 * n, "steps": [n, n]}, "level": n, "note": None} for n in range(7)
]
CHATS = [
    {
        "chat": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2"}],
        "tools": json.dumps([{"type": "function", "function": {"name": "add"}}]),
        "answer": "3",
    },
    {
        "chat": [
            {"role": "user", "content": "1+3"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"function": {"name": "add", "arguments": {"a": 1}}},
                    {"function": {"name": "no", "arguments": {"b": 2}}},
                ],
            },
            {"role": "tool", "content": "4", "name": "add"},
        ],
        "tools": None,
        "answer": "4",
    },
]
TEXT = {"prompt_key": "question", "shuffle": False}
MESSAGES = {"messages_key": "chat", "tools_key": "tools", "shuffle": False}


def items(config: DataConfig) -> list:
    task = build_task(config, 0)
    found = [task.item(index) for index in range(task.size)]
    return [(item.text, item.answer, item.metadata, item.conversation) for item in found]


def lines(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_jsonl(folder, rows, options):
    lines(folder / "rows.jsonl", rows)
    return items(DataConfig(task="jsonl", jsonl=JsonlConfig(path=folder / "rows.jsonl", **options)))


def as_parquet(folder, rows, options):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=2)
    return items(DataConfig(task="parquet", parquet=ParquetConfig(path=folder / "rows.parquet", **options)))


def as_parquet_folder(folder, rows, options):
    (folder / "parts").mkdir()
    for number, part in enumerate((rows[:1], rows[1:])):
        schema = pyarrow.Table.from_pylist(rows).schema
        table = pyarrow.Table.from_pylist(part, schema=schema)
        pyarrow.parquet.write_table(table, folder / "parts" / f"part-{number}.parquet")
    (folder / "parts" / "README.md").write_text("no rows")
    return items(DataConfig(task="parquet", parquet=ParquetConfig(path=folder / "parts", **options)))


def as_dataset(folder, rows, options):
    datasets.Dataset.from_list(rows).save_to_disk(folder / "set", num_shards=2)
    return items(DataConfig(task="dataset", dataset=DatasetConfig(path=folder / "set", **options)))


def as_dataset_with_splits(folder, rows, options):
    both = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:1])}
    )
    both.save_to_disk(folder / "sets")
    config = DatasetConfig(path=folder / "sets", split="train", **options)
    return items(DataConfig(task="dataset", dataset=config))


@pytest.mark.parametrize("form", [as_parquet, as_parquet_folder, as_dataset, as_dataset_with_splits])
@pytest.mark.parametrize(("rows", "options"), [(ROWS, TEXT), (CHATS, MESSAGES)], ids=["text", "messages"])
def test_every_form_gives_the_same_items(tmp_path, form, rows, options):
    expected = as_jsonl(tmp_path, rows, options)
    assert len(expected) == len(rows)
    assert form(tmp_path, rows, options) == expected


def test_only_named_columns_are_read_and_become_metadata(tmp_path):
    rows = [{"prompt": "1", "answer": 1, "level": 2, "when": datetime.date(2026, 1, 1)}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(
        ConfigError, match=r"a\.parquet: row 1: column 'when' has a value that JSON does not know \(date\)"
    ):
        items(DataConfig(task="parquet", parquet=ParquetConfig(path=tmp_path / "a.parquet")))
    config = ParquetConfig(path=tmp_path / "a.parquet", metadata_keys=["level"])
    assert items(DataConfig(task="parquet", parquet=config)) == [("1", 1, {"level": 2}, None)]
    config = ParquetConfig(path=tmp_path / "a.parquet", metadata_keys=[], answer_key=None)
    assert items(DataConfig(task="parquet", parquet=config)) == [("1", None, {}, None)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "no column 'prompt' (prompt_key); it has question, answer, level, note; set prompt_key to one of them"),
        ({"prompt_key": "qestion"}, "no column 'qestion' (prompt_key); it has question, answer, level, note; did you mean question?"),
        ({"messages_key": "chat"}, "no column 'chat' (messages_key)"),
        ({"prompt_key": "question", "answer_key": "answers"}, "(answer_key); it has question, answer, level, note; did you mean answer?"),
        ({"prompt_key": "question", "metadata_keys": ["levl"]}, "(metadata_keys)"),
    ],
)  # fmt: skip
def test_a_missing_column_names_those_that_are_there(tmp_path, options, said):
    for form in (as_parquet, as_dataset):
        with pytest.raises(ConfigError) as raised:
            form(tmp_path, ROWS, options)
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)


def test_files_that_hold_no_rows_are_refused_with_the_fix(tmp_path):
    def said(task, **options):
        with pytest.raises(ConfigError) as raised:
            items(DataConfig.model_validate({"task": task, task: options}))
        return str(raised.value)

    (tmp_path / "text.parquet").write_text("no Parquet")
    assert "text.parquet: " in said("parquet", path=tmp_path / "text.parquet")
    assert "no such file; a relative path begins at the recipe's folder" in said("parquet", path=tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "holds no .parquet file; name a Parquet file or a folder" in said("parquet", path=tmp_path / "empty")
    assert "has no state.json; name a folder that `save_to_disk`" in said("dataset", path=tmp_path / "empty")
    whole = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": whole}).save_to_disk(tmp_path / "sets")
    assert "split is not set: " in said("dataset", path=tmp_path / "sets")
    assert "split test is not there" in said("dataset", path=tmp_path / "sets", split="test")
    whole.save_to_disk(tmp_path / "set")
    assert "has no splits; remove it" in said("dataset", path=tmp_path / "set", split="train", prompt_key="question")
    # Hugging Face flattens an order of rows when it saves; older versions kept it.
    state = json.loads((tmp_path / "set" / "state.json").read_text())
    (tmp_path / "set" / "state.json").write_text(
        json.dumps({**state, "_indices_data_files": [{"filename": "i.arrow"}]})
    )
    assert "save the result of flatten_indices()" in said("dataset", path=tmp_path / "set", prompt_key="question")
    (tmp_path / "set" / "state.json").write_text(json.dumps({**state, "_data_files": [{"filename": "../../x.arrow"}]}))
    assert "lists no files" in said("dataset", path=tmp_path / "set", prompt_key="question")
    (tmp_path / "set" / "state.json").write_text("{")
    assert "cannot read" in said("dataset", path=tmp_path / "set", prompt_key="question")


def test_a_damaged_file_is_named(tmp_path):
    as_dataset(tmp_path, ROWS, TEXT)
    first = sorted((tmp_path / "set").glob("*.arrow"))[0]
    first.write_bytes(first.read_bytes()[:100])
    with pytest.raises(ConfigError, match=rf"data\.dataset\.path: cannot read {first}: .*; write the file again"):
        items(DataConfig(task="dataset", dataset=DatasetConfig(path=tmp_path / "set", **TEXT)))


def test_the_files_of_a_source_are_those_that_decide_its_rows(tmp_path):
    as_dataset_with_splits(tmp_path, ROWS, TEXT)
    as_parquet_folder(tmp_path, ROWS, TEXT)
    found = source_files("dataset", DatasetConfig(path=tmp_path / "sets", split="train"))
    assert {"dataset_dict.json", "state.json", "data-00000-of-00001.arrow"} <= {file.name for file in found}
    parts = source_files("parquet", ParquetConfig(path=tmp_path / "parts"))
    assert [file.name for file in parts] == ["part-0.parquet", "part-1.parquet"]
    shutil.rmtree(tmp_path / "parts")
    assert source_files("parquet", ParquetConfig(path=tmp_path / "parts")) == [tmp_path / "parts"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt_key": "a", "messages_key": "b"}, "prompt_key and messages_key are both set"),
        ({"tools_key": "t"}, "tools_key has no effect without messages_key"),
    ],
)
def test_two_prompts_of_one_row_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        JsonlConfig(path=Path("x"), **options)


def test_tools_that_are_text_must_be_json(tmp_path):
    rows = [{"chat": [{"role": "user", "content": "x"}], "tools": "[oops", "answer": 1}]
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: 'tools' is text that is not JSON: .*; write a list"):
        as_jsonl(tmp_path, rows, MESSAGES)
