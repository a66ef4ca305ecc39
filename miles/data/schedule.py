"""Which data-parallel rank trains which samples, in which micro-batch, in which step.

A pure function of (lengths, rollout ids, configuration): every rank could compute it and get the same answer.
A step is `global_batch_size` rollouts; siblings (same rollout id) stay in one step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from miles.data.batch_layout import BatchLayout
from miles.data.packing import FlopsShape, first_fit_decreasing, karmarkar_karp, padded_decreasing, sequence_flops

# (sample indices) of one micro-batch; empty = a dummy that only keeps the ranks' counts equal.
Bin = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """Resolved from `data.*` and the mesh. `layout` is that of every batch; `micro_batch_multiple` is the
    virtual-pipeline group size."""

    layout: BatchLayout = field(default_factory=BatchLayout)
    data_parallel: int = 1
    max_tokens_per_gpu: int = 8192
    micro_batch_multiple: int = 1
    balance: Literal["none", "tokens", "flops"] = "tokens"
    global_batch_size: int | None = None  # rollouts a step; None: all in one step
    partial_step: Literal["drop", "train"] = "drop"
    flops: FlopsShape | None = None

    def __post_init__(self) -> None:
        for name in ("data_parallel", "max_tokens_per_gpu", "micro_batch_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"schedule: {name} is {getattr(self, name)}, expected at least 1")
        if self.global_batch_size is not None and self.global_batch_size < 1:
            raise ValueError(f"schedule: global_batch_size is {self.global_batch_size}, expected at least 1 rollout")
        if self.balance == "flops" and self.flops is None:
            raise ValueError("schedule: balance=flops needs the model's shape; pass flops, or use balance=tokens")

    @property
    def capacity(self) -> int:
        """Tokens of a micro-batch over all its context-parallel ranks."""
        return self.max_tokens_per_gpu * self.layout.context_parallel


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """`ranks[r]` are the micro-batches of data-parallel rank r; every rank has the same number."""

    ranks: tuple[tuple[Bin, ...], ...]
    samples: Bin


@dataclass(frozen=True, slots=True)
class DPSchedule:
    steps: tuple[StepSchedule, ...]
    metrics: dict[str, float] = field(default_factory=dict)


def build_dp_schedule(
    lengths: Sequence[int],
    rollout_ids: Sequence[int],
    config: ScheduleConfig,
    *,
    active: Sequence[bool] | None = None,
) -> DPSchedule:
    """Samples with `active` False belong to a step but to no micro-batch (nothing to train in them).

    Steps in order of first appearance of the rollouts. Metrics: `data/dropped_rollouts`,
    `data/oversized_samples`, `data/dummy_micro_batches`, `data/padding_share`, `data/balance_max_over_mean`.
    """
    if len(lengths) != len(rollout_ids):
        raise ValueError(f"schedule: {len(lengths)} lengths for {len(rollout_ids)} rollout ids")
    sizes = [int(x) for x in lengths]
    if sizes and min(sizes) < 1:
        raise ValueError(f"schedule: sample {sizes.index(min(sizes))} has no tokens")
    steps, dropped_rollouts = _split_into_steps(rollout_ids, config)
    if active is not None:
        steps = [[i for i in members if active[i]] for members in steps]
    costs = _costs(sizes, config)
    scheduled = [_schedule_step(members, sizes, costs, config) for members in steps]
    used = [sizes[i] for members in steps for i in members]
    # Ranks wait for each other at every step: the busiest ones' sum over the sum of means.
    loads = [[float(sum(costs[i] for b in rank for i in b)) for rank in step.ranks] for step in scheduled]
    mean = sum(sum(load) / len(load) for load in loads)
    padding = config.layout.padding
    held = sum(padding.tokens([sizes[i] for i in b]) for step in scheduled for rank in step.ranks for b in rank)
    metrics = {
        "data/dropped_rollouts": float(dropped_rollouts),
        "data/oversized_samples": float(sum(padding.tokens([length]) > config.capacity for length in used)),
        "data/dummy_micro_batches": float(sum(not b for step in scheduled for rank in step.ranks for b in rank)),
        "data/padding_share": 1.0 - sum(used) / held if held else 0.0,
        "data/balance_max_over_mean": sum(map(max, loads)) / mean if mean > 0 else 1.0,
    }
    return DPSchedule(tuple(scheduled), metrics)


def _split_into_steps(rollout_ids: Sequence[int], config: ScheduleConfig) -> tuple[list[list[int]], int]:
    by_rollout: dict[int, list[int]] = {}
    for index, rollout_id in enumerate(rollout_ids):
        by_rollout.setdefault(rollout_id, []).append(index)
    rollouts = list(by_rollout.values())
    size = config.global_batch_size or max(len(rollouts), 1)
    steps = [rollouts[at : at + size] for at in range(0, len(rollouts), size)]
    dropped: list[list[int]] = []
    if steps and len(steps[-1]) < size and config.partial_step == "drop":
        dropped = steps.pop()
    flat = [sorted(i for rollout in step for i in rollout) for step in steps]
    return flat, len(dropped)


def _costs(sizes: list[int], config: ScheduleConfig) -> list[float]:
    if config.balance == "flops":
        assert config.flops is not None
        return sequence_flops(np.asarray(sizes), config.flops).tolist()
    return [float(x) for x in sizes]


def _schedule_step(members: list[int], sizes: list[int], costs: list[float], config: ScheduleConfig) -> StepSchedule:
    plans = [_bins_then_ranks(members, sizes, costs, config)]
    if config.balance != "none" and config.data_parallel > 1:
        plans.append(_ranks_then_bins(members, sizes, costs, config))
    # The lightest busiest rank wins, then fewer micro-batches, then the first.
    best = min(plans, key=lambda plan: (_heaviest(plan, costs), len(plan[0])))
    return StepSchedule(tuple(tuple(tuple(b) for b in rank) for rank in best), tuple(members))


def _heaviest(plan: list[list[list[int]]], costs: list[float]) -> float:
    return max(sum(costs[i] for b in rank for i in b) for rank in plan)


def _pack(members: list[int], sizes: list[int], config: ScheduleConfig) -> list[list[int]]:
    pack = first_fit_decreasing if config.layout.kind == "thd" else padded_decreasing
    lengths, capacity = config.layout.padding.for_packing([sizes[i] for i in members], config.capacity)
    return [sorted(members[i] for i in b) for b in pack(lengths, capacity)]


def _bins_then_ranks(
    members: list[int], sizes: list[int], costs: list[float], config: ScheduleConfig
) -> list[list[list[int]]]:
    """Fewest bins over all samples, then whole bins to ranks: best when a rank gets few micro-batches."""
    bins = _pack(members, sizes, config)
    multiple = config.data_parallel * config.micro_batch_multiple
    _raise_to(bins, costs, max(-(-len(bins) // multiple), 1) * multiple)
    weights = [sum(costs[i] for i in b) for b in bins]
    return [[bins[i] for i in rank] for rank in _assign(weights, config)]


def _ranks_then_bins(
    members: list[int], sizes: list[int], costs: list[float], config: ScheduleConfig
) -> list[list[list[int]]]:
    """Samples to ranks, costliest first to the lightest rank (Graham's LPT), then bins inside each rank.

    Balances to within one short sample where whole bins cannot; may need a micro-batch more.
    """
    loads = [(0.0, rank) for rank in range(config.data_parallel)]
    shares: list[list[int]] = [[] for _ in loads]
    for index in sorted(members, key=lambda i: (-costs[i], i)):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + costs[index], rank))
    ranks = [_pack(sorted(share), sizes, config) for share in shares]
    multiple = config.micro_batch_multiple
    wanted = max(-(-max(len(bins) for bins in ranks) // multiple), 1) * multiple
    for bins in ranks:
        _raise_to(bins, costs, wanted)
    return ranks


def _raise_to(bins: list[list[int]], costs: list[float], wanted: int) -> None:
    """Split the heaviest bin that holds several samples; when none is left, add dummies."""
    weights = [sum(costs[i] for i in b) for b in bins]
    while len(bins) < wanted:
        candidates = [i for i, b in enumerate(bins) if len(b) > 1]
        if not candidates:
            bins.extend([] for _ in range(wanted - len(bins)))
            return
        heaviest = max(candidates, key=lambda i: (weights[i], -i))
        first, second = _halve(bins[heaviest], costs)
        bins[heaviest] = first
        bins.append(second)
        weights[heaviest] = sum(costs[i] for i in first)
        weights.append(sum(costs[i] for i in second))


def _halve(members: list[int], costs: list[float]) -> tuple[list[int], list[int]]:
    sides: tuple[list[int], list[int]] = ([], [])
    loads = [0.0, 0.0]
    for index in sorted(members, key=lambda i: (-costs[i], i)):
        side = 0 if loads[0] <= loads[1] else 1
        sides[side].append(index)
        loads[side] += costs[index]
    return sorted(sides[0]), sorted(sides[1])


def _assign(weights: list[float], config: ScheduleConfig) -> list[list[int]]:
    """Bin numbers per rank, equal counts; the differencing result only where it beats strided."""
    dp = config.data_parallel
    strided = [list(range(rank, len(weights), dp)) for rank in range(dp)]
    if config.balance == "none" or dp == 1:
        return strided
    balanced = karmarkar_karp(weights, dp)

    def heaviest(ranks: list[list[int]]) -> float:
        return max(sum(weights[i] for i in rank) for rank in ranks)

    return balanced if heaviest(balanced) <= heaviest(strided) else strided
