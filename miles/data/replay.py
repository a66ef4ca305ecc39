"""A bundle on disk that holds all a trainer needs to re-run one optimizer step.

`step_<n>/`: `manifest.json` (schema, recipe, versions, mesh, step, weight version, seeds, checkpoint),
`rank_<r>.safetensors` (inputs per micro-batch, advantages, loss weights, RNG states), `rank_<r>.json` (denominators,
sha256 per parameter before and after, loss, grad norm) and `COMPLETE`, written last, with the sha256 of every file.
Re-running the step is `miles.train.replay`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from miles.config import MilesError
from miles.config.files import storage_error, sync_folder, write_atomic
from miles.data.batch import Denominators, MicroBatch, RankBatch
from miles.data.sampling_mask import RolloutSamplingMask

SCHEMA = 1
COMPLETE = "COMPLETE"
_SUPPORT = ("ids", "offsets", "logprobs", "reference")


class ReplayError(MilesError):
    """The bundle is incomplete, damaged, or does not fit this program."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One training rank's part of a step. Several model-parallel ranks may share one batch."""

    batch: RankBatch
    rng: Mapping[str, np.ndarray] = field(default_factory=dict)
    sha256_before: Mapping[str, str] = field(default_factory=dict)  # parameter name -> hash of its bytes
    sha256_after: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, float] = field(default_factory=dict)  # loss, grad norm, as reported


@dataclass(frozen=True, slots=True)
class Bundle:
    manifest: dict[str, Any]
    ranks: dict[int, RankRecord]


def write_rank(folder: Path, rank: int, record: RankRecord) -> None:
    """Write one rank's files into `folder` (which exists and is not complete yet). Each rank calls this itself."""
    from safetensors.numpy import save

    arrays: dict[str, np.ndarray] = {f"rng.{name}": np.asarray(state) for name, state in record.rng.items()}
    described = []
    for number, micro_batch in enumerate(record.batch.micro_batches):
        plain, tensors = _take_apart(micro_batch)
        described.append(plain)
        arrays |= {f"micro_batch_{number}.{name}": value for name, value in tensors.items()}
    document = {
        "dp_rank": record.batch.dp_rank,
        "dp_size": record.batch.dp_size,
        "denominators": asdict(record.batch.denominators),
        "micro_batches": described,
        "sha256_before": dict(record.sha256_before),
        "sha256_after": dict(record.sha256_after),
        # repr keeps every bit of a float; JSON readers give the same value back.
        "results": {name: float(value) for name, value in record.results.items()},
    }
    write_atomic(folder / f"rank_{rank}.safetensors", save({k: np.ascontiguousarray(v) for k, v in arrays.items()}))
    write_atomic(folder / f"rank_{rank}.json", json.dumps(document, indent=1))


def open_bundle(root: Path, step: int) -> Path:
    """A fresh `step_<n>.tmp` below `root` for `write_rank`; a leftover of an earlier crash is removed."""
    folder = root / f"step_{step}.tmp"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise storage_error(folder, error) from error
    return folder


def finish_bundle(folder: Path, manifest: Mapping[str, Any]) -> Path:
    """After every rank has written: manifest, COMPLETE, rename to `step_<n>`. One process calls this."""
    write_atomic(folder / "manifest.json", json.dumps({"schema": SCHEMA, **manifest}, indent=1, sort_keys=True))
    hashes = {path.name: _file_sha256(path) for path in sorted(folder.iterdir()) if path.name != COMPLETE}
    write_atomic(folder / COMPLETE, json.dumps({"schema": SCHEMA, "sha256": hashes}, indent=1))
    final = folder.with_suffix("")
    if final.exists():
        shutil.rmtree(final)
    folder.rename(final)
    sync_folder(final.parent)
    return final


def write_bundle(root: Path, step: int, manifest: Mapping[str, Any], ranks: Mapping[int, RankRecord]) -> Path:
    """All of a bundle from one process; returns `root/step_<n>`."""
    folder = open_bundle(root, step)
    for rank, record in ranks.items():
        write_rank(folder, rank, record)
    return finish_bundle(folder, {"step": step, **manifest})


def load_bundle(folder: Path) -> Bundle:
    """Verify and read a bundle. `ReplayError` names the file that is missing, damaged or of another schema."""
    marker = folder / COMPLETE
    if not marker.is_file():
        raise ReplayError(_no_bundle(folder))
    listed = _read_json(marker)
    if not isinstance(listed, dict) or not isinstance(listed.get("sha256", {}), dict):
        raise ReplayError(f"{marker}: not a list of this bundle's files; copy the bundle again from its source")
    if listed.get("schema") != SCHEMA:
        raise ReplayError(
            f"{marker}: schema {listed.get('schema')!r}, this program reads {SCHEMA}; use the version that wrote it"
        )
    names = listed.get("sha256", {})
    if "manifest.json" not in names or "rank_0.json" not in names:
        raise ReplayError(f"{marker}: lists no manifest and ranks; copy the bundle again from its source")
    for name, expected in names.items():
        path = folder / name
        if not path.is_file():
            raise ReplayError(f"{path}: missing; the bundle was copied in part, copy all of {folder.name}")
        actual = _file_sha256(path)
        if actual != expected:
            raise ReplayError(
                f"{path}: content changed since it was written (sha256 {actual[:12]}..., expected {expected[:12]}...); "
                "copy the bundle again from its source"
            )
    # Only files that were verified: one that somebody put beside them is not read.
    paths = [folder / name for name in names if name.startswith("rank_") and name.endswith(".json")]
    ranks = {int(path.stem.removeprefix("rank_")): _read_rank(path) for path in paths}
    return Bundle(_read_json(folder / "manifest.json"), dict(sorted(ranks.items())))


def _no_bundle(folder: Path) -> str:
    """Why a folder without COMPLETE cannot be replayed, and what there is instead."""
    if not folder.is_dir():
        what = "not a folder" if folder.exists() else "no such folder"
        return (
            f"{folder}: {what}; give a step_<n> folder, as run.replay_steps writes them below the run's replay folder"
        )
    for parent in (folder, folder / "replay"):
        found = sorted(path.parent.name for path in parent.glob(f"step_*/{COMPLETE}"))
        if found:
            return f"{folder}: not itself a bundle; give one of {', '.join(str(parent / name) for name in found)}"
    return f"{folder}: no {COMPLETE} file, so this bundle was never finished; choose another step_<n> folder"


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
            tensors.get("support.logprobs"),
            tensors.get("support.reference"),
        )
    values: dict[str, Any] = {name: value for name, value in tensors.items() if not name.startswith("support.")}
    for name, value in plain.items():
        if name != "support_vocab_size":
            values[name] = tuple(value) if isinstance(value, list) else value
    return MicroBatch(**{"pad_from": None, **values}, support=support)


def _read_rank(path: Path) -> RankRecord:
    from safetensors.numpy import load

    document = _read_json(path)
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReplayError(f"{path}: cannot be read as JSON ({error}); copy the bundle again from its source") from error


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
