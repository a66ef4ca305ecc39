"""Weight versions, updates in place and released memory inside the engine, without HTTP."""

from __future__ import annotations

import time

import pytest
from scheduled import PROMPTS, freeze, half_prefilled, params, plain, update, wait_until

from miles.rollout.engines.embedded.requests import Refusal
from miles.rollout.engines.embedded.weight_state import IllegalTransition
from miles_ci.declare import register_cpu_ci

register_cpu_ci(20, "stage-a-cpu", nightly=True)


@pytest.fixture
def expected(local_engine):
    return plain(local_engine().generate(PROMPTS, params()))


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


@pytest.mark.parametrize("first", ["in_place", "retract"])
def test_a_retracted_response_is_computed_again_by_one_version(local_engine, first):
    engine = local_engine()
    pending = freeze(engine, first)
    update(engine, 3, 1.5)
    engine.scheduler.pause("retract").result(10)
    engine.scheduler.resume().result(10)
    for output in pending.outputs():
        assert output.kv_spans == []
        assert [version for version, _ in output.spans] == [0, 3]


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


def test_a_cache_that_is_refused_during_an_update_is_not_there_afterwards(local_engine):
    engine = local_engine()
    assert engine.scheduler.release_memory(["kv_cache"]).result(10)
    token = engine.begin(1)
    with pytest.raises(IllegalTransition):
        engine.scheduler.resume_memory(["kv_cache"]).result(10)
    engine.scheduler.finish_update(token)
    pending = engine.start(PROMPTS[:1], params(2, 1))
    time.sleep(0.05)
    assert (pending.done, engine.scheduler.state.get().cache_held) == (False, False)
    engine.scheduler.resume_memory(["kv_cache"]).result(10)
    assert pending.outputs()[0].spans == [(1, 2)]


def test_an_update_cannot_begin_while_the_weights_are_released(local_engine):
    engine = local_engine()
    assert engine.scheduler.release_memory(["weights"]).result(10)
    with pytest.raises(IllegalTransition, match="begin is not possible while the weights are released"):
        engine.begin(1)
    assert engine.start(PROMPTS[:1], params(2, 1)).results()[0].kind == "weights_released"
