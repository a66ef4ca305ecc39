"""A bundle on disk that holds all a trainer needs to re-run one optimizer step.

`step_<n>/`: `manifest.json` (schema, recipe, versions, mesh, step, weight version, seeds, checkpoint),
`rank_<r>.safetensors` (inputs per micro-batch, advantages, loss weights, RNG states), `rank_<r>.json` (denominators,
sha256 per parameter before and after, loss, grad norm) and `COMPLETE`, written last, with the sha256 of every file
(`miles.data.bundle_marker`). Of a step that failed, the manifest has the failure instead of results.
Re-running the step is `miles.train.step_replay`.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from miles.config.files import storage_error, sync_folder, write_atomic
from miles.data.batch import Denominators, MicroBatch, RankBatch
from miles.data.batch_layout import BatchLayout
from miles.data.bundle_marker import AGAIN, SCHEMA, ReplayError, read_json, seal, verify
from miles.data.sampling_mask import RolloutSamplingMask

# Suffix of a bundle that a rank closes because the step failed.
CLOSING = ".closing"
_SUPPORT = ("ids", "offsets", "log_probs", "ref_log_probs")


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One training rank's part of a step. Several model-parallel ranks may share one batch."""

    batch: RankBatch
    rng: Mapping[str, np.ndarray] = field(default_factory=dict)
    sha256_before: Mapping[str, str] = field(default_factory=dict)  # parameter name -> hash of its bytes
    sha256_after: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, float] = field(default_factory=dict)  # loss, grad norm, as reported


@dataclass(frozen=True, slots=True)
class StepFailure:
    """What ended a step: the rank that met it, and the error's class and text."""

    rank: int
    kind: str
    text: str

    @classmethod
    def of(cls, rank: int, error: Exception) -> StepFailure:
        return cls(rank, type(error).__name__, str(error))

    def __str__(self) -> str:
        return f"{self.kind} on rank {self.rank}: {self.text}"


@dataclass(frozen=True, slots=True)
class StepBundle:
    """`failure`: the step did not end; its records have no results."""

    manifest: dict[str, Any]
    ranks: dict[int, RankRecord]
    failure: StepFailure | None = None


def write_rank(folder: Path, rank: int, record: RankRecord) -> None:
    """Write one rank's files into `folder` (which exists and is not complete yet). Each rank calls this itself."""
    from safetensors.numpy import save

    arrays: dict[str, np.ndarray] = {f"rng.{name}": np.asarray(state) for name, state in record.rng.items()}
    for number, micro_batch in enumerate(record.batch.micro_batches):
        tensors = _take_apart(micro_batch)[1]
        arrays |= {f"micro_batch_{number}.{name}": value for name, value in tensors.items()}
    write_atomic(folder / f"rank_{rank}.safetensors", save({k: np.ascontiguousarray(v) for k, v in arrays.items()}))
    write_results(folder, rank, record)


def write_results(folder: Path, rank: int, record: RankRecord) -> None:
    """Write the smaller file of `write_rank` again, once the step's results are known."""
    document = {
        "dp_rank": record.batch.dp_rank,
        "dp_size": record.batch.dp_size,
        "denominators": asdict(record.batch.denominators),
        "micro_batches": [_take_apart(micro_batch)[0] for micro_batch in record.batch.micro_batches],
        "sha256_before": dict(record.sha256_before),
        "sha256_after": dict(record.sha256_after),
        # repr keeps every bit of a float; JSON readers give the same value back.
        "results": {name: float(value) for name, value in record.results.items()},
    }
    write_atomic(folder / f"rank_{rank}.json", json.dumps(document, indent=1))


