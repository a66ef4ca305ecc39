"""Rows of JSON-lines files, Parquet files and folders of Hugging Face `datasets`, each with the place it is from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from miles.config import ConfigError
from miles.config.json_text import read_object
from miles.data.config import DatasetConfig, RowsConfig

Row = dict[str, Any]
_SCALARS = (str, int, float, bool, type(None))


def open_rows(kind: str, config: RowsConfig, option: str) -> Iterator[tuple[str, Row]]:
    """(place, row) of each row. `ConfigError` names the place of what cannot be read."""
    if kind == "jsonl":
        return _json_lines(config.path, option)
    return _arrow_rows(kind, config, option)


def source_files(kind: str, config: RowsConfig) -> list[Path]:
    """The files that hold the rows; the path itself where there is none."""
    path = config.path
    if kind == "jsonl" or not path.is_dir():
        return [path]
    if kind == "parquet":
        return sorted(path.glob("*.parquet")) or [path]
    return sorted(file for pattern in ("**/*.arrow", "**/*.json") for file in path.glob(pattern)) or [path]


def _json_lines(path: Path, option: str) -> Iterator[tuple[str, Row]]:
    try:
        # Only a newline ends a row: text may hold the other line ends of Unicode. A byte order mark is passed over.
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path}: {_reason(error)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: cannot read {path}: {error}; save it as UTF-8") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{place}: not JSON: {error.msg} at column {error.colno}; correct the line") from None
        except ValueError:
            raise ConfigError(f"{place}: a number has too many digits to be read; quote it to make it text") from None
        except RecursionError:
            raise ConfigError(f"{place}: nested too deeply; write a row of a few levels") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{place}: expected a JSON object, got {type(row).__name__}; write one object a line")
        yield place, row


def _arrow_rows(kind: str, config: RowsConfig, option: str) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(
            f"data.task {kind} needs the package pyarrow; install the extra: pip install 'miles-rl[parquet]'"
        ) from None
    if not config.path.exists():
        raise ConfigError(
            f"{option}: cannot read {config.path}: no such file; a relative path begins at the recipe's folder"
        )
    files = _parquet_files(config.path, option) if kind == "parquet" else _dataset_files(config, option)
    for file in files:
        try:
            yield from _table_rows(kind, file, config)
        except (pyarrow.ArrowException, OSError) as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f"{option}: cannot read {file}: {said[:200]}; write the file again") from None


def _table_rows(kind: str, file: Path, config: RowsConfig) -> Iterator[tuple[str, Row]]:
    import pyarrow

    if kind == "parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(file) as opened:
            columns = _columns(opened.schema_arrow.names, file, config)
            yield from _batches(opened.iter_batches(columns=columns), file, config)
        return
    with pyarrow.memory_map(str(file)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
        columns = _columns(stream.schema.names, file, config)
        yield from _batches((batch.select(columns) for batch in stream), file, config)


def _batches(batches: Any, file: Path, config: RowsConfig) -> Iterator[tuple[str, Row]]:
    number = 0
    # Arrow fills the keys that other rows have with nulls; in messages and tools these mean a key left out.
    filled = {config.messages_key, config.tools_key}
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            place = f"{file}: row {number}"
            for key, value in row.items():
                if not _is_json(value):
                    raise ConfigError(
                        f"{place}: column {key!r} has a value that JSON does not know ({type(value).__name__}); convert the "
                        "column, or leave it out by metadata_keys"
                    )
            yield place, {key: _without_nulls(value) if key in filled else value for key, value in row.items()}


def _columns(names: list[str], file: Path, config: RowsConfig) -> list[str]:
    """The columns to read. `ConfigError` for one that the options name and the file lacks."""
    prompt = (
        ("messages_key", config.messages_key) if config.messages_key else ("prompt_key", config.prompt_key or "prompt")
    )
    named = [prompt, ("tools_key", config.tools_key), ("answer_key", config.answer_key)]
    named += [("metadata_keys", key) for key in config.metadata_keys or ()]
    for option, name in named:
        if name is not None and name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"set {option} to one of them"
            raise ConfigError(f"{file}: no column {name!r} ({option}); it has {', '.join(names)}; {hint}")
    if config.metadata_keys is None:
        return names
    wanted = {name for _, name in named}
    return [name for name in names if name in wanted]


def _parquet_files(path: Path, option: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.parquet"))
    if not files:
        raise ConfigError(f"{option}: {path} holds no .parquet file; name a Parquet file or a folder of them")
    return files


def _dataset_files(config: RowsConfig, option: str) -> list[Path]:
    """The Arrow files of a folder that `save_to_disk` wrote, by its own list of them."""
    folder, split = config.path, config.split if isinstance(config, DatasetConfig) else None
    splits_file = folder / "dataset_dict.json"
    if splits_file.is_file():
        splits = _list(_object(splits_file, option).get("splits"))
        if split not in splits:
            said = "is not set" if split is None else f"{split} is not there"
            raise ConfigError(
                f"data.dataset.split {said}: {folder} has the splits {', '.join(splits)}; name one of them"
            )
        folder = folder / str(split)
    elif split is not None:
        raise ConfigError(f"data.dataset.split is {split}, but {folder} has no splits; remove it")
    state = folder / "state.json"
    if not state.is_file():
        raise ConfigError(f"{option}: {folder} has no state.json; name a folder that `save_to_disk` of datasets wrote")
    if _object(state, option).get("_indices_data_files"):
        raise ConfigError(f"{option}: {folder} has an index of its rows; save the result of flatten_indices() instead")
    names = [
        entry.get("filename") for entry in _object(state, option).get("_data_files", []) if isinstance(entry, dict)
    ]
    listed = _list(names)
    if not listed:
        raise ConfigError(f"{option}: {state} lists no files; save the data set again")
    return [folder / name for name in listed]


def _list(names: Any) -> list[str]:
    """Names of files or folders that lie where the list lies."""
    return [
        name for name in names or [] if isinstance(name, str) and Path(name).name == name and name not in ("", "..")
    ]


def _object(path: Path, option: str) -> dict[str, Any]:
    return read_object(path, option=option, remedy="save the data set again")


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(child) for name, child in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return isinstance(value, _SCALARS)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(child) for name, child in value.items() if child is not None}
    return [_without_nulls(child) for child in value] if isinstance(value, list) else value


def _reason(error: OSError) -> str:
    where = "; a relative path begins at the recipe's folder" if isinstance(error, FileNotFoundError) else ""
    return f"{error.strerror or error}{where}"
