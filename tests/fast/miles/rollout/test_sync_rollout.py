"""The synchronous loop: which groups a step gets, with which seeds, and what stops it."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from fake_engine import FakeEngine, FakePrompts, Letters
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.data.sample import Sample, Status, validate_sample
from miles.rollout.config import FiltersConfig, RolloutConfig
from miles.rollout.errors import EngineReplyError, RolloutError, RolloutStarved
from miles.rollout.filters import FilterChain, check_no_aborted, check_reward_nonzero_std, reward_range
from miles.rollout.generate import GenerateContext, merge_spans, pending_group, single_turn
from miles.rollout.seeds import sampling_seeds
from miles.rollout.sync_rollout import SyncRollout


def config(**options):
    return RolloutConfig(**{"batch_groups": 3, "group_size": 4, "max_new_tokens": 5, **options})


def collect(engine, cfg, prompts=None, *, steps=1, run_seed=7, version=None):
    """`version`: what the engine is said to serve, by default what it does."""

    async def run():
        rollout = SyncRollout(cfg, engine, prompts or FakePrompts(), Letters(), run_seed=run_seed)
        await rollout.start(engine.version if version is None else version)
        return [await rollout.collect(step) for step in range(steps)]

    return asyncio.run(run())


def essence(batch):
    return [(s.sample_id, s.tokens.tolist(), s.reward) for s in batch.samples]


def test_a_step_has_whole_groups_in_prompt_order():
    (batch,) = collect(FakeEngine(version=4), config())
    assert [s.sample_id for s in batch.samples] == [f"{g}-{k}" for g in range(3) for k in range(4)]
    assert [s.rollout_id for s in batch.samples] == list(range(12))
    for sample in batch.samples:
        validate_sample(sample)
        assert sample.status == Status.COMPLETED
        assert sample.version_spans.tolist() == [[4, 3]]
    assert batch.weight_version == 4
    assert batch.metrics["rollout/samples"] == 12


def test_timing_does_not_change_the_step():
    rng = random.Random(0)
    filters = {"filters": FiltersConfig(chain=[{"kind": "check_reward_nonzero_std"}]), "over_sampling": 1.5}
    fast = collect(FakeEngine(), config(**filters), steps=2)
    slow = collect(FakeEngine(delay=lambda r: rng.random() * 0.02), config(**filters), steps=2)
    assert [essence(b) for b in fast] == [essence(b) for b in slow]


def test_a_resumed_stream_repeats_the_tokens_and_another_seed_does_not():
    first = collect(FakeEngine(), config(), steps=3)
    prompts = FakePrompts()
    prompts.next = 6
    (resumed,) = collect(FakeEngine(), config(), prompts)
    assert essence(resumed) == essence(first[2])
    (other,) = collect(FakeEngine(), config(), run_seed=8)
    assert essence(other) != essence(first[0])


def test_refused_groups_are_replaced_and_counted():
    prompts = FakePrompts(score=lambda text, prompt: float(prompt.prompt_id % 2) * len(set(text)))
    filters = FiltersConfig(chain=[{"kind": "reward_range", "lo": 0.5, "hi": 99.0}])
    (batch,) = collect(FakeEngine(), config(filters=filters), prompts)
    assert {s.group_id for s in batch.samples} == {1, 3, 5}
    assert batch.metrics["rollout/refused/reward_below"] >= 3
    assert batch.metrics["rollout/reward_mean_all"] < batch.metrics["rollout/reward_mean"]


def test_filters_that_refuse_everything_starve_with_counts():
    filters = FiltersConfig(chain=[{"kind": "reward_range", "lo": 5.0, "hi": 9.0}], starvation_limit=7)
    with pytest.raises(RolloutStarved, match=r"7 groups in a row.*reward_below 7"):
        collect(FakeEngine(), config(filters=filters), FakePrompts(score=lambda *_: 0.0))


def test_surplus_groups_of_over_sampling_are_counted_and_not_trained():
    (batch,) = collect(FakeEngine(), config(over_sampling=2.0))
    assert len(batch.samples) == 12
    assert batch.metrics["rollout/surplus_groups"] == 3


def test_tokens_of_another_version_are_an_error():
    with pytest.raises(EngineReplyError, match=r"version 3, this step is on version 4"):
        collect(FakeEngine(version=3), config(), version=4)
    collect(FakeEngine(version=4), config(), version=4)


def test_a_new_version_is_the_one_that_tokens_are_checked_against():
    async def run():
        engine = FakeEngine(version=4)
        rollout = SyncRollout(config(), engine, FakePrompts(), Letters(), run_seed=7)
        with pytest.raises(RolloutError, match=r"call start\(version\) first"):
            await rollout.collect(0)
        await rollout.start(3)
        await rollout.on_new_version(4)
        assert (await rollout.collect(0)).weight_version == 4
        await rollout.on_new_version(5)
        with pytest.raises(EngineReplyError, match="version 4, this step is on version 5"):
            await rollout.collect(1)

    asyncio.run(run())


def test_a_prompt_that_fills_the_context_is_truncated_without_a_request():
    engine = FakeEngine(context_length=3)
    with pytest.raises(RolloutError, match="no sample of this step has a token"):
        collect(engine, config())
    assert engine.requests == []


def test_the_budget_is_cut_to_the_context():
    engine = FakeEngine(context_length=5, finish=lambda r: ("length", r.sampling.max_new_tokens))
    (batch,) = collect(engine, config())
    assert {r.sampling.max_new_tokens for r in engine.requests} == {2}
    assert {s.status for s in batch.samples} == {Status.TRUNCATED}


def test_custom_generate_functions_may_return_segments_and_are_validated():
    async def two_segments(ctx, sample, sampling):
        done = await single_turn(ctx, sample, sampling)
        from dataclasses import replace

        return [done, replace(done, segment=1, loss_mask=done.loss_mask.astype(np.int64))]

    async def run():
        rollout = SyncRollout(config(), FakeEngine(), FakePrompts(), Letters(), run_seed=0, generate=two_segments)
        await rollout.start(0)
        await rollout.collect(0)

    with pytest.raises(ValueError, match="loss_mask"):
        asyncio.run(run())


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(1, 4), max_size=5), budget=st.integers(1, 12), mask=st.booleans())
def test_a_partial_response_continues_to_the_same_tokens(cuts, budget, mask):
    """However often it is aborted, the response equals the one of a single call; budget and records add up."""
    cfg = config(max_new_tokens=budget, partial=True, mask_offpolicy_in_partial=mask)
    prompt = FakePrompts().next_groups(1)[0]

    async def run(pieces):
        pieces = list(pieces)
        finish = lambda r: ("abort", min(pieces.pop(0), r.sampling.max_new_tokens)) if pieces else ("length", r.sampling.max_new_tokens)  # fmt: skip  # noqa: E731
        engine = FakeEngine(finish=finish)
        ctx = GenerateContext(engine, cfg, 64, {"0-0": 5}, Letters())
        sample = pending_group(prompt, cfg)[0]
        while True:
            sample = await single_turn(ctx, sample, ctx.sampling())
            validate_sample(sample)
            if sample.status != Status.ABORTED:
                return sample
            engine.version += 1

    whole, pieced = asyncio.run(run([])), asyncio.run(run(cuts))
    assert pieced.tokens.tolist() == whole.tokens.tolist()
    assert pieced.status == Status.TRUNCATED
    assert pieced.version_spans[:, 1].sum() == budget
    versions = np.repeat(pieced.version_spans[:, 0], pieced.version_spans[:, 1])
    if mask:
        assert (pieced.loss_mask == (versions == versions[-1])).all()
    else:
        assert pieced.loss_mask.all()


def test_neighbouring_spans_of_one_version_merge():
    assert merge_spans(np.array([[1, 2], [1, 3], [2, 1], [1, 1]])).tolist() == [[1, 5], [2, 1], [1, 1]]


def test_a_sampling_mask_makes_the_support_log_probs_the_rollouts(engine_process):
    from miles.rollout.engine import EngineClient

    async def run():
        async with EngineClient(engine_process.url, token=engine_process.token) as client:
            rollout = SyncRollout(config(top_p=0.8), client, FakePrompts(), Letters(), run_seed=0)
            await rollout.start(0)
            return await rollout.collect(0)

    batch = asyncio.run(run())
    for sample in batch.samples:
        validate_sample(sample)
        rows = sample.sampling_mask
        rows.require_tokens(sample.tokens[sample.prompt_length :])
        singles = np.diff(rows.offsets) == 1
        assert (sample.rollout_log_probs[singles] == 0).all()


def group(*rewards, status=Status.COMPLETED):
    tokens = np.array([2, 3])
    return [
        Sample(f"s{i}", 0, i, tokens=tokens, prompt_length=1, reward=r, status=status) for i, r in enumerate(rewards)
    ]


def test_nonzero_std_uses_the_spread_in_float64():
    assert check_reward_nonzero_std(group(0.0, 1.0)).keep
    assert check_reward_nonzero_std(group(1e6, 1e6 + 1e-7)).keep
    assert not check_reward_nonzero_std(group(0.1 + 0.2, 0.3)).keep
    assert not check_reward_nonzero_std(group(1.0, None)).keep


@pytest.mark.parametrize("status", [Status.ABORTED, Status.FAILED, Status.ENV_ERROR])
def test_no_aborted_refuses_what_has_no_outcome_or_no_reward(status):
    assert check_no_aborted(group(0.0, 1.0)).keep
    assert not check_no_aborted(group(0.0) + group(0.0, status=status)).keep
    assert not check_no_aborted(group(0.0, None)).keep


def test_the_first_refusal_wins_and_a_kept_group_resets_the_guard():
    chain = FilterChain(
        FiltersConfig(chain=[{"kind": "check_no_aborted"}, {"kind": "reward_range", "lo": 0.5, "hi": 1.0}]),
        starvation_limit=3,
    )
    assert chain.judge(group(None, 0.0)).reason == "aborted"
    assert chain.judge(group(0.0, 0.0)).reason == "reward_below"
    assert chain.judge(group(1.0, 0.0)).keep
    assert chain.judge(group(0.0, 0.0)).reason == "reward_below"
    assert chain.take_counts() == {"aborted": 1, "reward_below": 2}
    assert chain.take_counts() == {}
    assert reward_range(0.0, 0.2)(group(1.0)).reason == "reward_above"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"group_size": 1, "filters": {"chain": [{"kind": "check_reward_nonzero_std"}]}}, "group_size"),
        ({"mask_offpolicy_in_partial": True}, r"rollout\.partial=true"),
        ({"top_k": 0}, "use -1"),
        ({"filters": {"chain": [{"kind": "reward_range", "lo": 2.0, "hi": 1.0}]}}, "swap them"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_configurations_without_meaning_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        RolloutConfig(**options)


@settings(max_examples=50)
@given(a=st.tuples(*[st.integers(0, 2**31)] * 3), b=st.tuples(*[st.integers(0, 2**31)] * 3))
def test_seeds_differ_by_run_group_and_sample_and_fit_63_bits(a, b):
    seeds = sampling_seeds(a[0], a[1], 8, attempt=a[2])
    assert len(set(seeds)) == 8
    assert all(0 <= s < 2**63 for s in seeds)
    assert seeds == sampling_seeds(a[0], a[1], 8, attempt=a[2])
    if a != b:
        assert not set(seeds) & set(sampling_seeds(b[0], b[1], 8, attempt=b[2]))


def test_a_partial_response_without_its_records_is_refused():
    sample = Sample("s", 0, 0, tokens=np.array([2, 3]), prompt_length=1)

    async def run():
        ctx = GenerateContext(FakeEngine(), config(), 64, {"s": 1}, Letters())
        return await single_turn(ctx, sample, ctx.sampling())

    with pytest.raises(RolloutError, match="no log-probs or version spans"):
        asyncio.run(run())
