"""Data-parallel schedules of a long-tailed batch: ours against strided and two published rules, in one run.

    python benchmarks/schedule.py [--samples 4096] [--dp 16 64] [--cap 16384] [--out benchmarks/results/schedule.json]

Rules of others are re-stated here from their published sources, as baselines: verl 0.9 (samples to ranks by
Karmarkar-Karp on 24576·L + L^2 with equal counts; inside a rank as many micro-batches as the fullest rank needs,
again by Karmarkar-Karp, one more while a micro-batch is over the cap) and TRL 1.16's GRPO (equal shares in order,
each micro-batch padded to the longest sequence of the batch). max/mean: FLOPs of the busiest rank over the mean
rank's, by the model's own formula; padding: share of computed tokens that are padding.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cpu_record
import numpy as np

from miles.data.packing import AttentionLayer, FlopsShape, karmarkar_karp, sequence_flops
from miles.data.schedule import ScheduleConfig, build_dp_schedule

# An 8-billion-parameter dense model: 36 layers, 32 query heads of 128.
SHAPE = FlopsShape(8_000_000_000, (AttentionLayer(32, 128, 128),) * 36)

# ranks -> micro-batches -> sample indices
Plan = list[list[list[int]]]


def long_tailed(samples: int, cap: int, seed: int) -> list[int]:
    """Log-normal lengths (median about 900 tokens), cut at the cap: most rollouts short, a few at the limit."""
    rng = np.random.default_rng(seed)
    return np.minimum(rng.lognormal(6.8, 1.1, samples).astype(int) + 64, cap).tolist()


def ours(balance: str, dp: int, cap: int) -> Callable[[list[int]], Plan]:
    def plan(lengths: list[int]) -> Plan:
        config = ScheduleConfig(data_parallel=dp, max_tokens_per_gpu=cap, balance=balance, flops=SHAPE)  # type: ignore[arg-type]
        step = build_dp_schedule(lengths, range(len(lengths)), config).steps[0]
        return [[list(b) for b in rank] for rank in step.ranks]

    return plan


def differencing(weights: Sequence[float], parts: int) -> list[list[int]]:
    """k-way largest differencing without a bound on counts (Karmarkar and Karp 1982)."""
    heap = []
    for index, weight in enumerate(weights):
        sums = [(float(weight), [index])] + [(0.0, []) for _ in range(parts - 1)]
        heap.append((-float(weight), index, sums))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, tie, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], tie, joined))
    return [members for _, members in heap[0][2]]


def verl_rule(dp: int, cap: int) -> Callable[[list[int]], Plan]:
    def plan(lengths: list[int]) -> Plan:
        work = [24576 * length + length * length for length in lengths]
        shares = karmarkar_karp(work, dp)
        count = max(-(-sum(lengths[i] for i in share) // cap) for share in shares)
        while True:
            ranks = []
            for share in shares:
                parts = differencing([work[i] for i in share], count)
                ranks.append([[share[i] for i in part] for part in parts])
            if all(sum(lengths[i] for i in b) <= cap for rank in ranks for b in rank):
                return ranks
            count += 1

    return plan


def trl_rule(dp: int, cap: int) -> Callable[[list[int]], Plan]:
    def plan(lengths: list[int]) -> Plan:
        share = len(lengths) // dp
        rows = max(1, cap // max(lengths))
        return [
            [list(range(at, min(at + rows, (r + 1) * share))) for at in range(r * share, (r + 1) * share, rows)]
            for r in range(dp)
        ]

    return plan


def judge(plan: Plan, lengths: list[int], *, padded: bool) -> dict[str, float]:
    longest = max(lengths)
    computed = [[[longest if padded else lengths[i] for i in b] for b in rank] for rank in plan]
    flops = [float(sequence_flops([x for b in rank for x in b], SHAPE).sum()) for rank in computed]
    useful = float(sequence_flops([lengths[i] for rank in plan for b in rank for i in b], SHAPE).sum())
    held = sum(sum(b) for rank in computed for b in rank)
    return {
        "max_over_mean": max(flops) / (sum(flops) / len(flops)),
        # What the step takes against a perfect split of the useful work.
        "step_over_ideal": max(flops) / (useful / len(plan)),
        "padding": 1.0 - sum(lengths[i] for rank in plan for b in rank for i in b) / held,
        "micro_batches": max(len(rank) for rank in plan),
        "largest": max(sum(b) for rank in computed for b in rank),
    }


def compare(lengths: list[int], dp: int, cap: int, repeats: int) -> list[dict[str, Any]]:
    """Every rule on the same lengths: milliseconds (median of `repeats`) and what `judge` says."""
    cases: list[tuple[str, Callable[[list[int]], Plan], bool]] = [
        ("ours: flops", ours("flops", dp, cap), False),
        ("ours: tokens", ours("tokens", dp, cap), False),
        ("ours: none (strided)", ours("none", dp, cap), False),
        ("verl's rule", verl_rule(dp, cap), False),
        ("TRL's rule", trl_rule(dp, cap), True),
    ]
    rows: list[dict[str, Any]] = []
    for name, plan, padded in cases:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            result = plan(lengths)
            times.append((time.perf_counter() - start) * 1e3)
        row = {"name": name, "ms": statistics.median(times), **judge(result, lengths, padded=padded)}
        rows.append(row)
        print(
            f"{name:22s} {row['ms']:8.1f} ms  max/mean FLOPs {row['max_over_mean']:.4f}  step/ideal "
            f"{row['step_over_ideal']:6.3f}  padding {row['padding']:6.1%}  micro-batches {row['micro_batches']:4.0f}  "
            f"largest {row['largest']:6.0f} tokens"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--dp", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--cap", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=cpu_record.RESULTS / "schedule.json")
    arguments = parser.parse_args()
    lengths = long_tailed(arguments.samples, arguments.cap, seed=0)
    quantiles = np.percentile(lengths, [50, 90, 99]).astype(int).tolist()
    record: dict[str, Any] = {
        **cpu_record.head(),
        "samples": len(lengths),
        "tokens": sum(lengths),
        "p50_p90_p99": quantiles,
        "cap": arguments.cap,
        "ranks": {},
    }
    for dp in arguments.dp:
        print(f"{len(lengths)} samples, {sum(lengths)} tokens, p50/p90/p99 {quantiles}, dp {dp}, cap {arguments.cap}")
        record["ranks"][str(dp)] = compare(lengths, dp, arguments.cap, arguments.repeats)
    cpu_record.write(arguments.out, record)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
