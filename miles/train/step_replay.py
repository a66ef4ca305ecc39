"""Record one optimizer step so that it can be run again, and run it again: bit for bit, or close.

`record_step` stands in for `backend.step`: it writes a checkpoint of the state before the step beside the bundle, then
the step's inputs, takes the step, and closes the bundle with what came out, be it an error. `replay_step` loads that
checkpoint into a fresh backend, repeats the step and compares. The format on disk is `miles.data.step_bundle`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from miles.config import MilesError
from miles.data.batch import RankBatch
from miles.data.bundle_marker import ReplayError
from miles.data.step_bundle import (
    RankRecord,
    StepBundle,
    StepFailure,
    array_sha256,
    finish_bundle,
    finish_failed_bundle,
    load_bundle,
    open_bundle,
    write_rank,
    write_results,
)
from miles.train.checkpoint import verify
from miles.train.errors import CheckpointError

if TYPE_CHECKING:
    from miles.train.megatron.backend import MegatronBackend

COMPARED = ("train/loss", "train/grad_norm", "train/value_loss")
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
# How long a rank whose step failed waits for another one to close the bundle, before its own error ends the run.
CLOSE_WAIT_S = 60.0


@dataclass(frozen=True)
class ReplayReport:
    """`differences` is empty when the step was reproduced; each entry names what differs and both values."""

    step: int
    mode: str
    results: Mapping[str, float]
    recorded: Mapping[str, float]
    differences: tuple[str, ...]
    failure: StepFailure | None = None  # what ended the step here, as it did when it was recorded


def record_step(
    backend: MegatronBackend, batch: RankBatch, root: Path, *, step: int, manifest: Mapping[str, Any]
) -> dict[str, float]:
    """`backend.step(batch)`, recorded as `root/step_<n>` with its checkpoint in `root/step_<n>.checkpoint`.

    Collective. `manifest`: what the caller knows (recipe, seeds, weight version, model folder); JSON.
    A step that fails is recorded with its failure, which is then raised.
    """
    layout = backend.parallel_layout
    root = Path(root)
    folder = root / f"step_{step}.tmp"
    if layout.rank == 0:
        open_bundle(root, step)
    backend.save(root / f"step_{step}.checkpoint", extra={"step": step})
    record = RankRecord(batch, _random_state(), parameter_hashes(backend))
    write_rank(folder, layout.rank, record)
    # A rank that fails does so alone: everything that the bundle needs of the others is there before.
    backend.barrier()
    facts = {"step": step, "checkpoint": f"step_{step}.checkpoint", **backend.identity(), **manifest}
    try:
        metrics = backend.step(batch)
    except Exception as error:
        # The step's own error is the one to report, also where the disk is full.
        with contextlib.suppress(MilesError, OSError):
            finish_failed_bundle(folder, facts, StepFailure.of(layout.rank, error), wait_s=CLOSE_WAIT_S)
        raise
    write_results(folder, layout.rank, replace(record, sha256_after=parameter_hashes(backend), results=metrics))
    backend.barrier()
    if layout.rank == 0:
        finish_bundle(folder, facts)
    backend.barrier()
    return metrics


def replay_step(folder: Path, backend: MegatronBackend, *, mode: Literal["bit", "close"] = "bit") -> ReplayReport:
    """Run the recorded step on a fresh, initialised backend. Collective; every rank gets its own comparison.

    bit: same mesh, device and versions, else a `ReplayError` that names what differs; parameters must come out with
    the recorded hashes. close: loss and gradient norm to 1e-5 (fp32) or 1e-2 (bf16); any mesh whose data-parallel
    size is the recorded one or 1.
    """
    folder = Path(folder)
    bundle = load_bundle(folder)
    if mode == "bit":
        _require_identity(bundle, backend, folder)
    batch = _batch_for(bundle, backend)
    _load_state(folder.parent / manifest_value(bundle, folder, "checkpoint"), backend)
    record = bundle.ranks[backend.parallel_layout.rank if mode == "bit" else 0]
    differences = []
    if mode == "bit":
        differences += _differing(parameter_hashes(backend), record.sha256_before, "before the step")
        differences += [
            f"random state of {name} before the step"
            for name, state in _random_state().items()
            if name in record.rng and not np.array_equal(state, record.rng[name])
        ]
    rank, failure, results = backend.parallel_layout.rank, None, {}
    try:
        results = backend.step(batch)
    except Exception as error:
        if bundle.failure is None:
            raise
        failure = StepFailure.of(rank, error)
    if bundle.failure is not None:
        differences += _failure_differences(failure, bundle.failure, rank, mode)
    else:
        if mode == "bit":
            differences += _differing(parameter_hashes(backend), record.sha256_after, "after the step")
        differences += _result_differences(results, record.results, mode, backend.config.precision)
    return ReplayReport(bundle.manifest["step"], mode, results, record.results, tuple(differences), failure)


def _random_state() -> dict[str, np.ndarray]:
    """Generator states by library; they are restored from the checkpoint and compared here."""
    from miles.train.megatron import rng

    return {name.removeprefix("rng/"): state.numpy() for name, state in rng.capture()[0].items()}


def parameter_hashes(backend: MegatronBackend) -> dict[str, str]:
    """sha256 of each fp32 master weight of this rank, by model and megatron-core name."""
    return {
        f"{label}/{name}": array_sha256(tensor.cpu().numpy())
        for label, trained in backend.models.items()
        for name, tensor in trained.optimizer.master_tensors().items()
    }


def manifest_value(bundle: StepBundle, folder: Path, key: str) -> Any:
    """A key that `record_step` or its caller wrote; `ReplayError` when this bundle was made without it."""
    if key not in bundle.manifest:
        raise ReplayError(
            f"{folder}/manifest.json: has no {key!r}, so it was not recorded by a training run; record the step with "
            "run.replay_steps"
        )
    return bundle.manifest[key]


def _load_state(checkpoint: Path, backend: MegatronBackend) -> None:
    copy = f"copy {checkpoint.name} beside the bundle again from its source"
    try:
        found = backend.load_checkpoint(checkpoint)
    except CheckpointError as error:
        raise ReplayError(
            f"the state before the step cannot be read: {_damage(checkpoint) or error}; to replay, {copy}"
        ) from error
    if found is None:
        raise ReplayError(f"{checkpoint}: the state before the step is missing; {copy}")


def _damage(checkpoint: Path) -> str | None:
    """Which file is damaged, without what a run would do about it."""
    try:
        for path in sorted(checkpoint.glob("iter_*")):
            verify(path)
    except CheckpointError as error:
        return str(error)
    return None


def _require_identity(bundle: StepBundle, backend: MegatronBackend, folder: Path) -> None:
    here = backend.identity()
    mine, theirs = _flat(here), _flat({key: bundle.manifest.get(key) for key in here})
    wrong = [
        f"{key} is {mine.get(key)!r} here but {theirs.get(key)!r} in the bundle"
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key)
    ]
    if wrong:
        raise ReplayError(f"{folder}: cannot be replayed bit for bit: {'; '.join(wrong)}; use --mode close")


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        name: leaf
        for key, child in value.items()
        for name, leaf in _flat(child, f"{prefix}.{key}" if prefix else key).items()
    }


def _batch_for(bundle: StepBundle, backend: MegatronBackend) -> RankBatch:
    """This rank's batch; a single data-parallel rank takes the micro-batches of all recorded ones."""
    by_index = {record.batch.dp_rank: record.batch for record in bundle.ranks.values()}
    layout = backend.parallel_layout
    recorded = next(iter(by_index.values())).dp_size
    if layout.dp_size == recorded:
        return by_index[layout.dp_rank]
    if layout.dp_size != 1:
        raise ReplayError(
            f"the step was recorded with dp={recorded} and cannot be dealt out to dp={layout.dp_size}; "
            f"use dp={recorded}{' or dp=1' if recorded > 1 else ''}"
        )
    micro_batches = tuple(item for index in sorted(by_index) for item in by_index[index].micro_batches)
    return RankBatch(0, 1, micro_batches, by_index[min(by_index)].denominators)


