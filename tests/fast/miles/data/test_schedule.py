from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.data.batch_layout import BatchLayout
from miles.data.packing import (
    AttentionLayer,
    FlopsShape,
    PackedBounds,
    first_fit_decreasing,
    karmarkar_karp,
    padded_decreasing,
    sequence_flops,
)
from miles.data.schedule import ScheduleConfig, build_dp_schedule

SHAPE = FlopsShape(1000, (AttentionLayer(2, 16, 16), AttentionLayer(2, 16, 16, window=8)))


@st.composite
def problems(draw):
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=40))
    rollouts = [draw(st.integers(0, max(len(lengths) - 1, 0))) for _ in lengths]
    config = ScheduleConfig(
        data_parallel=draw(st.integers(1, 5)),
        layout=BatchLayout(
            draw(st.sampled_from(["thd", "bshd"])),
            context_parallel=draw(st.integers(1, 4)),
            context_layout=draw(st.sampled_from(["zigzag", "contiguous"])),
            pad_multiple=draw(st.integers(1, 4)),
        ),
        max_tokens_per_gpu=draw(st.integers(8, 64)),
        micro_batch_multiple=draw(st.integers(1, 3)),
        balance=draw(st.sampled_from(["none", "tokens", "flops"])),
        global_batch_size=draw(st.none() | st.integers(1, 12)),
        partial_step=draw(st.sampled_from(["drop", "train"])),
        flops=SHAPE,
    )
    return lengths, rollouts, config


@settings(max_examples=150)
@given(problems())
def test_schedule_properties(problem):
    lengths, rollouts, config = problem
    schedule = build_dp_schedule(lengths, rollouts, config)
    seen = [i for step in schedule.steps for rank in step.ranks for b in rank for i in b]
    # Once each, or dropped with its whole rollout.
    lost = set(range(len(lengths))) - set(seen)
    assert len(seen) == len(set(seen))
    assert schedule.metrics["data/dropped_rollouts"] == len({rollouts[i] for i in lost})
    assert config.partial_step == "drop" or not lost
    step_of = {i: k for k, step in enumerate(schedule.steps) for i in step.samples}
    for rollout in set(rollouts):
        members = [i for i, r in enumerate(rollouts) if r == rollout]
        assert len({step_of.get(i) for i in members}) == 1, "siblings are torn apart"
    for step in schedule.steps:
        if config.global_batch_size:
            count = len({rollouts[i] for i in step.samples})
            assert count == config.global_batch_size or (config.partial_step == "train" and step is schedule.steps[-1])
        assert len({len(rank) for rank in step.ranks}) == 1, "unequal counts"
        assert len(step.ranks[0]) % config.micro_batch_multiple == 0
        for rank in step.ranks:
            for b in rank:
                assert config.layout.padding.tokens([lengths[i] for i in b]) <= config.capacity or len(b) == 1
    assert schedule == build_dp_schedule(list(lengths), list(rollouts), config), "not deterministic"


@settings(max_examples=60)
@given(st.lists(st.integers(1, 4000), min_size=1, max_size=120), st.integers(2, 8))
def test_kk_max_over_mean_not_worse_than_strided(lengths, ranks):
    heaviest = {}
    for balance in ("none", "tokens"):
        config = ScheduleConfig(data_parallel=ranks, max_tokens_per_gpu=4096, balance=balance)
        step = build_dp_schedule(lengths, range(len(lengths)), config).steps[0]
        heaviest[balance] = max(sum(lengths[i] for b in rank for i in b) for rank in step.ranks)
    assert heaviest["tokens"] <= heaviest["none"]


def test_balancing_wins_clearly_on_a_long_tail():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(6.0, 1.2, 512).astype(int) + 8, 8192).tolist()
    loads = {}
    for balance in ("none", "flops"):
        config = ScheduleConfig(data_parallel=8, max_tokens_per_gpu=8192, balance=balance, flops=SHAPE)
        step = build_dp_schedule(lengths, range(512), config).steps[0]
        cost = sequence_flops(lengths, SHAPE)
        per_rank = [sum(cost[i] for b in rank for i in b) for rank in step.ranks]
        loads[balance] = max(per_rank) / np.mean(per_rank)
    assert loads["flops"] < loads["none"]


def test_an_oversized_sample_sits_alone_and_is_reported():
    schedule = build_dp_schedule([100, 5, 5], [0, 1, 2], ScheduleConfig(max_tokens_per_gpu=16))
    assert schedule.steps[0].ranks == (((0,), (1, 2)),)
    assert schedule.metrics["data/oversized_samples"] == 1.0


