"""Timing on one GPU, shared by the kernel benchmarks: device events, graph replays, peak memory, and the record they write.

Medians throughout. A benchmark names its own work, its alternatives and its limit; nothing here knows a kernel.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

GIB = 1 << 30


def measure(call: Callable[[], object], *, repeats: int = 9, queued: int = 4) -> tuple[float, float]:
    """(median milliseconds, spread between first and third quartile) of one call, device events.

    `queued` calls are issued back to back, as in training, where the host runs ahead of a busy device.
    """
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(queued):
            call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / queued)
    quartiles = statistics.quantiles(times, n=4)
    return statistics.median(times), quartiles[2] - quartiles[0]


def time_us(call: Callable[[], object], repeats: int = 30) -> float:
    """Median microseconds of one call that starts on an idle device: host time counts where it is longer."""
    return measure(call, repeats=repeats, queued=1)[0] * 1e3


def graph_us(call: Callable[[], object], repeats: int = 30) -> float:
    """Median microseconds of a replay of the captured call: device time without the host's."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return time_us(graph.replay, repeats)


def extra_memory(call: Callable[[], object]) -> int:
    """Peak bytes above what was allocated before the call, its result kept."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def copy_and_fill_ms(nbytes: int) -> tuple[float, float]:
    """Milliseconds to copy (read and write) and to fill (write) a buffer of random bytes of this size."""
    source = torch.empty(nbytes // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return measure(lambda: target.copy_(source))[0], measure(lambda: target.zero_())[0]


def header() -> dict:
    """When, on what and by which command a result was measured."""
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm", "--format=csv,noheader"]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "driver": subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip(),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_shown, sys.argv[1:])]),
    }


def _shown(word: str) -> str:
    return f"benchmarks/results/{Path(word).name}" if word.endswith(".json") else word


def write(record: dict, out: Path | None) -> None:
    """Print the record, and write it to `out` if given."""
    text = json.dumps(record, indent=1)
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")
