"""Pause, retract, abort, weight versions and failures inside the engine, without HTTP."""

from __future__ import annotations

import time

import pytest
import torch

from miles.rollout.engines.embedded.requests import Output, Refusal
from miles.rollout.engines.embedded.weight_state import IllegalTransition, WeightUpdateError
from miles_ci.declare import register_cpu_ci

register_cpu_ci(20, "stage-a-cpu", nightly=True)

PROMPTS = [[3, 5, 7, 9], [2, 4, 6], [8] * 20, [3, 5, 7, 9]]


def params(n=300, count=4):
    return [{"max_new_tokens": n, "sampling_seed": i, "ignore_eos": True} for i in range(count)]


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.001)


def freeze(engine, mode, n=300):
    """Start PROMPTS and pause while they run."""
    pending = engine.start(PROMPTS, params(n))
    wait_until(lambda: engine.batch.tokens_generated > 20)
    engine.scheduler.pause(mode).result(10)
    assert not pending.done
    return pending


def plain(outputs):
    return [(o.tokens, o.log_probs) for o in outputs]


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


def scale_weights(engine, factor):
    with torch.inference_mode():
        for name, tensor in engine.scheduler.parameters().items():
            if name.endswith("proj.weight"):
                tensor.mul_(factor)


def update(engine, version, factor, run_id="run"):
    token = engine.begin(version, run_id=run_id)
    scale_weights(engine, factor)
    engine.scheduler.flush_caches()
    engine.scheduler.finish_update(token)


def test_prefixes_of_an_older_version_are_never_reused(local_engine):
    engine, fresh = local_engine(), local_engine(share_prefixes=False)
    prompt = [[5, 6, 7, 8] * 10]
    engine.generate(prompt, params(4, 1))
    assert engine.generate(prompt, params(4, 1))[0].cached_tokens == 32
    update(engine, 1, 1.5)
    update(fresh, 1, 1.5)
    assert engine.scheduler.cached_prefix_tokens() == 0
    after = engine.generate(prompt, params(4, 1))[0]
    assert after.cached_tokens == 0
    assert after.spans == [(1, 4)]
    assert plain([after]) == plain(fresh.generate(prompt, params(4, 1)))


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_response_over_two_versions_says_which_tokens_are_whose(local_engine, expected, mode):
    engine = local_engine()
    pending = freeze(engine, mode)
    update(engine, 3, 1.5)
    engine.scheduler.resume().result(10)
    for output, (tokens, _) in zip(pending.outputs(), expected, strict=True):
        (old, before), (new, after) = output.spans
        assert (old, new) == (0, 3)
        assert before + after == len(output.tokens) == 300
        assert output.tokens[:before] == tokens[:before]


def test_no_forward_pass_runs_during_an_update(local_engine):
    engine = local_engine()
    pending = engine.start(PROMPTS, params())
    wait_until(lambda: engine.batch.tokens_generated > 20)
    token = engine.begin(1)
    count = engine.batch.tokens_generated
    time.sleep(0.1)
    assert engine.batch.tokens_generated == count
    engine.scheduler.finish_update(token)
    assert all(sum(n for _, n in o.spans) == 300 for o in pending.outputs())


def test_a_request_during_an_unpaused_update_is_refused(local_engine):
    engine = local_engine()
    engine.begin(1)
    (refusal,) = engine.start(PROMPTS[:1], params(2, 1)).results()
    assert (refusal.status, refusal.kind) == (503, "weights_updating")


def test_a_dirty_engine_refuses_everything_until_a_whole_update(local_engine):
    engine = local_engine()
    pending = freeze(engine, "in_place")
    token = engine.begin(1)
    waiting = engine.start(PROMPTS[:1], params(2, 1))
    assert not waiting.done, "a request that arrives while paused waits"
    engine.scheduler.state.fail(token, "digest_mismatch", "bucket 3")
    engine.scheduler.refuse_all()
    for result in pending.results() + waiting.results():
        assert isinstance(result, Refusal)
        assert (result.status, result.kind) == (503, "weights_dirty")
        assert "bucket 3" in result.message
    engine.scheduler.resume().result(10)
    assert engine.start(PROMPTS[:1], params(2, 1)).results()[0].kind == "weights_dirty"
    assert engine.scheduler.weight_version == 0
    update(engine, 2, 1.0)
    assert engine.generate(PROMPTS[:1], params(2, 1))[0].spans == [(2, 2)]


def test_non_finite_weights_fail_their_requests_and_spoil_nothing_later(local_engine):
    engine = local_engine()
    good = plain(engine.generate(PROMPTS, params(20)))
    weight = engine.scheduler.parameters()["model.layers.0.self_attn.v_proj.weight"]
    kept = weight.clone()
    token = engine.begin(1)
    weight.fill_(float("nan"))
    engine.scheduler.finish_update(token)
    for result in engine.start(PROMPTS, params(20)).results():
        assert (result.status, result.kind) == (500, "nonfinite_logits")
    token = engine.begin(2)
    weight.copy_(kept)
    engine.scheduler.finish_update(token)
    assert plain(engine.generate(PROMPTS, params(20))) == good


def test_weights_released_from_memory_make_the_engine_dirty(local_engine):
    engine = local_engine()
    copies = {name: tensor.clone() for name, tensor in engine.scheduler.parameters().items()}
    before = plain(engine.generate(PROMPTS, params(6)))
    assert engine.scheduler.release_memory(["weights", "kv_cache"]).result(10)
    engine.scheduler.resume_memory(["weights", "kv_cache"]).result(10)
    assert engine.start(PROMPTS[:1], params(2, 1)).results()[0].kind == "weights_dirty"
    token = engine.begin(1)
    for name, tensor in engine.scheduler.parameters().items():
        tensor.copy_(copies[name])
    engine.scheduler.finish_update(token)
    assert plain(engine.generate(PROMPTS, params(6))) == before