def _differing(got: Mapping[str, str], recorded: Mapping[str, str], when: str) -> list[str]:
    return [
        f"parameter {name} {when}: sha256 {got.get(name, 'absent')[:12]}, recorded {recorded.get(name, 'absent')[:12]}"
        for name in sorted(got.keys() | recorded.keys())
        if got.get(name) != recorded.get(name)
    ]


def _failure_differences(failure: StepFailure | None, recorded: StepFailure, rank: int, mode: str) -> list[str]:
    # Ranks fail together (a global gradient) or alone (a sample of theirs): only the recorded one has the same text.
    by_text = mode == "bit" and rank == recorded.rank
    if failure is None or failure.kind != recorded.kind or (by_text and failure.text != recorded.text):
        return [f"failure: {failure or 'none'}, recorded {recorded}"]
    return []


def _result_differences(
    results: Mapping[str, float], recorded: Mapping[str, float], mode: str, precision: str
) -> list[str]:
    tolerance = 0.0 if mode == "bit" else TOLERANCE[precision]
    return [
        f"{name}: {results.get(name)!r}, recorded {recorded.get(name)!r}"
        for name in COMPARED
        if not _agree(results.get(name), recorded.get(name), tolerance)
    ]


def _agree(value: float | None, recorded: float | None, tolerance: float) -> bool:
    if value is None or recorded is None:
        return value is recorded
    # A step that was skipped for a gradient that is not a number repeats when it is none again.
    if math.isnan(value) or math.isnan(recorded):
        return math.isnan(value) and math.isnan(recorded)
    return math.isclose(value, recorded, rel_tol=tolerance, abs_tol=tolerance)
