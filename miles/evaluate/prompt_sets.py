"""The prompts of evaluation sets, and how many of them training sees too."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles.config import ConfigError
from miles.config.validation import validate
from miles.data.config import ROW_TASKS, DataConfig
from miles.data.prompt_encoder import Encoder
from miles.data.prompts import Prompt, PromptSource
from miles.evaluate.config import DEFAULT_PROMPTS, EvalSet

# Ids of evaluated prompts begin here, far from those that training draws: requests of both may be in an engine at once.
FIRST_ID = 1 << 44
_IDS_OF_A_SET = 20  # bits


def data_of(chosen: EvalSet, data: DataConfig) -> DataConfig:
    """Where the set's prompts come from, as a `data` section. `ConfigError` for options that the task does not take."""
    if chosen.path is None and chosen.task is None:
        return data
    task = chosen.task or _form(chosen.path, data.task)
    section: dict[str, Any] = {}
    values = json.loads(data.model_dump_json(exclude_unset=True))
    # The file of what training holds out is no other set's.
    values.pop("held_out_path", None)
    if task != data.task and {task, data.task} <= set(ROW_TASKS):
        # Another form of file with the same keys.
        section, values["held_out_fraction"] = values.pop(data.task), 0.0
        section.pop("split", None)
    elif task == data.task:
        section = values.get(task) or {}
    else:
        # What is set for the training's own task says nothing about another.
        values.pop(data.task, None)
        values["held_out_fraction"] = 0.0
    if chosen.path is not None:
        section, values["held_out_fraction"] = {**section, "path": str(chosen.path)}, 0.0
    values |= {"task": task, task: {**section, **chosen.options}}
    return validate(DataConfig, values, locate=lambda _: f"eval.sets {chosen.name}")


def _form(path: Path | None, trained: str) -> str:
    """The task that reads `path`: by its suffix, else training's own, else JSON lines."""
    known = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
    return known.get(path.suffix if path is not None else "", trained if trained in ROW_TASKS else "jsonl")


def read_prompts(chosen: EvalSet, data: DataConfig, encoder: Encoder, seed: int) -> tuple[PromptSource, list[Prompt]]:
    """The set's source, which has the task's own scorer, and its prompts, the same for the same seed.

    Of a file each row comes once. `ConfigError` when there are fewer prompts than the set asks for.
    """
    source = PromptSource(data_of(chosen, data), encoder, seed)
    size = source.task.size
    count = chosen.prompts
    if count is None:
        count = size if chosen.path is not None and size is not None else DEFAULT_PROMPTS
    wanted = count if size is None else min(count, size)
    held_out = chosen.path is None and (chosen.task is None or source.config.has_held_out)
    # What renders conversations is not needed again: the source stays for its scorer.
    with source:
        drawn = source.held_out(count) if held_out else source.next_groups(wanted)
    if size is not None and not held_out:
        # Beyond its end a file begins again.
        drawn = [prompt for prompt in drawn if prompt.prompt_id < size]
    if chosen.prompts is not None and len(drawn) < chosen.prompts:
        raise ConfigError(
            f"eval.sets {chosen.name}: prompts is {chosen.prompts}, but there are {len(drawn)}; lower it to {len(drawn)} or "
            "remove it"
        )
    # By name: a set that is added changes nothing in the others.
    first_id = FIRST_ID + ((zlib.crc32(chosen.name.encode()) >> 8) << _IDS_OF_A_SET)
    return source, [replace(prompt, prompt_id=first_id + number) for number, prompt in enumerate(drawn)]


def seen_in_training(prompts: Sequence[Prompt], trained: Collection[str]) -> int:
    """How many prompts training sees too, by their keys without white space around them: before any chat template."""
    keys = {key.strip() for key in trained}
    return sum(prompt.key.strip() in keys for prompt in prompts)