def test_too_few_samples_get_dummies():
    schedule = build_dp_schedule([4], [0], ScheduleConfig(data_parallel=3))
    assert schedule.steps[0].ranks == (((0,),), ((),), ((),))
    assert schedule.metrics["data/dummy_micro_batches"] == 2.0


def test_inactive_samples_keep_their_place_in_a_step_but_get_no_micro_batch():
    config = ScheduleConfig(global_batch_size=2)
    schedule = build_dp_schedule([4, 4, 4, 4], [0, 1, 2, 3], config, active=[True, False, False, False])
    assert [step.samples for step in schedule.steps] == [(0,), ()]
    assert schedule.steps[1].ranks == (((),),)


def test_balance_is_judged_within_each_step():
    lengths = [8, 8, 2, 2, 6, 2]
    alone = build_dp_schedule(lengths, range(6), ScheduleConfig(global_batch_size=2))
    assert alone.metrics["data/balance_max_over_mean"] == 1.0
    two = build_dp_schedule(lengths, range(6), ScheduleConfig(global_batch_size=2, data_parallel=2))
    assert two.metrics["data/balance_max_over_mean"] == pytest.approx((8 + 2 + 6) / (8 + 2 + 4))


def test_dropped_rollouts_are_counted():
    schedule = build_dp_schedule([1] * 5, [0, 0, 1, 2, 3], ScheduleConfig(global_batch_size=3))
    assert schedule.metrics["data/dropped_rollouts"] == 1
    assert [step.samples for step in schedule.steps] == [(0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel": 0}, "data_parallel is 0"),
        ({"balance": "flops"}, "needs the model's shape"),
        ({"global_batch_size": 0}, "global_batch_size is 0"),
    ],
)
def test_bad_schedule_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "rows"}, "kind is 'rows', expected thd or bshd"),
        ({"pad_multiple": 0}, "pad_multiple is 0"),
        ({"context_parallel": 0}, "context_parallel is 0"),
    ],
)
def test_bad_layouts_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        BatchLayout(**options)


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(1, 40))
def test_first_fit_decreasing_is_first_fit(lengths, capacity):
    bins: list[list[int]] = []
    closed: set[int] = set()
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [
            b
            for b, members in enumerate(bins)
            if b not in closed and sum(lengths[i] for i in members) + lengths[index] <= capacity
        ]
        if lengths[index] > capacity:
            closed.add(len(bins))
        if fits:
            bins[fits[0]].append(index)
        else:
            bins.append([index])
    assert first_fit_decreasing(lengths, capacity) == bins


def test_padded_bins_count_the_longest_row():
    assert padded_decreasing([5, 2, 4, 1], 10) == [[0, 2], [1, 3]]
    assert padded_decreasing([50], 10) == [[0]]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.integers(1, 4))
def test_karmarkar_karp_keeps_counts_equal(weights, parts):
    weights = weights[: len(weights) // parts * parts] or [1] * parts
    split = karmarkar_karp(weights, parts)
    assert sorted(i for part in split for i in part) == list(range(len(weights)))
    assert {len(part) for part in split} == {len(weights) // parts}


def test_karmarkar_karp_finds_the_even_split():
    assert sorted(sum([8, 7, 6, 5][i] for i in part) for part in karmarkar_karp([8, 7, 6, 5], 2)) == [13, 13]


def test_sequence_flops_by_hand():
    shape = FlopsShape(10, (AttentionLayer(2, 3, 5), AttentionLayer(1, 4, 4, window=2)))
    # L = 3: dense 2*3*10; full layer 2*2*8 * (3*3 - 3) ; window layer 2*1*8 * (2*3 - 1)
    assert sequence_flops([3], shape).tolist() == [60 + 32 * 6 + 16 * 5]


def test_packed_bounds_describe_documents_and_one_padding_tail():
    bounds = PackedBounds.from_lengths([3, 1, 2], pad_from=4)
    assert bounds.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert bounds.seq_idx.tolist() == [[0, 0, 0, 1, 2, 2]]
    assert (bounds.max_seqlen, bounds.lengths) == (3, (3, 1, 2))
    with pytest.raises(ValueError, match="padding starts at 4"):
        PackedBounds.from_lengths([3, 1, 2], pad_from=3)
    with pytest.raises(ValueError, match="at least one token"):
        PackedBounds.from_lengths([3, 0])
