"""JSON from outside: every fault is one kind of error, and every reader of files says so in its own words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles.config import ConfigError
from miles.config.json_text import parse_json, read_object
from miles.data.bundle_marker import read_json
from miles.models.create import read_tokenizer
from miles.observe.metrics_log import read_rows

FAULTS = {
    "deep": b"[" * 100_000,
    "a long number": b'{"step": ' + b"1" * 5000 + b"}",
    "cut off": b'{"a": ',
    "not text": b'{"a": "\xff"}',
    "nothing": b"",
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_a_decode_error(name):
    with pytest.raises(json.JSONDecodeError):
        parse_json(FAULTS[name])


def test_what_is_json_is_read():
    assert parse_json('{"a": [1, 2.5, null]}') == parse_json(b'{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}


@pytest.mark.parametrize("name", ["deep", "a long number"])
@pytest.mark.parametrize("reader", ["bundle marker", "tokenizer", "metrics"])
def test_readers_of_files_name_the_file(tmp_path: Path, reader, name):
    readers = {
        "bundle marker": lambda: read_json(tmp_path / "tokenizer.json"),
        "tokenizer": lambda: read_tokenizer(tmp_path),
        "metrics": lambda: read_rows(tmp_path / "tokenizer.json"),
    }
    (tmp_path / "tokenizer.json").write_bytes(FAULTS[name] + b"\n")
    with pytest.raises(Exception, match=r"tokenizer") as caught:
        readers[reader]()
    assert not isinstance(caught.value, RecursionError | json.JSONDecodeError)


@pytest.mark.parametrize("text", [*FAULTS.values(), b"[]", b"3", None])
def test_a_file_without_an_object_names_option_path_and_remedy(tmp_path, text):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=rf"data\.x: .*{path}.*; save it again"):
        read_object(path, option="data.x", remedy="save it again")
    path.write_text('{"a": 1}')
    assert read_object(path, option="data.x", remedy="save it again") == {"a": 1}