def open_bundle(root: Path, step: int) -> Path:
    """A fresh `step_<n>.tmp` below `root` for `write_rank`; leftovers of an earlier crash are removed."""
    folder = root / f"step_{step}.tmp"
    try:
        for leftover in (folder, folder.with_suffix(CLOSING)):
            shutil.rmtree(leftover, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise storage_error(folder, error) from error
    return folder


def finish_bundle(folder: Path, manifest: Mapping[str, Any]) -> Path:
    """After every rank has written: manifest, COMPLETE, rename to `step_<n>`. One process calls this."""
    write_atomic(folder / "manifest.json", json.dumps({"schema": SCHEMA, **manifest}, indent=1, sort_keys=True))
    seal(folder)
    final = folder.with_suffix("")
    if final.exists():
        shutil.rmtree(final)
    folder.rename(final)
    sync_folder(final.parent)
    return final


def finish_failed_bundle(folder: Path, manifest: Mapping[str, Any], failure: StepFailure, *, wait_s: float) -> None:
    """Like `finish_bundle` for a step that failed. Every rank that met an error may call it, at any time after all
    ranks have written: the first writes its own, the others wait up to `wait_s` until it has."""
    closing = folder.with_suffix(CLOSING)
    try:
        # Of several ranks that fail at once, one succeeds in this.
        folder.rename(closing)
    except FileNotFoundError:
        deadline = time.monotonic() + wait_s
        while closing.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return
    finish_bundle(closing, {**manifest, "failure": asdict(failure)})


def load_bundle(folder: Path) -> StepBundle:
    """Verify and read a bundle. `ReplayError` names the file that is missing, damaged or of another schema."""
    count = verify(folder)
    manifest = read_json(folder / "manifest.json")
    ranks = {rank: _read_rank(folder / f"rank_{rank}.json") for rank in range(count)}
    mesh = manifest.get("mesh")
    world = math.prod(mesh[name] for name in ("tp", "pp", "cp", "dp")) if mesh else count
    if world != count:
        raise ReplayError(f"{folder}: was recorded by {world} ranks, but holds the files of {count}; {AGAIN}")
    failure = manifest.get("failure")
    return StepBundle(manifest, ranks, None if failure is None else StepFailure(**failure))


def array_sha256(array: np.ndarray) -> str:
    """Hash of an array's dtype, shape and bytes: how parameters are compared before and after a step."""
    digest = hashlib.sha256(f"{array.dtype.str}{list(array.shape)}".encode())
    digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _take_apart(micro_batch: MicroBatch) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    plain: dict[str, Any] = {}
    tensors: dict[str, np.ndarray] = {}
    for item in fields(MicroBatch):
        value = getattr(micro_batch, item.name)
        if isinstance(value, np.ndarray):
            tensors[item.name] = value
        elif isinstance(value, RolloutSamplingMask):
            plain["support_vocab_size"] = value.vocab_size
            for name in _SUPPORT:
                if getattr(value, name) is not None:
                    tensors[f"support.{name}"] = getattr(value, name)
        elif isinstance(value, BatchLayout):
            plain[item.name] = asdict(value)
        elif value is not None:
            plain[item.name] = list(value) if isinstance(value, tuple) else value
    return plain, tensors


def _put_together(plain: dict[str, Any], tensors: dict[str, np.ndarray]) -> MicroBatch:
    support = None
    if "support_vocab_size" in plain:
        support = RolloutSamplingMask(
            tensors["support.ids"],
            tensors["support.offsets"],
            plain["support_vocab_size"],
            tensors.get("support.log_probs"),
            tensors.get("support.ref_log_probs"),
        )
    values: dict[str, Any] = {name: value for name, value in tensors.items() if not name.startswith("support.")}
    for name, value in plain.items():
        if name == "layout":
            values[name] = BatchLayout(**value)
        elif name != "support_vocab_size":
            values[name] = tuple(value) if isinstance(value, list) else value
    return MicroBatch(**{"pad_from": None, **values}, support=support)


def _read_rank(path: Path) -> RankRecord:
    from safetensors.numpy import load

    document = read_json(path)
    arrays = load(path.with_suffix(".safetensors").read_bytes())
    micro_batches = []
    for number, plain in enumerate(document["micro_batches"]):
        prefix = f"micro_batch_{number}."
        tensors = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
        micro_batches.append(_put_together(plain, tensors))
    batch = RankBatch(
        document["dp_rank"], document["dp_size"], tuple(micro_batches), Denominators(**document["denominators"])
    )
    rng = {name.removeprefix("rng."): value for name, value in arrays.items() if name.startswith("rng.")}
    return RankRecord(batch, rng, document["sha256_before"], document["sha256_after"], document["results"])
