"""`miles convert mxfp4-to-fp8` against `cp` of the same bytes, on the same disk, in turns.

    python benchmarks/convert.py --shards 4 --megabytes 128 --out benchmarks/results/convert.json

Bytes are those read plus those written: the converter writes twice what it reads, so GB/s are compared, not seconds.
Both end with fsync. Peak memory is the growth over what is resident after a first small conversion, against a shard.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import cpu_record
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from miles.quant.convert.mxfp4_to_fp8 import convert


def generate(directory: Path, shards: int, megabytes: int) -> None:
    """MXFP4 experts of [1024, 4096], scales in the next shard."""
    directory.mkdir()
    g = torch.Generator().manual_seed(0)
    files: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    rows, cols = 1024, 4096
    for i, tensors in enumerate(files):
        for e in range(max(1, megabytes * 2**20 // (rows * cols // 2))):
            stem = f"model.layers.{i}.mlp.experts.{e}.down_proj."
            tensors[stem + "weight"] = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8, generator=g)
            scale = torch.randint(116, 124, (rows, cols // 32), dtype=torch.uint8, generator=g)
            files[(i + 1) % shards][stem + "scale"] = scale.view(torch.float8_e8m0fnu)
    for i, tensors in enumerate(files):
        save_file(tensors, directory / f"model-{i}.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"expert_dtype": "fp4"}))


def copy_seconds(source: Path, target: Path) -> float:
    start = time.perf_counter()
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        descriptor = os.open(target / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - start


def in_child(work) -> None:
    """Run in a fork, so that memory the work leaves behind does not hide what comes after it."""
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("generating the checkpoint failed")


def status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=128, help="size of a source shard")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where to write; a temporary directory by default")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = cpu_record.head()
    with tempfile.TemporaryDirectory(dir=args.directory) as temporary:
        base = Path(temporary)
        source, small = base / "source", base / "small"
        in_child(lambda: generate(source, args.shards, args.megabytes))
        in_child(lambda: generate(small, 1, 1))
        shard = max(p.stat().st_size for p in source.glob("*.safetensors"))
        read = sum(p.stat().st_size for p in source.iterdir())
        copies, conversions, peaks, written = [], [], [], 0
        convert(small, base / "warm")
        for i in range(args.repeats):
            Path("/proc/self/clear_refs").write_text("5")
            before = status_bytes("VmRSS")
            start = time.perf_counter()
            report = convert(source, base / f"out{i}")
            conversions.append(time.perf_counter() - start)
            peaks.append(status_bytes("VmHWM") - before)
            written = report["totals"]["bytes_out"]
            shutil.rmtree(base / f"out{i}")
            copies.append(copy_seconds(source, base / f"copy{i}"))
            shutil.rmtree(base / f"copy{i}")
        peak = max(peaks)
    ours, copy = statistics.median(conversions), statistics.median(copies)
    results = {
        "bytes read": read,
        "bytes written": written,
        "convert GB/s (read + written)": (read + written) / ours / 1e9,
        "cp GB/s (read + written)": 2 * read / copy / 1e9,
        "convert seconds": conversions,
        "cp seconds": copies,
        "share of cp": ((read + written) / ours) / (2 * read / copy),
        "peak memory over start, bytes": peak,
        "peak memory / shard": peak / shard,
    }
    record = {
        **head,
        "threads": 1,
        "results": results,
    }
    print(json.dumps(record, indent=1))
    if args.out:
        cpu_record.write(args.out, record)


if __name__ == "__main__":
    main()
