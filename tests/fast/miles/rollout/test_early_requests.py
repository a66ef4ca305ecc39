"""Requests for a weight version that is still being trained: they wait in the engine and get exactly that version."""

from __future__ import annotations

import asyncio
import time

import pytest
from fake_engine import FakeEngine, FakePrompts, Letters

from miles.rollout.config import RolloutConfig
from miles.rollout.engines.embedded.fields import BadRequest
from miles.rollout.engines.embedded.generate_body import parse_generate
from miles.rollout.engines.embedded.requests import Refusal
from miles.rollout.generate import single_turn
from miles.rollout.sync_rollout import SyncRollout

PROMPTS = [[3, 5, 7, 9], [2, 4, 6]]


def params(count=2):
    return [{"max_new_tokens": 5, "sampling_seed": i, "ignore_eos": True} for i in range(count)]


def update(engine, version):
    token = engine.begin(version)
    engine.scheduler.flush_caches()
    engine.scheduler.finish_update(token)


def stays_pending(pending):
    time.sleep(0.1)
    return not pending.done


def test_a_request_waits_until_its_version_is_served(local_engine):
    engine = local_engine()
    early = engine.start(PROMPTS, params(), min_weight_version=2)
    now = engine.generate(PROMPTS, params())
    assert stays_pending(early)
    update(engine, 1)
    assert stays_pending(early)
    update(engine, 2)
    outputs = early.outputs()
    assert [o.spans for o in outputs] == [[(2, 5)], [(2, 5)]]
    assert [o.tokens for o in outputs] == [o.tokens for o in now]  # the weights did not change


def test_it_may_arrive_during_the_update_and_for_a_version_that_is_already_served(local_engine):
    engine = local_engine()
    token = engine.begin(1)
    early = engine.start(PROMPTS, params(), min_weight_version=1)
    assert isinstance(engine.start(PROMPTS, params()).results()[0], Refusal)  # as before: not early, not paused
    engine.scheduler.finish_update(token)
    assert [o.spans for o in early.outputs()] == [[(1, 5)], [(1, 5)]]
    assert engine.start(PROMPTS, params(), min_weight_version=1).outputs()[0].spans == [(1, 5)]


def test_pausing_with_abort_leaves_it_waiting_and_aborting_it_ends_it(local_engine):
    engine = local_engine()
    early = engine.start(PROMPTS, params(), min_weight_version=1, rid=["a", "b"])
    engine.scheduler.pause("abort").result(10)
    assert stays_pending(early)
    assert engine.scheduler.abort(lambda rid: rid == "a").result(10) == 1
    engine.scheduler.resume().result(10)
    update(engine, 1)
    assert [o.finish["type"] for o in early.outputs()] == ["abort", "length"]


def test_a_failed_update_refuses_it(local_engine):
    engine = local_engine()
    early = engine.start(PROMPTS, params(), min_weight_version=1)
    engine.scheduler.state.fail(engine.begin(1), "digest_mismatch", "bucket 0")
    engine.scheduler.refuse_all()
    results = early.results()
    assert [type(r) for r in results] == [Refusal, Refusal]
    assert results[0].kind == "weights_dirty"


def test_stopping_the_engine_settles_it(local_engine):
    engine = local_engine()
    early = engine.start(PROMPTS, params(), min_weight_version=1)
    engine.scheduler.stop()
    assert [o.finish["type"] for o in early.outputs()] == ["abort", "abort"]


@pytest.mark.parametrize("bad", [-1, "3", 1.5, True, 1 << 63])
def test_a_version_that_is_no_number_is_refused(local_engine, bad):
    body = {"input_ids": [3], "min_weight_version": bad}
    with pytest.raises(BadRequest, match="min_weight_version"):
        parse_generate(body, local_engine().limits)


def config(**options):
    return RolloutConfig(**{"batch_groups": 3, "group_size": 4, "max_new_tokens": 5, **options})


