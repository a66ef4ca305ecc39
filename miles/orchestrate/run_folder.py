"""The folder of one run: what is in it, who may write to it, and whether a run starts, resumes or is finished.

    <runs>/<name>/
      recipe.json       resolved recipe and its digest      checkpoints/   iter_<n>, see miles.train.checkpoint
      inputs.json       sha256 of the files it reads        model/         the model the run starts from, if created
      metrics.jsonl     one object a step
      samples.jsonl     samples as text, the older ones in  samples.1.jsonl
      tensorboard/      event files                         wandb/, mlflow.db, trackers/  of trackers that are switched on
      hf_model/         exported model of the finished run  logs/          engine messages
      replay/           steps recorded for `miles replay`
      best/             with `run.keep_best`, see miles.evaluate.best
      reward.png, reward.html, result.json (written last)

Overrides change the digest; a run with overrides lives in `<name>-<digest>`, so the same command finds it again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.config import ConfigError, environment
from miles.config.files import storage_error, write_atomic
from miles.config.json_text import parse_json
from miles.config.overrides import parse_override
from miles.orchestrate.errors import RunFolderError
from miles.recipe import Recipe, digest
from miles.recipe.schema import NOT_DETERMINING, canonical_json, differences

SUFFIX_CHARS = 8
PID_CHARS = 10


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run."""

    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def replay(self) -> Path:
        return self.path / "replay"

    @property
    def best(self) -> Path:
        return self.path / "best"

    @property
    def created_model(self) -> Path:
        return self.path / "model"

    @property
    def exported_model(self) -> Path:
        return self.path / "hf_model"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.json"

    @property
    def inputs(self) -> Path:
        return self.path / "inputs.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    def read_result(self) -> dict[str, Any] | None:
        """The result of a finished run, else None. `RunFolderError` when the file holds something else."""
        if not self.result.exists():
            return None
        try:
            result = parse_json(self.result.read_text())
        except (OSError, ValueError) as error:
            raise self._no_result(type(error).__name__) from None
        if not isinstance(result, dict) or not isinstance(result.get("line"), str):
            raise self._no_result("not an object with a line")
        return result

    def _no_result(self, reason: str) -> RunFolderError:
        return RunFolderError(
            f"{self.result}: is not the result of a run ({reason}); remove it and run the same command again to finish "
            "from the last checkpoint, or use --fresh to start over"
        )


def locate(recipe: Recipe, overrides: Sequence[str]) -> RunFolder:
    """Folder of this run: `<runs>/<name>`, or `<name>-<digest>` when overrides are given that change the recipe and
    not its name."""
    runs = Path(recipe.run.directory or environment.read("MILES_RUNS_DIR") or "runs")
    keys = [parse_override(text)[0] for text in overrides]
    # Where a run is and who watches it does not make it another one.
    changed = [key for key in keys if key[0] not in NOT_DETERMINING]
    suffix = "" if ("name",) in keys or not changed else f"-{digest(recipe)[:SUFFIX_CHARS]}"
    return RunFolder(runs / f"{recipe.name}{suffix}")


@contextlib.contextmanager
def claimed(folder: RunFolder, recipe: Recipe, *, fresh: bool) -> Iterator[RunFolder]:
    """Hold the folder for this process. `fresh` removes an earlier run in it.

    Raises `RunFolderError` when another process holds it, it cannot be written, or holds another recipe's run.
    """
    with contextlib.ExitStack() as stack:
        lock = _lock(folder.path)
        stack.callback(lock.close)
        if fresh:
            _clear(folder)
        _record_recipe(folder, recipe)
        try:
            for path in (folder.logs, folder.checkpoints):
                path.mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error(folder.path, error) from error
        yield folder


def _lock(path: Path) -> Any:
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Not opened for appending: the holder's number stands at the start.
        lock = os.fdopen(os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
    except OSError as error:
        raise storage_error(path, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise RunFolderError(
            f"{path}: a run with process id {holder} is using this folder; wait for it, or give this one a name: "
            "--set name=NAME"
        ) from None
    try:
        os.pwrite(lock.fileno(), f"{os.getpid():<{PID_CHARS}}".encode(), 0)
    except OSError as error:
        lock.close()
        raise storage_error(path, error) from error
    return lock


def _clear(folder: RunFolder) -> None:
    """Remove an earlier run; a folder without one is left as it is (`_record_recipe` refuses it)."""
    if not folder.recipe.is_file():
        return
    # recipe.json goes last: what an interruption leaves is still known to be a run.
    entries = sorted(folder.path.iterdir(), key=lambda entry: entry == folder.recipe)
    try:
        for entry in entries:
            if entry.name == ".lock":
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise storage_error(folder.path, error) from error


def _record_recipe(folder: RunFolder, recipe: Recipe) -> None:
    if folder.recipe.is_dir():
        raise RunFolderError(
            f"{folder.recipe}: is a folder, where a run keeps a file; move it away, or use --set name=NAME for another "
            "run folder"
        )
    if folder.recipe.exists():
        try:
            stored = Recipe.model_validate_json(json.dumps(parse_json(folder.recipe.read_text())["recipe"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunFolderError(
                f"{folder.recipe}: cannot be read as a recipe of this version ({type(error).__name__}); "
                "use --fresh to start over, or --set name=NAME for another folder"
            ) from None
        if digest(stored) != digest(recipe):
            changed = "; ".join(differences(stored, recipe)[:5])
            raise RunFolderError(
                f"{folder.path}: holds a run of another recipe ({changed}); use --fresh to start over, "
                "or --set name=NAME for another folder"
            )
        return
    leftovers = [entry.name for entry in folder.path.iterdir() if entry.name not in (".lock",)]
    if leftovers and not all(name.startswith(".") for name in leftovers):
        raise ConfigError(f"{folder.path}: is not empty and holds no run; choose another name or empty it")
    text = json.dumps({"digest": digest(recipe), "recipe": json.loads(canonical_json(recipe))}, indent=1)
    write_atomic(folder.recipe, text + "\n")
