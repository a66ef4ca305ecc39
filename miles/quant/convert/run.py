"""The driver of every conversion: plan, write shard by shard, journal, contract, index, report, COMPLETE.

A conversion gives one `Item` per tensor it writes or keeps; an item knows its outputs' shapes from headers alone. The
output has the source's shards; a scale is written beside its weight, wherever it came from. A run that was killed at
any point continues with `resume` and gives the same bytes: each finished shard is in the journal, a shard that is
not is written again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from miles.config.files import replacing, sync_folder, write_atomic
from miles.quant import contract as contracts
from miles.quant.contract import DIGEST_KEY, QuantContract
from miles.quant.convert.journal import (
    COMPLETE,
    JOURNAL,
    Journal,
    check_target,
    locked,
    open_journal,
    saying_how_to_resume,
)
from miles.quant.convert.shards import ShardWriter, Source, TensorSpec, as_bytes
from miles.quant.convert.trained import require_trained_rounding
from miles.quant.errors import ConversionError
from miles.quant.headers import INDEX

REPORT = "report.json"
OWN_FILES = (INDEX, "config.json", JOURNAL, REPORT, COMPLETE, contracts.FILE)


@dataclass
class TensorReport:
    """What was done to one quantised tensor. sha256 over the input's and the output's bytes (weight, then scale).

    `lossy_tiles`, `lossy_elements`: None where a conversion rounds by its nature and does not count.
    """

    name: str
    action: str
    tiles: int = 0
    max_k: int | None = None
    lossy_tiles: int | None = None
    lossy_elements: int | None = None
    max_abs_error: float = 0.0
    sha256_in: str = ""
    sha256_out: str = ""


@dataclass
class Done:
    """What an item gives: its output tensors in order, its report, and the inputs that the report's digest covers."""

    tensors: list[torch.Tensor]
    report: TensorReport
    inputs: list[torch.Tensor]


@dataclass(frozen=True)
class Item:
    """One unit of work: `outputs` are known from headers; `run` reads and computes them (None: copy the one input)."""

    shard: str
    outputs: tuple[TensorSpec, ...]
    run: Callable[[], Done] | None = None


@dataclass
class Plan:
    """Everything that is fixed before the first byte is written."""

    kind: str
    options: dict[str, Any]
    items: list[Item]
    contract: QuantContract
    config: dict


def digest_of(tensors: Sequence[torch.Tensor]) -> str:
    h = hashlib.sha256()
    for t in tensors:
        h.update(as_bytes(t))
    return h.hexdigest()


def _write_shard(source: Source, target: Path, shard: str, items: Sequence[Item], metadata: dict[str, str]) -> dict:
    specs = [spec for item in items for spec in item.outputs]
    whole = hashlib.sha256()
    writer = ShardWriter(target / shard, specs, metadata, written=whole.update)
    reports: list[TensorReport] = []
    hashing = ThreadPoolExecutor(2)
    try:
        for item in items:
            if item.run is None:
                writer.write(item.outputs[0].name, source.load(item.outputs[0].name))
                continue
            try:
                done = item.run()
            except ValueError as error:  # a codec's: NaN, infinity, a maximum that the decode cannot hold
                raise ConversionError(
                    f"{source.directory / shard}: {error}; repair or leave out that weight"
                ) from error
            digests = [hashing.submit(digest_of, part) for part in (done.inputs, done.tensors)]
            for spec, tensor in zip(item.outputs, done.tensors, strict=True):
                writer.write(spec.name, tensor)
            done.report.sha256_in, done.report.sha256_out = (d.result() for d in digests)
            reports.append(done.report)
            del done
        writer.commit()
    except BaseException:
        writer.abort()
        raise
    finally:
        hashing.shutdown()
    return {
        "shard": shard,
        "bytes": (target / shard).stat().st_size,
        "sha256": whole.hexdigest(),
        "tensors": [asdict(r) for r in reports],
    }


def execute(source_dir: Path, target: Path, make_plan: Callable[[Source], Plan], *, resume: bool = False) -> dict:
    """Plan, then write the converted checkpoint to `target`; returns the report. COMPLETE is written last.

    Everything that can be refused from headers, scales and options is refused before anything is written. With `resume`
    finished shards are read and compared with the journal; nothing is written where all is done (`already_complete`).
    """
    source_dir, target = Path(source_dir), Path(target)
    check_target(source_dir, target, resume=resume)
    started = time.monotonic()
    source = Source(source_dir)
    plan = make_plan(source)
    require_trained_rounding(source, plan.kind, plan.contract)
    _refuse_collisions(source, plan)
    not_copied = source.folders(without=target)
    with locked(target):
        # Another conversion may have begun or ended while this one planned.
        check_target(source_dir, target, resume=resume)
        return _write(source, target, plan, started, not_copied)


