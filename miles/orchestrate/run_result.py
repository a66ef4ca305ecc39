"""What a finished run gives to the program that started it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.evaluate.best import Best, read_best
from miles.orchestrate.run_folder import RunFolder


@dataclass(frozen=True)
class RunResult:
    """`line`: the closing line; `result`: `result.json`; `rows`: `metrics.jsonl`, the row of the last evaluation included."""

    line: str
    result: dict[str, Any]
    folder: Path
    rows: list[dict[str, Any]] = field(repr=False)

    def __str__(self) -> str:
        return self.line

    def metric(self, name: str) -> list[float]:
        """The values of a metric in the rows that have it, in their order. `KeyError` when none has."""
        values = [float(row[name]) for row in self.rows if name in row]
        if not values:
            raise KeyError(f"{name}: no row of {self.folder}/metrics.jsonl has it")
        return values

    @property
    def model(self) -> Path:
        """The exported model (Hugging Face folder)."""
        return RunFolder(self.folder).exported_model

    @property
    def best(self) -> Best | None:
        """What `run.keep_best` kept."""
        return read_best(RunFolder(self.folder).best)