def essence(batch):
    return [(s.sample_id, s.tokens.tolist(), s.reward, s.version_spans.tolist()) for s in batch.samples]


def on_policy(engine, cfg, versions, *, early, skipped=(), generate=single_turn):
    """Steps at the given versions; `skipped`: steps that made no version after the next requests were sent."""

    async def run():
        rollout = SyncRollout(cfg, engine, FakePrompts(), Letters(), run_seed=7, generate=generate)
        batches = []
        await rollout.start(versions[0])
        try:
            for step, version in enumerate(versions):
                batches.append(await rollout.collect(step))
                if step + 1 == len(versions):
                    break
                if early:
                    asked = len(engine.requests)
                    await rollout.prefetch(version + 1)
                    await asyncio.sleep(0.001)
                    assert len(engine.requests) > asked
                if step in skipped:
                    await rollout.on_skipped_step()
                else:
                    await engine.serve(version + 1)
                    await rollout.on_new_version(version + 1)
        finally:
            await rollout.close()
        return batches

    return asyncio.run(run())


def test_asking_early_changes_no_sample():
    plain = on_policy(FakeEngine(), config(), [0, 1, 2], early=False)
    early = on_policy(FakeEngine(holds_requests=True), config(), [0, 1, 2], early=True)
    assert [essence(b) for b in early] == [essence(b) for b in plain]


def test_after_a_skipped_step_the_same_prompts_are_asked_of_the_version_that_stays():
    plain = on_policy(FakeEngine(), config(), [0, 0, 1], early=False, skipped={0})
    early = on_policy(FakeEngine(holds_requests=True), config(), [0, 0, 1], early=True, skipped={0})
    assert [essence(b) for b in early] == [essence(b) for b in plain]


def test_engines_and_generate_functions_that_cannot_wait_are_not_asked_early():
    async def own(ctx, sample, sampling):
        return await single_turn(ctx, sample, sampling)

    async def ask(engine, generate):
        prompts = FakePrompts()
        rollout = SyncRollout(config(), engine, prompts, Letters(), run_seed=7, generate=generate)
        await rollout.prefetch(1)
        await asyncio.sleep(0.01)
        await rollout.close()
        return prompts.next, len(engine.requests)

    assert asyncio.run(ask(FakeEngine(), single_turn)) == (0, 0)
    assert asyncio.run(ask(FakeEngine(holds_requests=True), own)) == (0, 0)
    assert asyncio.run(ask(FakeEngine(holds_requests=True), single_turn)) == (3, 12)


def test_a_checkpoint_holds_the_prompts_that_were_prefetched_but_not_collected():
    async def run():
        engine, prompts = FakeEngine(holds_requests=True), FakePrompts()
        rollout = SyncRollout(config(), engine, prompts, Letters(), run_seed=7)
        await rollout.start(0)
        await rollout.collect(0)
        await rollout.prefetch(1)
        state, drawn = rollout.state(), prompts.next
        await engine.serve(1)
        await rollout.on_new_version(1)
        second = await rollout.collect(1)
        after = rollout.state()
        await rollout.close()

        fresh = FakePrompts()
        resumed = SyncRollout(config(), FakeEngine(version=1), fresh, Letters(), run_seed=7)
        resumed.restore(state)
        await resumed.start(1)
        return state, drawn, after, essence(second), essence(await resumed.collect(1))

    state, drawn, after, second, again = asyncio.run(run())
    assert (state, drawn, after) == ({"prompts": {"next_index": 3}}, 6, {"prompts": {"next_index": 6}})
    assert again == second


def test_closing_takes_back_what_waits():
    async def run():
        engine = FakeEngine(holds_requests=True)
        rollout = SyncRollout(config(), engine, FakePrompts(), Letters(), run_seed=7)
        await rollout.prefetch(1)
        await asyncio.sleep(0.01)
        assert len(engine.requests) == 12
        await rollout.close()
        return [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    assert asyncio.run(run()) == []
