"""The two moves of an answer in several turns: the policy writes, and something else answers.

    sample = await written(ctx, sample, sampling, stop_token_ids=...)   # trained
    sample = told(sample, ctx.tokenizer.encode("..."))                  # read, never trained

Both return a new sample whose tokens begin with the old one's: nothing is decoded and encoded again, so that training
sees what the engine saw. `rollout.max_new_tokens` bounds all tokens after the prompt, those that were told included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from miles.data.sample import Sample, Status
from miles.data.sampling_mask import RolloutSamplingMask
from miles.rollout.engine import SamplingParams
from miles.rollout.generate import GenerateContext, merge_spans, single_turn

# Tokens that no weight version made.
OBSERVED = -1


async def written(
    ctx: GenerateContext, sample: Sample, sampling: SamplingParams, *, stop_token_ids: Sequence[int] = ()
) -> Sample:
    """`sample` and what the policy writes next, until an end token, one of `stop_token_ids` or the end of the budget.

    The status is `completed` after a token that stops, `truncated` at the end of the budget, `aborted` when the engine
    was interrupted: then the sample is to be returned as it is.
    """
    stops = (*sampling.stop_token_ids, *(token for token in stop_token_ids if token not in sampling.stop_token_ids))
    return await single_turn(ctx, sample, replace(sampling, stop_token_ids=tuple(map(int, stops))))


def told(sample: Sample, tokens: np.ndarray) -> Sample:
    """`sample` and `tokens` (int64 [n], n >= 1) that something else than the policy wrote: no loss, version -1.

    `ValueError` for tokens of another type or shape, none at all, and a sample whose response has no log-probs.
    """
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int64 or tokens.ndim != 1 or not len(tokens):
        shown = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else type(tokens).__name__
        raise ValueError(
            f"sample {sample.sample_id}: told tokens are {shown}, expected a numpy int64 array [n], n >= 1"
        )
    count, before = len(tokens), sample.response_length
    if before and (sample.rollout_log_probs is None or sample.version_spans is None or sample.loss_mask is None):
        raise ValueError(
            f"sample {sample.sample_id}: its response has no log-probs or version spans; use written() first"
        )
    log_probs = sample.rollout_log_probs if before else np.empty(0, np.float32)
    spans = sample.version_spans if before else np.empty((0, 2), np.int64)
    mask = sample.loss_mask if before else np.empty(0, np.uint8)
    support = sample.sampling_mask
    if support is not None:
        support = RolloutSamplingMask.concatenate(
            [support, RolloutSamplingMask.singletons(tokens, vocab_size=support.vocab_size)]
        )
    assert log_probs is not None
    assert spans is not None
    assert mask is not None
    return replace(
        sample,
        tokens=np.concatenate((sample.tokens, tokens)),
        loss_mask=np.concatenate((mask, np.zeros(count, np.uint8))),
        rollout_log_probs=np.concatenate((log_probs, np.zeros(count, np.float32))),
        version_spans=merge_spans(np.concatenate((spans, np.array([[OBSERVED, count]], np.int64)))),
        sampling_mask=support,
        status=Status.PENDING,
    )
