"""`inputs.json` of a run folder: which content the files had that a run reads from outside its folder.

The recipe names paths only. A resumed run that found another data file or another model there would go on with them
unnoticed, so size and sha256 are recorded at the start and compared at every resume. Left out: what installed
packages generate (reasoning-gym), files that a model folder holds but no run reads, and what code of the user's own
imports in its turn.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from miles.config import ConfigError, user_code
from miles.config.files import write_atomic
from miles.config.json_text import parse_json
from miles.data.config import OWN_TEMPLATE, DataConfig
from miles.data.tasks.row_sources import source_files
from miles.evaluate.prompt_sets import data_of
from miles.orchestrate.errors import RunFolderError
from miles.orchestrate.run_folder import RunFolder
from miles.orchestrate.warm_start import start_model
from miles.recipe import Recipe

# Files above this size are hashed in `BLOCKS` blocks of `BLOCK_BYTES`, evenly spread from the first byte to the last:
# training changes nearly every weight, and terabytes need not be read to see that.
WHOLE_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20
BLOCKS = 16
MODEL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
)

Fingerprint = dict[str, int | str]


def check_or_record(recipe: Recipe, folder: RunFolder) -> None:
    """Record the inputs of a new run; `RunFolderError` when those of a run with a checkpoint have changed.

    A run that saved nothing yet takes the new content and starts over.
    """
    now = {str(path): fingerprint(path) for path in input_files(recipe)}
    then = _read(folder.inputs)
    changed = (
        [] if then is None else sorted(path for path in then.keys() | now.keys() if then.get(path) != now.get(path))
    )
    if changed and any(folder.checkpoints.glob("iter_*")):
        assert then is not None
        path = changed[0]
        raise RunFolderError(
            f"{path}: is not what this run was started with ({_said(then.get(path))} then, {_said(now.get(path))} now); "
            "restore it, or use --fresh to start over, or --set name=NAME for another run"
        )
    if changed:
        # It was made for the earlier content (its vocabulary, for one).
        shutil.rmtree(folder.created_model, ignore_errors=True)
    if then is None or changed:
        write_atomic(folder.inputs, json.dumps({"schema": 1, "files": now}, indent=1) + "\n")


def input_files(recipe: Recipe) -> list[Path]:
    """Files outside the run folder that decide what the run computes."""
    files = data_files(recipe.data)
    for chosen in recipe.eval.sets:
        if chosen.path is not None or chosen.task is not None:
            files += data_files(data_of(chosen, recipe.data))
    for model in (start_model(recipe), recipe.algo.teacher):
        if model is not None:
            files += sorted(path for pattern in MODEL_FILES for path in Path(model).glob(pattern))
    return sorted(set(files)) + user_code.source_files(recipe.model_dump(mode="json"))


def data_files(data: DataConfig) -> list[Path]:
    """Files of prompts, and the chat template."""
    files: list[Path] = []
    if data.rows is not None:
        files += source_files(data.task, data.rows)
    if data.rows is not None and data.held_out_path is not None:
        files += source_files(data.task, data.rows.model_copy(update={"path": data.held_out_path}))
    if data.chat_template not in (None, OWN_TEMPLATE):
        files.append(Path(str(data.chat_template)))
    return files


def fingerprint(path: Path) -> Fingerprint:
    """`{"size": bytes, "sha256": hex}`; of large files the hash is of evenly spread blocks."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size <= WHOLE_BYTES:
                return {"size": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
            total = hashlib.sha256()
            for block in range(BLOCKS):
                file.seek(block * (size - BLOCK_BYTES) // (BLOCKS - 1))
                total.update(file.read(BLOCK_BYTES))
            return {"size": size, "sha256": total.hexdigest()}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a file that this user can read") from error


def _read(path: Path) -> dict[str, Fingerprint] | None:
    try:
        files = parse_json(path.read_text())["files"] if path.exists() else None
    except (OSError, ValueError, KeyError, TypeError):
        files = ()
    if files is None or isinstance(files, dict):
        return files
    raise RunFolderError(
        f"{path}: is not a record of a run's inputs; remove it to go on with the files as they are now, or use --fresh "
        "to start over"
    )


def _said(found: Fingerprint | None) -> str:
    return "no file" if found is None else f"{found['size']} bytes, sha256 {str(found['sha256'])[:12]}"
