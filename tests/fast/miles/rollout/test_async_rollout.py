"""Asynchronous rollouts: the staleness bound holds under any timing, nothing deadlocks, nothing is lost."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from fake_engine import FakeEngine, FakePrompts, Letters
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.config import ConfigError
from miles.rollout.async_rollout import AsyncRollout
from miles.rollout.config import FiltersConfig, RolloutConfig
from miles.rollout.errors import RolloutError, RolloutStarved
from miles.rollout.metrics import oldest_version
from miles.rollout.sync_rollout import SyncRollout

NONZERO = FiltersConfig(chain=[{"kind": "check_reward_nonzero_std"}])


def config(**options):
    return RolloutConfig(**{"batch_groups": 3, "group_size": 4, "max_new_tokens": 5, **options})


def essence(batch):
    return [(s.sample_id, s.tokens.tolist(), s.reward, s.version_spans.tolist()) for s in batch.samples]


async def train(rollout, engine, steps, *, first=0, pause=0.0):
    """A trainer: collect, train for a while, raise the engine's version."""
    batches = []
    await rollout.start(first)
    for step in range(first, first + steps):
        batches.append(await asyncio.wait_for(rollout.collect(step), 20))
        await asyncio.sleep(pause)
        engine.version = step + 1
        await rollout.on_new_version(step + 1)
    return batches


def run_async(engine, cfg, steps, *, prompts=None, pause=0.0):
    async def main():
        rollout = AsyncRollout(cfg, engine, prompts or FakePrompts(), Letters(), run_seed=7)
        try:
            return await train(rollout, engine, steps, pause=pause)
        finally:
            await rollout.close()

    return asyncio.run(main())


def random_delays(seed, slowest=0.004):
    rng = random.Random(seed)
    return lambda request: rng.random() * slowest


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1000),
    staleness=st.integers(0, 3),
    groups=st.integers(1, 4),
    filtered=st.booleans(),
    pause=st.sampled_from([0.0, 0.002]),
)
def test_no_trained_token_is_older_than_the_bound_and_every_prompt_is_used_once(
    seed, staleness, groups, filtered, pause
):
    engine = FakeEngine(delay=random_delays(seed))
    cfg = config(batch_groups=groups, max_staleness=staleness, filters=NONZERO if filtered else FiltersConfig())
    batches = run_async(engine, cfg, 6, pause=pause)
    seen = []
    for step, batch in enumerate(batches):
        assert len(batch.samples) == groups * 4
        assert step - oldest_version(batch.samples) <= staleness
        assert batch.metrics["rollout/staleness_max"] <= staleness
        ids = list(dict.fromkeys(s.group_id for s in batch.samples))
        assert ids == sorted(ids)
        seen += ids
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("filters", [FiltersConfig(), NONZERO], ids=["plain", "filtered"])
def test_staleness_zero_equals_the_synchronous_rollout(filters):
    cfg = config(filters=filters)

    async def synchronous():
        engine = FakeEngine()
        rollout = SyncRollout(cfg, engine, FakePrompts(), Letters(), run_seed=7)
        batches = []
        await rollout.start(0)
        for step in range(4):
            batches.append(await rollout.collect(step))
            engine.version = step + 1
            await rollout.on_new_version(step + 1)
        return batches

    expected = [essence(b) for b in asyncio.run(synchronous())]
    for seed in range(3):
        batches = run_async(FakeEngine(delay=random_delays(seed)), cfg, 4)
        assert [essence(b) for b in batches] == expected


def test_groups_are_generated_while_the_trainer_trains():
    engine = FakeEngine(delay=lambda r: 0.01)

    async def main(staleness):
        rollout = AsyncRollout(config(max_staleness=staleness), engine, FakePrompts(), Letters(), run_seed=0)
        await rollout.start(0)
        await rollout.collect(0)
        await asyncio.sleep(0.05)
        ready = len(rollout.buffer.finished)
        await rollout.close()
        return ready

    assert asyncio.run(main(0)) == 0
    assert asyncio.run(main(2)) == 6


def test_a_group_that_became_too_old_is_dropped_and_its_prompt_drawn_anew():
    """Group 0 takes as long as three steps of the others."""
    slow = {"0-0"}

    def delay(request):
        return 0.15 if request.rid in slow else 0.001

    engine = FakeEngine(delay=delay)

    async def main():
        rollout = AsyncRollout(config(max_staleness=1, batch_groups=1), engine, FakePrompts(), Letters(), run_seed=0)
        await rollout.start(0)
        batches = []
        for step in range(6):
            batches.append(await rollout.collect(step))
            if step == 2:
                await asyncio.sleep(0.2)
                slow.clear()
            engine.version = step + 1
            await rollout.on_new_version(step + 1)
        await rollout.close()
        return batches

    batches = asyncio.run(main())
    dropped = sum(b.metrics["rollout/dropped_stale"] for b in batches)
    assert dropped == 1
    late = next(b for b in batches if b.samples[0].group_id == 0)
    assert late.samples[0].version_spans[0, 0] >= 2


