"""Dynamic sampling with a bounded refill, against its peer's definition.

The peer is DAPO (Yu et al. 2025, equation 11 and algorithm 1) as verl's trainer carries it out: batches of prompts are
generated until enough of them have rewards that differ (std > 0), at most `max_num_gen_batches`, and the first
`train_batch_size` of those are trained on; prompts beyond them and refused ones are thrown away.
"""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from fake_engine import FakeEngine, FakePrompts, Letters
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from miles.algos.config import AlgoConfig
from miles.algos.step_batches import prepare_steps
from miles.config import ConfigError
from miles.data.schedule import ScheduleConfig
from miles.rollout.config import FiltersConfig, RolloutConfig
from miles.rollout.errors import RolloutStarved
from miles.rollout.sync_rollout import SyncRollout

SIZE = 4
DYNAMIC = {"kind": "check_reward_nonzero_std"}


def scored(table):
    """Rewards of prompt i: row i of the table for the answers of its group, in the order in which they are judged."""
    seen: dict[int, int] = {}

    def score(text, prompt):
        seen[prompt.prompt_id] = seen.get(prompt.prompt_id, -1) + 1
        return table[prompt.prompt_id % len(table)][seen[prompt.prompt_id] % SIZE]

    return FakePrompts(score=score)


def collect(table, *, wanted, step=0, **options):
    filters = {"chain": [DYNAMIC], **options.pop("filters", {})}
    config = RolloutConfig(batch_groups=wanted, group_size=SIZE, max_new_tokens=5, filters=filters, **options)

    async def run():
        prompts = scored(table)
        rollout = SyncRollout(config, FakeEngine(), prompts, Letters(), run_seed=3)
        await rollout.start(0)
        return await rollout.collect(step), prompts.next

    return asyncio.run(run())


def peers_choice(table, *, wanted, batch, most):
    """(prompts that the peer trains on, batches that it generated); None in place of the prompts when it gives up."""
    kept: list[int] = []
    for number in range(1, most + 1):
        prompts = range((number - 1) * batch, number * batch)
        kept += [index for index in prompts if np.std(table[index % len(table)]) > 0]
        if len(kept) >= wanted:
            return kept[:wanted], number
    return None, most


groups = st.lists(st.sampled_from([0.0, 1.0]), min_size=SIZE, max_size=SIZE)


@settings(max_examples=60)
@given(st.lists(groups, min_size=5, max_size=12), st.integers(1, 4), st.sampled_from([1.0, 1.5, 3.0]))
def test_the_groups_that_are_trained_are_the_peers(table, wanted, over_sampling):
    most = 200
    first = math.ceil(wanted * over_sampling)
    theirs, _ = peers_choice(table, wanted=wanted, batch=first, most=most)
    if theirs is None:
        with pytest.raises(RolloutStarved):
            collect(table, wanted=wanted, over_sampling=over_sampling, filters={"max_waves": most})
        return
    batch, _ = collect(table, wanted=wanted, over_sampling=over_sampling)
    assert [sample.group_id for sample in batch.samples[::SIZE]] == theirs
    assert not any(sample.removed for sample in batch.samples)


def test_a_refill_asks_for_what_is_missing_and_the_peer_for_whole_batches():
    same, mixed = [1.0] * SIZE, [0.0, 1.0, 0.0, 1.0]
    table = [same, mixed, mixed, mixed, mixed, mixed, mixed, mixed]
    batch, drawn = collect(table, wanted=4)
    assert peers_choice(table, wanted=4, batch=4, most=9) == ([1, 2, 3, 4], 2)
    assert [sample.group_id for sample in batch.samples[::SIZE]] == [1, 2, 3, 4]
    assert (batch.metrics["rollout/waves"], drawn) == (2, 5)


def test_at_the_limit_the_run_stops_as_the_peers_does():
    table = [[0.0] * SIZE, [1.0] * SIZE, [0.0, 1.0, 1.0, 1.0]]
    assert peers_choice(table, wanted=3, batch=3, most=2)[0] is None
    with pytest.raises(
        RolloutStarved, match=r"step 5: 2 waves of requests .* left 2 of 3 groups missing, 4 were refused .*zero_std 4"
    ):
        collect(table, wanted=3, step=5, filters={"max_waves": 2})
    batch, _ = collect(table, wanted=3, filters={"max_waves": 9})
    assert batch.metrics["rollout/waves"] > 2


def test_or_trains_on_the_groups_that_there_are():
    table = [[0.0] * SIZE, [1.0] * SIZE, [0.0, 1.0, 1.0, 1.0]]
    batch, _ = collect(table, wanted=3, filters={"max_waves": 1, "at_limit": "train"})
    assert batch.metrics["rollout/filled_groups"] == 2
    assert batch.metrics["rollout/refused/zero_std"] == 2
    # Each group once, whether it fills the batch or not.
    assert batch.metrics["rollout/reward_mean_all"] == pytest.approx((0.0 + 1.0 + 0.75) / 3)
    assert len(batch.samples) == 3 * SIZE
    assert {sample.group_id for sample in batch.samples if not sample.removed} == {2}
    step = prepare_steps(batch.samples, AlgoConfig(), ScheduleConfig(max_tokens_per_gpu=4096)).steps[0]
    assert step.denominators.rollouts == SIZE


def test_a_step_without_any_group_is_skipped():
    batch, _ = collect([[1.0] * SIZE], wanted=2, filters={"max_waves": 2, "at_limit": "train"})
    assert all(sample.removed for sample in batch.samples)
    step = prepare_steps(batch.samples, AlgoConfig(), ScheduleConfig(max_tokens_per_gpu=4096)).steps[0]
    assert step.denominators.rollouts == 0


def test_groups_may_be_compared_by_what_was_judged():
    # Solved by all, at different lengths: the shaped rewards differ, the judged ones do not.
    options = {"wanted": 1, "reward": {"length_normalised": {"weight": 0.5}}}

    async def run(part):
        lengths = iter([1, 2, 3, 4] * 50)
        engine = FakeEngine(finish=lambda _: ("stop", next(lengths)))
        filters = {"chain": [{**DYNAMIC, "part": part}], "max_waves": 2}
        config = RolloutConfig(
            batch_groups=1, group_size=SIZE, max_new_tokens=5, filters=filters, reward=options["reward"]
        )
        rollout = SyncRollout(config, engine, scored([[1.0] * SIZE]), Letters(), run_seed=3)
        await rollout.start(0)
        return await rollout.collect(0)

    assert len(asyncio.run(run(None)).samples) == SIZE
    with pytest.raises(RolloutStarved, match="zero_std 2"):
        asyncio.run(run("judged"))
    with pytest.raises(ConfigError, match=r"part 'acc'.*it has: judged, length"):
        asyncio.run(run("acc"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"filters": {"max_waves": 2}}, "max_waves has no effect with an empty"),
        ({"filters": {"chain": [DYNAMIC], "at_limit": "train"}}, "at_limit has no effect without"),
        ({"filters": {"chain": [DYNAMIC], "max_waves": 2}, "max_staleness": 1}, "use rollout.filters.starvation_limit"),
        ({"filters": {"chain": [DYNAMIC], "max_waves": 0}}, "greater than or equal to 1"),
    ],
)
def test_limits_that_bound_nothing_are_refused(options, said):
    with pytest.raises(ValidationError, match=said):
        RolloutConfig(**options)


def test_the_default_has_no_limit():
    assert FiltersConfig().max_waves is None
