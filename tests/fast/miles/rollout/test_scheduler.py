"""Pause, retract, abort, order and failures inside the engine, without HTTP."""

from __future__ import annotations

import time

import pytest
from scheduled import PROMPTS, freeze, params, plain, wait_until

from miles.rollout.engines.embedded.requests import Output
from miles.rollout.engines.embedded.weight_state import WeightUpdateError
from miles_ci.declare import register_cpu_ci

register_cpu_ci(20, "stage-a-cpu", nightly=True)


@pytest.fixture
def expected(local_engine):
    return plain(local_engine().generate(PROMPTS, params()))


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_no_token_and_no_log_prob(local_engine, expected, mode):
    engine = local_engine()
    pending = freeze(engine, mode)
    assert (engine.batch.running == 0) == (mode == "retract")
    engine.scheduler.resume().result(10)
    assert plain(pending.outputs()) == expected


def test_retract_gives_all_pages_back(local_engine):
    engine = local_engine(share_prefixes=False)
    free = engine.batch.pool.available
    pending = freeze(engine, "retract")
    assert engine.batch.pool.available == free
    engine.scheduler.resume().result(10)
    pending.outputs()
    assert engine.batch.pool.available == free
    assert sorted(engine.batch.slots.free) == list(range(engine.batch.slots.capacity))


def test_a_second_pause_with_abort_leaves_what_arrived_meanwhile_waiting(local_engine):
    engine = local_engine()
    engine.scheduler.pause("abort").result(10)
    pending = engine.start(PROMPTS[:1], params(4, 1))
    engine.scheduler.pause("abort").result(10)
    assert not pending.done
    engine.scheduler.resume().result(10)
    assert len(pending.outputs()[0].tokens) == 4


def test_abort_by_prefix_ends_those_and_leaves_the_others_unchanged(local_engine, expected):
    engine = local_engine()
    pending = engine.start(PROMPTS, params(), rid=["a0", "b0", "a1", "b1"])
    wait_until(lambda: engine.batch.tokens_generated > 20)
    assert engine.scheduler.abort(lambda rid: rid.startswith("a")).result(10) == 2
    outputs = pending.outputs()
    assert [o.finish["type"] for o in outputs] == ["abort", "length", "abort", "length"]
    for index in (1, 3):
        assert (outputs[index].tokens, outputs[index].log_probs) == expected[index]
    for index in (0, 2):
        n = len(outputs[index].tokens)
        assert outputs[index].tokens == expected[index][0][:n]


def test_aborting_the_first_of_identical_prompts_does_not_lose_the_others(local_engine):
    engine = local_engine(max_prefill_tokens=16)
    engine.scheduler.pause("in_place").result(10)
    pending = engine.start([[4] * 40] * 3, params(5, 3), rid=["x", "y", "z"])
    engine.scheduler._call(lambda: engine.batch.queue.admit(engine.batch.generation)).result(10)
    engine.scheduler._call(engine.batch._prefill).result(10)  # the leader is half computed
    assert engine.scheduler.abort(lambda rid: rid == "x").result(10) == 1
    engine.scheduler.resume().result(10)
    assert [len(o.tokens) for o in pending.outputs()] == [0, 5, 5]


def test_a_failure_while_computing_refuses_with_its_text(local_engine, monkeypatch):
    engine = local_engine()
    monkeypatch.setattr(engine.model, "logits", lambda hidden: 1 / 0)
    (result,) = engine.start(PROMPTS[:1], params(2, 1)).results()
    assert (result.status, result.kind) == (500, "engine_failed")
    assert "ZeroDivisionError" in result.message
    assert engine.start(PROMPTS[:1], params(2, 1)).results()[0].kind == "engine_failed"


def test_a_users_pause_outlives_an_update_and_an_updates_pause_outlives_a_users_continue(local_engine):
    engine = local_engine()
    engine.scheduler.pause("retract", "update").result(10)
    engine.scheduler.pause("retract").result(10)
    pending = engine.start(PROMPTS[:1], params(4, 1))
    engine.scheduler.resume().result(10)
    assert engine.scheduler.pauses == {"update": "retract"}
    engine.scheduler.pause("in_place").result(10)
    engine.scheduler.resume("update").result(10)
    assert engine.scheduler.pauses == {"user": "in_place"}
    time.sleep(0.05)
    assert not pending.done
    engine.scheduler.resume().result(10)
    assert len(pending.outputs()[0].tokens) == 4


def test_owners_of_pauses_are_bounded(local_engine):
    engine = local_engine()
    for number in range(64):
        engine.scheduler.pause("in_place", f"owner {number}").result(10)
    with pytest.raises(WeightUpdateError, match="64 owners"):
        engine.scheduler.pause("in_place", "one more").result(10)
    engine.scheduler.pause("in_place", "owner 3").result(10)


@pytest.mark.parametrize("at", ["start", "fill"])
def test_a_request_that_cannot_be_started_is_refused_and_the_others_are_served(local_engine, expected, monkeypatch, at):
    engine = local_engine(share_prefixes=False)
    free = engine.batch.pool.available
    if at == "fill":
        fill = engine.batch.slots.fill

        def faulty(slots, generation):
            if any(engine.batch.slots.request[slot].rid == "bad" for slot in slots):
                raise OverflowError("out of bounds for int64")
            fill(slots, generation)

        monkeypatch.setattr(engine.batch.slots, "fill", faulty)
    engine.scheduler.pause("in_place").result(10)
    pending = engine.start(PROMPTS, params(), rid=["a", "b", "c", "d"])
    # Same content as the first: it leads or follows when identical prompts are computed once.
    bad = engine.start([PROMPTS[0]], params(300, 1), rid="bad")
    first = engine.start([[9] * 8] * 2, params(5, 2), rid=["bad", "follower"])
    if at == "start":
        for each in (bad.job.requests[0], first.job.requests[0]):
            each.input_ids = None
    engine.scheduler.resume().result(10)
    (refusal,) = bad.results()
    assert (refusal.status, refusal.kind) == (500, "request_failed")
    leader, follower = first.results()
    assert leader.kind == "request_failed"
    assert len(follower.tokens) == 5
    assert plain(pending.outputs()) == expected
    assert engine.batch.pool.available == free
    assert sorted(engine.batch.slots.free) == list(range(engine.batch.slots.capacity))


def test_a_command_that_fails_does_not_end_the_engine(local_engine):
    engine = local_engine()
    engine.scheduler._post(lambda: 1 / 0)
    assert len(engine.generate(PROMPTS, params(3))) == 4


def test_more_requests_than_slots_or_pages_are_served_in_order_of_arrival(local_engine):
    engine = local_engine(max_running=2, max_total_tokens=64)
    prompts = [[i % 14 + 2] * 10 for i in range(9)]
    outputs = engine.generate(prompts, params(20, 9))
    assert all(isinstance(o, Output) and len(o.tokens) == 20 for o in outputs)


def test_a_request_that_can_never_fit_is_refused_at_once(local_engine):
    from miles.rollout.engines.embedded.fields import BadRequest

    with pytest.raises(BadRequest, match="max_total_tokens"):
        local_engine(max_total_tokens=32).start([[2] * 20], params(20, 1))


def test_stopping_settles_what_is_left(local_engine):
    engine = local_engine()
    pending = freeze(engine, "in_place")
    engine.close()
    assert {o.finish["type"] for o in pending.outputs()} == {"abort"}
