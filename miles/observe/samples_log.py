"""`samples.jsonl`: what the model wrote, a few groups of each step, one JSON object a sample.

Two files, `samples.jsonl` and before it `samples.1.jsonl`, share a bound of bytes: at half of it the newer becomes the
older one, and what was the older one is gone. All lines of a step are written in one call; `rewind` removes what a kill
cut and what lies beyond the checkpoint that the run resumes from. Observation only: a file that cannot be written is told
once and costs no step.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from miles.config.errors import ConfigError
from miles.config.files import replacing
from miles.config.json_text import parse_json
from miles.data.sample import Sample
from miles.observe.config import SamplesConfig

CURRENT, OLDER = "samples.jsonl", "samples.1.jsonl"
# One line as a reader accepts it; a writer's lines are bounded by `max_chars`.
MAX_LINE_BYTES = 1 << 24
MIB = 1 << 20


class Decoder(Protocol):
    """What is needed of `miles.data.tokenizer.Tokenizer`."""

    def decode(self, ids: np.ndarray, *, skip_special: bool = True) -> str: ...


class SamplesLog:
    """Writes the first groups of each step below `folder`. `warn` is called at the first failure, and never again."""

    def __init__(self, folder: Path, config: SamplesConfig, decoder: Decoder, warn: Callable[[str], None]) -> None:
        self._folder, self._config, self._decoder, self._warn = folder, config, decoder, warn
        self._half = int(config.max_mib * MIB / 2)
        self._failed = False
        self._file: Any = None

    def append(self, step: int, samples: Sequence[Sample]) -> None:
        """The lines of one step; after a failure nothing of the step is left in the file."""
        if self._failed or self._config.groups == 0:
            return
        try:
            self._write(b"".join(orjson.dumps(record) + b"\n" for record in self._records(step, samples)))
        # orjson's errors are of TypeError.
        except (OSError, ValueError, TypeError) as error:
            self._failed = True
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            self._warn(f"{self._folder / CURRENT}: no more samples are written: {reason}; the run goes on")

    def sync(self) -> None:
        """Make what was written durable."""
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, data: bytes) -> None:
        path = self._folder / CURRENT
        if self._file is None:
            self._file = path.open("ab", buffering=0)
        size = self._file.tell()
        if len(data) > self._half:
            raise ValueError(
                f"those of a step take {len(data)} bytes, above half of observe.samples.max_mib; lower "
                "observe.samples.groups or observe.samples.max_chars, or raise observe.samples.max_mib"
            )
        if size + len(data) > self._half:
            self._file.close()
            path.replace(self._folder / OLDER)
            self._file, size = path.open("ab", buffering=0), 0
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise

    def _records(self, step: int, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
        prompts: dict[int, str] = {}
        for sample in samples:
            group = sample.group_id
            if group not in prompts:
                if len(prompts) == self._config.groups:
                    # Groups are not always next to each other: a later sample may be of one that is shown.
                    continue
                prompts[group] = self._text(sample.tokens[: sample.prompt_length])
            yield {"step": step, **self._record(sample, prompts[group])}

    def _record(self, sample: Sample, prompt: str) -> dict[str, Any]:
        log_probs, written = sample.rollout_log_probs, sample.loss_mask == 1
        return {
            "group": sample.group_id,
            "sample": sample.sample_id,
            "prompt": prompt,
            "completion": self._text(sample.tokens[sample.prompt_length :]),
            "reward": sample.reward,
            "reward_parts": sample.reward_parts,
            # Of the tokens that the policy wrote, as the engine drew them.
            "log_prob_sum": None if log_probs is None else _number(float(log_probs[written].sum(dtype=np.float64))),
            "tokens": sample.response_length,
            "weight_versions": _versions(sample),
            "status": str(sample.status),
        }

    def _text(self, ids: np.ndarray) -> str:
        # With special tokens: which of them ended a response is worth seeing.
        text = self._decoder.decode(ids, skip_special=False)
        limit = self._config.max_chars
        if len(text) <= limit:
            return text
        half = limit // 2
        return f"{text[:half]}[... {len(text) - 2 * half} characters left out ...]{text[-half:]}"


def _versions(sample: Sample) -> list[int]:
    spans = sample.version_spans
    return [] if spans is None else sorted({version for version, _ in spans.tolist() if version >= 0})


def _number(value: float) -> float | str:
    """As `metrics.jsonl` writes what JSON lacks."""
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def rewind(folder: Path, *, first_dropped_step: int, warn: Callable[[str], None]) -> None:
    """Keep the lines of steps before `first_dropped_step`. A folder without samples stays as it is."""
    try:
        for name in (OLDER, CURRENT):
            path = folder / name
            if path.is_file():
                _keep(path, first_dropped_step)
    except (OSError, ConfigError) as error:
        warn(f"samples of later steps could not be removed: {error}")


def _keep(path: Path, first_dropped_step: int) -> None:
    with path.open("rb") as source, replacing(path) as temporary, temporary.open("wb") as target:
        for line in _lines(source):
            record = _parsed(line)
            if record is not None and record["step"] < first_dropped_step:
                target.write(line)


def read_samples(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """(records in the order of their steps, lines that hold none). A line without an end is one that is being written."""
    records, damaged = [], 0
    for path in (folder / OLDER, folder / CURRENT):
        try:
            with path.open("rb") as file:
                for line in _lines(file):
                    record = _parsed(line)
                    damaged += record is None
                    if record is not None:
                        records.append(record)
        except FileNotFoundError:
            continue
    return records, damaged


def _lines(file: Any) -> Iterable[bytes]:
    """Whole lines; a longer one than any writer makes is passed over in pieces that hold no record."""
    while line := file.readline(MAX_LINE_BYTES):
        if line.endswith(b"\n") or len(line) == MAX_LINE_BYTES:
            yield line


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    return record
