"""Weights & Biases, online or offline, by its own package.

Offline, a life writes the whole run anew and removes what an earlier life left unsent: a killed process may have lost
any part of its buffer, and `wandb sync` then finds each step once. Online, the server says what it holds.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Any

from miles.observe.config import WandbConfig
from miles.observe.trackers import run_id
from miles.observe.trackers.tracker import TrackedRun, numbers


class WeightsAndBiases:
    """One run of W&B; its files lie in `wandb/` of the run folder."""

    def __init__(self, run: TrackedRun, config: WandbConfig) -> None:
        self._run, self._config = run, config
        self._handle: Any = None

    def open(self) -> int:
        import wandb

        where = f"{self._config.entity or ''}/{self._config.project}"
        name = run_id.known(self._run.folder, "wandb", where=where)
        if name is None:
            # Before anything is written under it: a kill in between makes no second run.
            name = secrets.token_hex(4)
            run_id.keep(self._run.folder, "wandb", name, where=where)
        mode = self._config.chosen_mode()
        offline = mode == "offline"
        sent = _forget_unsent(self._run.folder / "wandb", name) if offline else 0
        self._handle = wandb.init(
            id=name,
            resume="allow",
            project=self._config.project,
            entity=self._config.entity,
            name=self._run.name,
            dir=self._run.folder,
            mode=mode,
            config=self._run.settings,
            # Numbers and settings only: no code, no diff, no command line, no machine, no output.
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                save_code=False,
                silent=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        return sent if offline else int(self._handle.step)

    def append(self, row: dict[str, Any]) -> None:
        # Committed: without it a step is kept back until the next one comes.
        self._handle.log(dict(numbers(row)), step=row["step"], commit=True)

    def close(self, *, finished: bool) -> None:
        if self._handle is not None:
            self._handle.finish(exit_code=0 if finished else 1)


def _forget_unsent(folder: Path, name: str) -> int:
    """Remove offline files of the run that `wandb sync` did not send; 0, every row is written again.

    With some that were sent: they stay, and so does the rest, as the server would refuse steps that it has.
    """
    for path in sorted(folder.glob(f"offline-run-*-{name}")):
        if path.is_dir() and not path.is_symlink() and not list(path.glob("*.synced")):
            shutil.rmtree(path)
    return 0
