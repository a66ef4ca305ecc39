"""Answers in several turns: what the policy wrote and what it was told, token by token."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from fake_engine import FakeEngine, FakePrompts, Letters

from miles.data.sample import Sample, Status, validate_sample
from miles.data.sampling_mask import RolloutSamplingMask
from miles.rollout.config import RolloutConfig
from miles.rollout.engine import GenerateRequest
from miles.rollout.generate import GenerateContext, group_seeds, pending_group
from miles.rollout.turns import OBSERVED, told, written

CONFIG = RolloutConfig(batch_groups=1, group_size=2, max_new_tokens=9)


def context(engine: FakeEngine, **changes) -> tuple[GenerateContext, Sample]:
    (prompt,) = FakePrompts().next_groups(1)
    sample = pending_group(prompt, CONFIG)[0]
    given = {"max_context": 64, "seeds": group_seeds(prompt, CONFIG, run_seed=3), "tokenizer": Letters(), **changes}
    return GenerateContext(engine, CONFIG, **given), sample


def two_turns(engine: FakeEngine, observed: np.ndarray, **changes) -> Sample:
    async def run() -> Sample:
        ctx, sample = context(engine, **changes)
        first = await written(ctx, sample, ctx.sampling(), stop_token_ids=[5])
        return await written(ctx, told(first, observed), ctx.sampling())

    return asyncio.run(run())


def test_written_and_told_tokens_keep_their_places_losses_and_versions():
    engine = FakeEngine(version=4)
    observed = np.array([7, 8], np.int64)
    sample = validate_sample(two_turns(engine, observed, min_weight_version=4))
    assert sample.tokens[sample.prompt_length :][3:5].tolist() == [7, 8]
    assert sample.loss_mask.tolist() == [1, 1, 1, 0, 0, 1, 1, 1]
    assert sample.rollout_log_probs.tolist() == [-1, -1, -1, 0, 0, -1, -1, -1]
    assert sample.version_spans.tolist() == [[4, 3], [OBSERVED, 2], [4, 3]]
    assert sample.status == Status.COMPLETED
    first, second = engine.requests
    assert (first.sampling.stop_token_ids, second.sampling.stop_token_ids) == ((5,), ())
    assert (first.sampling.max_new_tokens, second.sampling.max_new_tokens) == (9, 4)
    assert first.min_weight_version == second.min_weight_version == 4
    # The second request is the first one's tokens, its answer and what was told, never text.
    assert second.input_ids.tolist() == [*sample.tokens[:6], 7, 8]


def test_a_stop_token_is_asked_for_once():
    async def run() -> GenerateRequest:
        engine = FakeEngine()
        ctx, sample = context(engine)
        await written(ctx, sample, replace(ctx.sampling(), stop_token_ids=(5,)), stop_token_ids=[5, 6])
        return engine.requests[0]

    assert asyncio.run(run()).sampling.stop_token_ids == (5, 6)


@pytest.mark.parametrize("limit", [{"observed": 6}, {"observed": 3, "max_context": 9}])
def test_what_was_told_uses_up_the_budget_and_no_request_follows(limit):
    engine = FakeEngine()
    sample = two_turns(engine, np.full(limit.pop("observed"), 7, np.int64), **limit)
    assert sample.status == Status.TRUNCATED
    assert len(engine.requests) == 1
    validate_sample(sample)


def test_told_before_anything_was_written():
    _, sample = context(FakeEngine())
    sample = told(sample, np.array([7, 8, 9], np.int64))
    assert (sample.status, sample.loss_mask.tolist()) == (Status.PENDING, [0, 0, 0])
    assert sample.version_spans.tolist() == [[OBSERVED, 3]]
    again = told(sample, np.array([7], np.int64))
    assert again.version_spans.tolist() == [[OBSERVED, 4]]
    assert (sample.response_length, again.response_length) == (3, 4)


def test_what_was_told_is_all_that_its_row_of_the_support_allows():
    _, sample = context(FakeEngine())
    support = RolloutSamplingMask.from_rows([[5, 6], [7]], vocab_size=16)
    done = replace(
        sample,
        tokens=np.concatenate((sample.tokens, np.array([5, 7], np.int64))),
        loss_mask=np.ones(2, np.uint8),
        rollout_log_probs=np.zeros(2, np.float32),
        version_spans=np.array([[0, 2]], np.int64),
        sampling_mask=support,
        status=Status.COMPLETED,
    )
    mask = validate_sample(told(done, np.array([9, 11], np.int64))).sampling_mask
    assert [mask.row(index).tolist() for index in range(4)] == [[5, 6], [7], [9], [11]]


@pytest.mark.parametrize(
    "tokens", [[7], np.array([7], np.int32), np.array([[7]], np.int64), np.empty(0, np.int64), np.array([7.0])]
)
def test_tokens_of_another_form_are_refused(tokens):
    _, sample = context(FakeEngine())
    with pytest.raises(ValueError, match=r"told tokens are .*expected a numpy int64 array \[n\], n >= 1"):
        told(sample, tokens)


def test_a_response_without_records_is_refused():
    _, sample = context(FakeEngine())
    bare = replace(sample, tokens=np.append(sample.tokens, 5), loss_mask=np.ones(1, np.uint8))
    with pytest.raises(ValueError, match="no log-probs or version spans; use written"):
        told(bare, np.array([7], np.int64))