def test_aborted_groups_are_submitted_again_with_other_draws():
    aborts = [2]

    def finish(request):
        if request.rid == "0-0" and aborts[0]:
            aborts[0] -= 1
            return "abort", 1
        return "stop", 3

    engine = FakeEngine(finish=finish)
    (batch,) = run_async(engine, config(), 1)
    assert batch.metrics["rollout/resubmitted_aborted"] == 2
    assert {s.group_id for s in batch.samples} == {0, 1, 2}
    assert len({r.seed for r in engine.requests if r.rid == "0-1"}) == 3


def test_partial_responses_are_continued_instead_of_submitted_again():
    aborts = [2]

    def finish(request):
        if request.rid == "0-0" and aborts[0]:
            aborts[0] -= 1
            return "abort", 1
        return "length", request.sampling.max_new_tokens

    engine = FakeEngine(finish=finish)
    (batch,) = run_async(engine, config(partial=True), 1)
    assert batch.metrics["rollout/resubmitted_aborted"] == 0
    mine = [r for r in engine.requests if r.rid == "0-0"]
    assert [r.sampling.max_new_tokens for r in mine] == [5, 4, 3]
    assert [len(r.input_ids) for r in mine] == [3, 4, 5]
    assert len({r.seed for r in mine}) == 1


def test_a_resumed_run_draws_undelivered_prompts_again_with_the_same_seeds():
    cfg = config(max_staleness=2)

    async def main():
        engine = FakeEngine(delay=random_delays(1))
        rollout = AsyncRollout(cfg, engine, FakePrompts(), Letters(), run_seed=0)
        first = await train(rollout, engine, 2)
        state = json.loads(json.dumps(rollout.state()))
        await rollout.close()
        prompts = FakePrompts()
        engine = FakeEngine(version=2)
        resumed = AsyncRollout(cfg, engine, prompts, Letters(), run_seed=0)
        resumed.restore(state)
        second = await train(resumed, engine, 2, first=2)
        await resumed.close()
        return state, first, second

    state, first, second = asyncio.run(main())
    delivered = {s.group_id for b in first for s in b.samples}
    undelivered = [prompt_id for prompt_id, _ in state["undelivered"]]
    assert not delivered & set(undelivered)
    assert delivered | set(undelivered) == set(range(len(delivered) + len(undelivered)))
    assert {s.group_id for s in second[0].samples} == set(sorted(undelivered)[:3])


def test_a_failing_group_stops_collect_with_its_error():
    filters = FiltersConfig(chain=[{"kind": "reward_range", "lo": 5.0, "hi": 9.0}], starvation_limit=4)
    with pytest.raises(RolloutStarved):
        run_async(FakeEngine(), config(filters=filters), 1, prompts=FakePrompts(score=lambda *_: 0.0))


def test_options_of_the_other_loop_are_refused():
    with pytest.raises(ConfigError, match=r"rollout\.max_staleness"):
        SyncRollout(config(max_staleness=1), FakeEngine(), FakePrompts(), Letters(), run_seed=0)
    with pytest.raises(ConfigError, match=r"rollout\.over_sampling"):
        AsyncRollout(config(over_sampling=2.0), FakeEngine(), FakePrompts(), Letters(), run_seed=0)


def test_forgetting_to_tell_of_a_new_version_is_an_error_not_a_hang():
    async def main():
        rollout = AsyncRollout(config(), FakeEngine(), FakePrompts(), Letters(), run_seed=0)
        await rollout.start(0)
        await rollout.collect(0)
        try:
            with pytest.raises(RolloutError, match=r"on_new_version\(version\)"):
                await rollout.collect(1)
            with pytest.raises(RolloutError, match="only grow"):
                await rollout.on_new_version(-1)
        finally:
            await rollout.close()

    asyncio.run(main())


def test_a_skipped_step_gives_its_numbers_back():
    async def main():
        rollout = AsyncRollout(config(), FakeEngine(), FakePrompts(), Letters(), run_seed=0)
        await rollout.start(0)
        first = await rollout.collect(0)
        await rollout.on_skipped_step()
        second = await asyncio.wait_for(rollout.collect(1), 20)
        await rollout.close()
        return [{s.group_id for s in batch.samples} for batch in (first, second)]

    assert asyncio.run(main()) == [{0, 1, 2}, {3, 4, 5}]


def test_a_closed_rollout_asks_for_nothing_more():
    async def main():
        engine = FakeEngine()
        rollout = AsyncRollout(config(), engine, FakePrompts(), Letters(), run_seed=0)
        await rollout.start(0)
        await rollout.collect(0)
        await rollout.close()
        asked = len(engine.requests)
        await rollout.on_new_version(1)
        await asyncio.sleep(0.01)
        return len(engine.requests) - asked

    assert asyncio.run(main()) == 0


def test_a_held_rollout_submits_nothing_new_and_catches_up_when_it_is_released():
    engine = FakeEngine()

    async def main() -> list[int]:
        rollout = AsyncRollout(config(max_staleness=1), engine, FakePrompts(), Letters(), run_seed=0)
        await rollout.start(0)
        await rollout.collect(0)
        counts = []
        await rollout.hold()
        await rollout.on_new_version(1)
        await asyncio.sleep(0.01)
        counts.append(len(engine.requests))
        await rollout.release()
        await asyncio.sleep(0.01)
        counts.append(len(engine.requests))
        await rollout.close()
        return counts

    # Two batches of 3 groups of 4 at the start, and one more with the version.
    assert asyncio.run(main()) == [24, 36]