def test_a_failure_while_computing_refuses_with_its_text(local_engine, monkeypatch):
    engine = local_engine()
    monkeypatch.setattr(engine.model, "logits", lambda hidden: 1 / 0)
    (result,) = engine.start(PROMPTS[:1], params(2, 1)).results()
    assert (result.status, result.kind) == (500, "engine_failed")
    assert "ZeroDivisionError" in result.message
    assert engine.start(PROMPTS[:1], params(2, 1)).results()[0].kind == "engine_failed"


def half_prefilled(engine, prompt, n, **body):
    """A request whose prompt is computed in part when the engine pauses in place."""
    engine.scheduler.pause("in_place").result(10)
    pending = engine.start([prompt], params(n, 1), **body)
    engine.scheduler._call(lambda: engine.batch.queue.admit(engine.batch.generation)).result(10)
    engine.scheduler._call(engine.batch._prefill).result(10)
    (entry,) = engine.batch.queue.prefills
    assert 0 < entry.done < len(prompt)
    return pending


def test_a_prompt_that_was_half_computed_starts_over_after_an_update(local_engine):
    engine, fresh = local_engine(max_prefill_tokens=16), local_engine()
    prompt = [5, 6, 7, 8] * 10
    pending = half_prefilled(engine, prompt, 8)
    update(engine, 1, 1.5)
    update(fresh, 1, 1.5)
    engine.scheduler.resume().result(10)
    (output,) = pending.outputs()
    assert output.spans == [(1, 8)]
    assert plain([output]) == plain(fresh.generate([prompt], params(8, 1)))
    assert engine.batch.pool.available == engine.batch.pool.count - 1


def test_a_response_that_goes_on_in_place_says_which_version_computed_its_context(local_engine):
    engine = local_engine()
    pending = freeze(engine, "in_place")
    update(engine, 3, 1.5)
    engine.scheduler.resume().result(10)
    for prompt, output in zip(PROMPTS, pending.outputs(), strict=True):
        (_, drawn), _ = output.spans
        # The last token drawn by the old weights is the first one that the new weights compute.
        assert output.kv_spans == [(0, len(prompt) + drawn - 1), (3, 300 - drawn)]


def test_a_retracted_response_is_computed_again_by_one_version(local_engine):
    engine = local_engine()
    pending = freeze(engine, "retract")
    update(engine, 3, 1.5)
    engine.scheduler.resume().result(10)
    assert all(output.kv_spans == [] for output in pending.outputs())


@pytest.mark.parametrize("run_id", ["run", "another run"])
def test_what_older_weights_computed_in_place_is_never_reused(local_engine, run_id):
    """Also when the next run uses the same version number again."""
    engine, fresh = local_engine(), local_engine(share_prefixes=False)
    update(engine, 1, 1.0)
    engine.scheduler.pause("in_place").result(10)
    prompt = [5, 6, 7, 8] * 4
    pending = engine.start([prompt], params(60, 1))
    engine.scheduler.resume().result(10)
    wait_until(lambda: engine.batch.tokens_generated > 5)
    engine.scheduler.pause("in_place").result(10)
    assert not pending.done
    version = 2 if run_id == "run" else 1
    update(engine, version, 1.5, run_id=run_id)
    engine.scheduler.resume().result(10)
    (output,) = pending.outputs()
    update(fresh, version, 1.5, run_id=run_id)
    again = [prompt + output.tokens]
    after = engine.generate(again, params(4, 1))
    assert after[0].cached_tokens == 0
    assert plain(after) == plain(fresh.generate(again, params(4, 1)))


def test_the_last_drawn_token_is_not_cached_and_its_page_is_not_shared(local_engine):
    """8 + 8 tokens fill a page but for the keys and values of the last one, which was never computed."""
    engine, fresh = local_engine(), local_engine(share_prefixes=False)
    prompt = [5, 6, 7, 8] * 2
    (output,) = engine.generate([prompt], params(8, 1))
    again = [prompt + output.tokens + [3]]
    after = engine.generate(again, params(4, 1))
    assert after[0].cached_tokens == 0
    assert plain(after) == plain(fresh.generate(again, params(4, 1)))
    (longer,) = engine.generate([[9, 6, 7, 8] * 2], params(9, 1))
    assert engine.generate([[9, 6, 7, 8] * 2 + longer.tokens], params(4, 1))[0].cached_tokens == 16


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


@pytest.mark.parametrize("tags", [["weights"], ["kv_cache"], ["weights", "kv_cache"]])
def test_memory_is_neither_released_nor_resumed_during_an_update(local_engine, tags):
    engine = local_engine()
    before = plain(engine.generate(PROMPTS, params(6)))
    token = engine.begin(1)
    for call in (engine.scheduler.release_memory, engine.scheduler.resume_memory):
        with pytest.raises(IllegalTransition, match=r"possible now: finish, fail, read_weights"):
            call(tags).result(10)
    engine.scheduler.finish_update(token)
    assert plain(engine.generate(PROMPTS, params(6))) == before


def test_an_update_cannot_begin_while_the_weights_are_released(local_engine):
    engine = local_engine()
    assert engine.scheduler.release_memory(["weights"]).result(10)
    with pytest.raises(IllegalTransition, match="begin is not possible while the weights are released"):
        engine.begin(1)
    assert engine.start(PROMPTS[:1], params(2, 1)).results()[0].kind == "weights_released"


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
