"""The driver of every conversion: plan, write shard by shard, journal, contract, index, report, COMPLETE.

A conversion gives one `Item` per tensor it writes or keeps; an item knows its outputs' shapes from headers alone. The
output has the source's shards; a scale is written beside its weight, wherever it came from. A run that was killed at
any point continues with `resume` and gives the same bytes: each finished shard is in the journal, a shard that is
not is written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from miles.config.files import replacing, storage_error, sync_folder, write_atomic
from miles.quant import contract as contracts
from miles.quant.contract import DIGEST_KEY, QuantContract
from miles.quant.convert.shards import ShardWriter, Source, TensorSpec, as_bytes
from miles.quant.errors import ConversionError
from miles.quant.headers import INDEX

JOURNAL, REPORT, COMPLETE = "journal.jsonl", "report.json", "COMPLETE"
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


class Journal:
    """Append-only JSON lines, each flushed to disk: a head that pins input and options, then one line per shard."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[dict] = []
        if path.exists():
            for line in path.read_bytes().split(b"\n"):
                try:
                    self.entries.append(json.loads(line))
                except ValueError:
                    break  # the line a crash cut off, and nothing after it
            self._rewrite()

    def _rewrite(self) -> None:
        write_atomic(self.path, "".join(json.dumps(e) + "\n" for e in self.entries))

    def append(self, entry: dict) -> None:
        with open(self.path, "a") as f:
            f.write(json.dumps(entry) + "\n")
            f.flush()
            os.fsync(f.fileno())
        self.entries.append(entry)

    def shards(self) -> dict[str, dict]:
        return {e["shard"]: e for e in self.entries if "shard" in e}


def check_target(source: Path, target: Path, *, resume: bool) -> None:
    """Refuses a target that holds something else; asked before a source is read, which may take minutes."""
    try:
        if (target / COMPLETE).exists():
            raise ConversionError(f"{target} is COMPLETE already; choose another directory")
        if target.exists() and not target.is_dir():
            raise ConversionError(f"{target} is a file; choose a directory to write")
        if target.exists() and target.resolve() == source.resolve():
            raise ConversionError(f"{target} is the source itself; choose another directory")
        if not resume and target.exists() and any(target.iterdir()):
            raise ConversionError(f"{target} is not empty; use --resume to continue, or another directory")
        if resume and target.exists() and any(target.iterdir()) and not (target / JOURNAL).exists():
            raise ConversionError(
                f"{target} has no {JOURNAL}: it is no interrupted conversion; choose another directory"
            )
    except OSError as error:
        raise storage_error(target, error) from error


def _open_journal(source: Source, target: Path, plan: Plan) -> Journal:
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(target, error) from error
    head = {"kind": plan.kind, "input": source.digest, "options": plan.options, "contract": plan.contract.digest()}
    with _saying_how_to_resume(target):
        journal = Journal(target / JOURNAL)
        if not journal.entries:
            journal.append(head)
    if journal.entries[0] != head:
        differing = sorted(k for k in head if journal.entries[0].get(k) != head[k])
        raise ConversionError(
            f"{target}: cannot resume, {', '.join(differing)} differ from the run that was interrupted; give the same "
            "source and options, or another directory"
        )
    for left in {*target.glob("*.tmp"), *target.glob(".*.tmp.*")}:
        left.unlink()
    return journal


@contextlib.contextmanager
def _saying_how_to_resume(target: Path) -> Iterator[None]:
    """A full disk or a lost folder becomes an error with place and fix; what is finished stays."""
    try:
        yield
    except OSError as error:
        place = storage_error(Path(error.filename or target), error)
        raise ConversionError(f"{place}; finished shards are kept: run again with --resume") from error


def _write_shard(source: Source, target: Path, shard: str, items: Sequence[Item], metadata: dict[str, str]) -> dict:
    specs = [spec for item in items for spec in item.outputs]
    writer = ShardWriter(target / shard, specs, metadata)
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
        "tensors": [asdict(r) for r in reports],
    }


def execute(source_dir: Path, target: Path, make_plan: Callable[[Source], Plan], *, resume: bool = False) -> dict:
    """Plan, then write the converted checkpoint to `target`; returns the report. COMPLETE is written last.

    Everything that can be refused from headers, scales and options is refused before anything is written.
    """
    source_dir, target = Path(source_dir), Path(target)
    check_target(source_dir, target, resume=resume)
    started = time.monotonic()
    source = Source(source_dir)
    plan = make_plan(source)
    _refuse_collisions(source, plan)
    journal = _open_journal(source, target, plan)
    by_shard: dict[str, list[Item]] = {}
    for item in plan.items:
        by_shard.setdefault(item.shard, []).append(item)
    metadata = {"format": "pt", DIGEST_KEY: plan.contract.digest()}
    done = journal.shards()
    with _saying_how_to_resume(target):
        for shard in sorted(by_shard):
            entry = done.get(shard)
            path = target / shard
            if entry is None or not path.exists() or path.stat().st_size != entry["bytes"]:
                journal.append(_write_shard(source, target, shard, by_shard[shard], metadata))
        _write_side_files(source, target, plan, by_shard)
        report = _report(source, plan, journal, time.monotonic() - started)
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
