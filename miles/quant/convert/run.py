"""The driver of every conversion: plan, write shard by shard, journal, contract, index, report, COMPLETE.

A conversion gives one `Item` per tensor it writes or keeps; an item knows its outputs' shapes from headers alone. The
output has the source's shards; a scale is written beside its weight, wherever it came from. A run that was killed at
any point continues with `resume` and gives the same bytes: each finished shard is in the journal, a shard that is
not is written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from miles.quant import contract as contracts
from miles.quant.contract import DIGEST_KEY, QuantContract
from miles.quant.convert.shards import INDEX, ShardWriter, Source, TensorSpec, as_bytes, sync_directory, write_text
from miles.quant.errors import ConversionError

JOURNAL, REPORT, COMPLETE = "journal.jsonl", "report.json", "COMPLETE"


@dataclass
class TensorReport:
    """What was done to one quantised tensor. sha256 over the input's and the output's bytes (weight, then scale)."""

    name: str
    action: str
    tiles: int = 0
    max_k: int | None = None
    lossy_tiles: int = 0
    lossy_elements: int = 0
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
    extra_files: dict[str, str] = field(default_factory=dict)


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
        write_text(self.path, "".join(json.dumps(e) + "\n" for e in self.entries))

    def append(self, entry: dict) -> None:
        with open(self.path, "a") as f:
            f.write(json.dumps(entry) + "\n")
            f.flush()
            os.fsync(f.fileno())
        self.entries.append(entry)

    def shards(self) -> dict[str, dict]:
        return {e["shard"]: e for e in self.entries if "shard" in e}


def _open_journal(source: Source, target: Path, plan: Plan, resume: bool) -> Journal:
    if (target / COMPLETE).exists():
        raise ConversionError(f"{target} is COMPLETE already; choose another directory")
    head = {"kind": plan.kind, "input": source.digest, "options": plan.options, "contract": plan.contract.digest()}
    if not resume:
        if target.exists() and any(target.iterdir()):
            raise ConversionError(f"{target} is not empty; use --resume to continue, or another directory")
        target.mkdir(parents=True, exist_ok=True)
    journal = Journal(target / JOURNAL)
    if not journal.entries:
        journal.append(head)
    elif journal.entries[0] != head:
        differing = sorted(k for k in head if journal.entries[0].get(k) != head[k])
        raise ConversionError(
            f"{target}: cannot resume, {', '.join(differing)} differ from the run that was interrupted"
        )
    return journal


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
            done = item.run()
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


def execute(source: Source, target: Path, plan: Plan, *, resume: bool = False) -> dict:
    """Write the converted checkpoint to `target`; returns the report. COMPLETE is written last."""
    target = Path(target)
    started = time.monotonic()
    journal = _open_journal(source, target, plan, resume)
    by_shard: dict[str, list[Item]] = {}
    for item in plan.items:
        by_shard.setdefault(item.shard, []).append(item)
    metadata = {"format": "pt", DIGEST_KEY: plan.contract.digest()}
    done = journal.shards()
    for shard in sorted(by_shard):
        entry = done.get(shard)
        path = target / shard
        if entry is None or not path.exists() or path.stat().st_size != entry["bytes"]:
            journal.append(_write_shard(source, target, shard, by_shard[shard], metadata))
    _write_side_files(source, target, plan, by_shard)
    report = _report(source, plan, journal, time.monotonic() - started)
    write_text(target / REPORT, json.dumps(report, indent=1) + "\n")
    contracts.write(target, plan.contract)
    write_text(target / COMPLETE, plan.contract.digest() + "\n")
    return report


def _write_side_files(source: Source, target: Path, plan: Plan, by_shard: dict[str, list[Item]]) -> None:
    specs = {spec.name: (shard, spec) for shard, items in by_shard.items() for item in items for spec in item.outputs}
    index = {
        "metadata": {"total_size": sum(spec.nbytes for _, spec in specs.values())},
        "weight_map": {name: shard for name, (shard, _) in sorted(specs.items())},
    }
    if len(by_shard) > 1 or (source.directory / INDEX).exists():
        write_text(target / INDEX, json.dumps(index, indent=1) + "\n")
    for path in sorted(source.directory.iterdir()):
        skip = path.suffix == ".safetensors" or path.name in (
            INDEX,
            "config.json",
            JOURNAL,
            REPORT,
            COMPLETE,
            contracts.FILE,
        )
        if path.is_file() and not skip:
            temporary = target / f"{path.name}.tmp"
            shutil.copyfile(path, temporary)
            os.replace(temporary, target / path.name)
    for name, text in plan.extra_files.items():
        write_text(target / name, text)
    config = dict(plan.config)
    config["quantization_config"] = {**config.get("quantization_config", {}), DIGEST_KEY: plan.contract.digest()}
    write_text(target / "config.json", json.dumps(config, indent=1) + "\n")
    sync_directory(target)


def _report(source: Source, plan: Plan, journal: Journal, seconds: float) -> dict:
    tensors = [t for _, e in sorted(journal.shards().items()) for t in e["tensors"]]
    written = sum(e["bytes"] for e in journal.shards().values())
    return {
        "kind": plan.kind,
        "options": plan.options,
        "input_digest": source.digest,
        "contract_digest": plan.contract.digest(),
        "totals": {
            "tensors": len(tensors),
            "tiles": sum(t["tiles"] for t in tensors),
            "lossy_tiles": sum(t["lossy_tiles"] for t in tensors),
            "lossy_elements": sum(t["lossy_elements"] for t in tensors),
            "max_abs_error": max((t["max_abs_error"] for t in tensors), default=0.0),
            "bytes_in": source.nbytes,
            "bytes_out": written,
            "seconds_of_last_run": round(seconds, 3),
            "gigabytes_per_second": round((source.nbytes + written) / max(seconds, 1e-9) / 1e9, 3),
        },
        "tensors": tensors,
    }
