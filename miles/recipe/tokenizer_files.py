"""What a model folder's tokenizer files ask for that a run does otherwise: told once, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from miles.config import ConfigError

Objection = tuple[Literal["error", "warning"], str, str]


def objections(folder: Path) -> Iterator[Objection]:
    """(severity, what is so, what to do). Nothing for a folder without tokenizer, which `check_files` refuses."""
    from miles.data.end_tokens import read_end_tokens
    from miles.data.tokenizer import Tokenizer

    if not (folder / "tokenizer.json").is_file():
        return
    for note in Tokenizer(folder).notes:
        yield "warning", note, "remove the setting from tokenizer.json to silence this"
    try:
        ends = read_end_tokens(folder)
    except ConfigError as error:
        message, _, fix = str(error).rpartition("; ")
        yield "error", message, fix
        return
    if ends.note is not None:
        yield "warning", ends.note, "list all of them as eos_token_id in generation_config.json to silence this"