def _write(source: Source, target: Path, plan: Plan, started: float, not_copied: Sequence[str]) -> dict:
    head = {"kind": plan.kind, "input": source.digest, "options": plan.options, "contract": plan.contract.digest()}
    journal = open_journal(source, target, head)
    by_shard: dict[str, list[Item]] = {}
    for item in plan.items:
        by_shard.setdefault(item.shard, []).append(item)
    metadata = {"format": "pt", DIGEST_KEY: plan.contract.digest()}
    with saying_how_to_resume(target):
        missing = [shard for shard in sorted(by_shard) if not journal.has(target / shard)]
        if not missing and (target / COMPLETE).exists():
            return {**_report(source, plan, journal, time.monotonic() - started), "already_complete": True}
        for shard in missing:
            journal.append(_write_shard(source, target, shard, by_shard[shard], metadata))
        _write_side_files(source, target, plan, by_shard)
        report = _report(source, plan, journal, time.monotonic() - started)
        if not_copied:
            report["folders_not_copied"] = list(not_copied)
        if unlisted := source.unlisted():
            report["files_not_in_the_index"] = unlisted
        write_atomic(target / REPORT, json.dumps(report, indent=1) + "\n")
        contracts.write(target, plan.contract)
        write_atomic(target / COMPLETE, plan.contract.digest() + "\n")
    return report


def _refuse_collisions(source: Source, plan: Plan) -> None:
    """A scale that the conversion would write may exist already, left by an earlier one."""
    seen: set[str] = set()
    for item in plan.items:
        for spec in item.outputs:
            if spec.name in seen:
                raise ConversionError(
                    f"{source.directory}: {spec.name} is in the checkpoint and would also be written; remove the stray scale"
                )
            seen.add(spec.name)


def _write_side_files(source: Source, target: Path, plan: Plan, by_shard: dict[str, list[Item]]) -> None:
    specs = {spec.name: (shard, spec) for shard, items in by_shard.items() for item in items for spec in item.outputs}
    index = {
        "metadata": {"total_size": sum(spec.nbytes for _, spec in specs.values())},
        "weight_map": {name: shard for name, (shard, _) in sorted(specs.items())},
    }
    if len(by_shard) > 1 or (source.directory / INDEX).exists():
        write_atomic(target / INDEX, json.dumps(index, indent=1) + "\n")
    for path in sorted(source.directory.iterdir()):
        if path.is_file() and path.suffix != ".safetensors" and path.name not in OWN_FILES:
            with replacing(target / path.name) as temporary:
                shutil.copyfile(path, temporary)
    config = dict(plan.config)
    config["quantization_config"] = {**config.get("quantization_config", {}), DIGEST_KEY: plan.contract.digest()}
    write_atomic(target / "config.json", json.dumps(config, indent=1) + "\n")
    sync_folder(target)


def _total(tensors: Sequence[dict], field: str) -> int | None:
    counts = [t[field] for t in tensors]
    return None if None in counts else sum(counts)


def _report(source: Source, plan: Plan, journal: Journal, seconds: float) -> dict:
    tensors = [t for _, e in sorted(journal.shards().items()) for t in e["tensors"]]
    written = sum(e["bytes"] for e in journal.shards().values())
    return {
        "kind": plan.kind,
        "options": plan.options,
        "input_digest": source.digest,
        "contract_digest": plan.contract.digest(),
        "lossless": plan.contract.lossless,
        "totals": {
            "tensors": len(tensors),
            "tiles": sum(t["tiles"] for t in tensors),
            "lossy_tiles": _total(tensors, "lossy_tiles"),
            "lossy_elements": _total(tensors, "lossy_elements"),
            "max_abs_error": max((t["max_abs_error"] for t in tensors), default=0.0),
            "bytes_in": source.nbytes,
            "bytes_out": written,
            "seconds_of_last_run": round(seconds, 3),
            "gigabytes_per_second": round((source.nbytes + written) / max(seconds, 1e-9) / 1e9, 3),
        },
        "tensors": tensors,
    }
