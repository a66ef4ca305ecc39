"""What the schedule counts is what the trainer holds."""

from __future__ import annotations

import numpy as np
import pytest

from miles.algos.context import ContiguousAllGather, Zigzag, localize
from miles.data.batch import build_batch
from miles.data.batch_layout import BatchLayout
from miles.data.counting import count_rollouts
from miles.data.padding import Padding
from miles.data.schedule import ScheduleConfig, build_dp_schedule

MESHES = [(1, "zigzag", 1), (1, "zigzag", 4), (2, "zigzag", 1), (4, "zigzag", 1), (2, "zigzag", 3), (2, "zigzag", 8)]
MESHES += [(2, "contiguous", 1), (3, "contiguous", 2)]


def context(cp: int, kind: str, multiple: int):
    # One rank holds all, padded at its end: a contiguous slice.
    return (Zigzag if kind == "zigzag" and cp > 1 else ContiguousAllGather)(cp, 0, multiple)


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize(("cp", "kind", "multiple"), MESHES)
def test_no_rank_holds_more_than_the_cap_and_the_padding_share_is_true(make_sample, layout, cp, kind, multiple):
    rng = np.random.default_rng(cp + multiple)
    samples = [make_sample(int(n)) for n in rng.integers(1, 30, 60)]
    lengths = [sample.total_length for sample in samples]
    config = ScheduleConfig(
        layout=BatchLayout(layout, pad_multiple=multiple, context_parallel=cp, context_layout=kind),
        max_tokens_per_gpu=80,
        micro_batch_multiple=2,
    )
    plan = build_dp_schedule(lengths, range(len(samples)), config)
    batch = build_batch(samples, plan.steps[0], count_rollouts(samples), layout=config.layout)
    held = 0
    for micro_batch in batch.ranks[0]:
        cut = localize(micro_batch, context(cp, kind, multiple)).micro_batch
        assert cut.input_ids.size <= 80
        inside = [lengths[i] for i in micro_batch.sample_index]
        assert config.layout.padding.tokens(inside) == cut.input_ids.size * cp
        held += cut.input_ids.size * cp
    assert plan.metrics["data/padding_share"] == pytest.approx(1 - sum(lengths) / held)
    assert plan.metrics["data/oversized_samples"] == 0.0


@pytest.mark.parametrize(("length", "cp", "padding_share"), [(5, 4, 3 / 8), (9, 8, 7 / 16), (7, 2, 1 / 8)])
def test_short_samples_on_many_context_ranks_fill_up_to_the_cap(length, cp, padding_share):
    config = ScheduleConfig(layout=BatchLayout(context_parallel=cp), max_tokens_per_gpu=100)
    plan = build_dp_schedule([length] * 400, range(400), config)
    widest = max(config.layout.padding.tokens([length] * len(members)) for members in plan.steps[0].ranks[0])
    assert 84 * cp <= widest <= 100 * cp
    assert plan.metrics["data/padding_share"] == pytest.approx(padding_share)


def test_a_sample_that_padding_makes_too_long_is_reported():
    config = ScheduleConfig(layout=BatchLayout(context_parallel=4), max_tokens_per_gpu=5)
    assert build_dp_schedule([16, 17], [0, 1], config).metrics["data/oversized_samples"] == 1.0


def test_without_context_and_sequence_parallelism_nothing_is_padded():
    for kind in ("zigzag", "contiguous"):
        padding = Padding.of("thd", cp=1, cp_layout=kind, multiple=1)
        assert padding.for_packing([5, 9], 12) == ([5, 9], 12)
        assert padding.tokens([5, 9]) == 14
        assert padding.tokens([]) == 0
