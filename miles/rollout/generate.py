"""From a pending `Sample` to a finished one: what asks the engine. Rewards come later.

`GenerateFn(ctx, sample, sampling) -> Sample | list[Sample]` is the seam for multi-turn and agent rollouts, and
`rollout.generate` of a recipe names one; `miles.rollout.turns` has the two moves it is made of. A function
may carry a `group` attribute, `(ctx, samples, sampling) -> list[Sample]`, that does a whole group in one await, and
`waits_for_version = True` when it passes `ctx.min_weight_version` on, so that its requests may be sent early.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from miles.data.prompts import Prompt
from miles.data.sample import Sample, Status
from miles.data.sampling_mask import RolloutSamplingMask
from miles.rollout.config import RolloutConfig
from miles.rollout.engine import Engine, GenerateRequest, GenerateResult, SamplingParams
from miles.rollout.errors import RolloutError
from miles.rollout.seeds import sampling_seeds

# Below this budget all sequences end about together, so that one HTTP call for all groups costs no waiting.
SHORT_RESPONSE = 64

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


class TextCodec(Protocol):
    """What a rollout needs of a tokenizer."""

    def encode(self, text: str) -> np.ndarray: ...
    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...
    def decode_batch(self, rows: Sequence[Any]) -> list[str]: ...


@dataclass(frozen=True)
class GenerateContext:
    """What a generate function may use. `max_context` bounds prompt plus response."""

    client: Engine
    config: RolloutConfig
    max_context: int
    seeds: dict[str, int]  # sample_id -> sampling seed
    tokenizer: TextCodec
    min_weight_version: int = 0  # to be passed on with every request

    def sampling(self) -> SamplingParams:
        c = self.config
        return SamplingParams(
            max_new_tokens=c.max_new_tokens,
            temperature=c.temperature,
            top_p=c.top_p,
            top_k=c.top_k,
            min_p=c.min_p,
            stop_token_ids=tuple(c.stop_token_ids),
            ignore_eos=c.ignore_eos,
        )


GenerateFn = Callable[[GenerateContext, Sample, SamplingParams], Awaitable[Sample | list[Sample]]]


def pending_group(prompt: Prompt, config: RolloutConfig) -> list[Sample]:
    """The samples of one prompt before generation; `group_id` is the prompt's id."""
    base = prompt.prompt_id * config.group_size
    tokens = np.ascontiguousarray(prompt.input_ids, dtype=np.int64)
    samples = []
    for index in range(config.group_size):
        samples.append(
            Sample(
                sample_id=f"{prompt.prompt_id}-{index}",
                group_id=prompt.prompt_id,
                rollout_id=base + index,
                tokens=tokens,
                prompt_length=len(tokens),
                metadata=prompt.metadata,
            )
        )
    return samples


def group_seeds(prompt: Prompt, config: RolloutConfig, *, run_seed: int, attempt: int = 0) -> dict[str, int]:
    seeds = sampling_seeds(run_seed, prompt.prompt_id, config.group_size, attempt=attempt)
    return {f"{prompt.prompt_id}-{index}": seed for index, seed in enumerate(seeds)}


async def single_turn(ctx: GenerateContext, sample: Sample, sampling: SamplingParams) -> Sample:
    """One request. A partial response (from an aborted call) is continued with the rest of its budget."""
    return (await single_turn_group(ctx, [sample], sampling))[0]


async def single_turn_group(ctx: GenerateContext, samples: Sequence[Sample], sampling: SamplingParams) -> list[Sample]:
    """`single_turn` for samples that start together, in one await."""
    finished: list[Sample | None] = []
    requests: list[GenerateRequest] = []
    short = sampling.max_new_tokens <= SHORT_RESPONSE
    budgets: dict[int, SamplingParams] = {sampling.max_new_tokens: sampling}
    for sample in samples:
        # The budget is counted from the prompt: what a partial response used is gone.
        budget = sampling.max_new_tokens - sample.response_length
        budget = min(budget, ctx.max_context - sample.total_length)
        if budget <= 0:
            finished.append(replace(sample, status=Status.TRUNCATED, rollout_log_probs=_no_log_probs(sample)))
            continue
        if budget not in budgets:
            budgets[budget] = replace(sampling, max_new_tokens=budget)
        finished.append(None)
        requests.append(
            GenerateRequest(
                input_ids=sample.tokens,
                sampling=budgets[budget],
                seed=ctx.seeds[sample.sample_id],
                rid=sample.sample_id,
                return_sampling_mask=ctx.config.needs_sampling_mask,
                batch_key=0 if short else sample.group_id + 1,
                min_weight_version=ctx.min_weight_version,
            )
        )
    results = await ctx.client.generate_many(requests) if requests else []
    asked = [sample for done, sample in zip(finished, samples, strict=True) if done is None]
    if all(sample.response_length == 0 for sample in asked):
        answered = iter(_answered(asked, results))
    else:
        mask_earlier = ctx.config.mask_offpolicy_in_partial
        answered = (extended(s, r, mask_earlier=mask_earlier) for s, r in zip(asked, results, strict=True))
    return [done if done is not None else next(answered) for done in finished]


single_turn.group = single_turn_group  # type: ignore[attr-defined]
single_turn.waits_for_version = True  # type: ignore[attr-defined]


def _no_log_probs(sample: Sample) -> np.ndarray:
    if sample.rollout_log_probs is not None:
        return sample.rollout_log_probs
    return np.zeros(sample.response_length, dtype=np.float32)


def _answered(samples: Sequence[Sample], results: Sequence[GenerateResult]) -> list[Sample]:
    """`extended` for samples without a response yet; their arrays are slices of one array for all."""
    pieces: list[np.ndarray] = []
    for sample, result in zip(samples, results, strict=True):
        pieces += (sample.tokens, result.tokens)
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
    masks = np.ones(len(tokens), dtype=np.uint8)
    finished, start = [], 0
    for sample, result in zip(samples, results, strict=True):
        first = start + sample.prompt_length
        end = first + len(result.tokens)
        finished.append(
            Sample(
                sample_id=sample.sample_id,
                group_id=sample.group_id,
                rollout_id=sample.rollout_id,
                segment=sample.segment,
                tokens=tokens[start:end],
                prompt_length=sample.prompt_length,
                loss_mask=masks[first:end],
                rollout_log_probs=result.support_log_probs if result.sampling_mask is not None else result.log_probs,
                version_spans=result.version_spans,
                sampling_mask=result.sampling_mask,
                status=_STATUS[result.finish_reason],
                metadata=sample.metadata,
                prefix_cache={"prompt_tokens": result.prompt_tokens, "cached_tokens": result.cached_tokens},
            )
        )
        start = end
    return finished


def extended(sample: Sample, result: GenerateResult, *, mask_earlier: bool = False) -> Sample:
    """The sample with the result's tokens appended. `mask_earlier`: tokens of other versions lose their loss."""
    log_probs = result.support_log_probs if result.sampling_mask is not None else result.log_probs
    n = len(result.tokens)
    fresh = sample.response_length == 0
    mask = np.ones(n, dtype=np.uint8)
    spans = result.version_spans
    support = result.sampling_mask
    if not fresh:
        if sample.rollout_log_probs is None or sample.version_spans is None or sample.loss_mask is None:
            raise RolloutError(f"sample {sample.sample_id}: a partial response has no log-probs or version spans")
        earlier = sample.loss_mask
        if mask_earlier and n:
            versions = np.repeat(sample.version_spans[:, 0], sample.version_spans[:, 1])
            earlier = np.where(versions == result.weight_version, earlier, 0).astype(np.uint8)
        mask = np.concatenate((earlier, mask))
        log_probs = np.concatenate((sample.rollout_log_probs, log_probs))
        spans = merge_spans(np.concatenate((sample.version_spans, spans)))
        if support is not None:
            if sample.sampling_mask is None:
                raise RolloutError(f"sample {sample.sample_id}: a partial response has no sampling mask")
            support = RolloutSamplingMask.concatenate([sample.sampling_mask, support])
    return Sample(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        rollout_id=sample.rollout_id,
        segment=sample.segment,
        tokens=np.concatenate((sample.tokens, result.tokens)),
        prompt_length=sample.prompt_length,
        loss_mask=mask,
        rollout_log_probs=log_probs,
        version_spans=spans,
        sampling_mask=support,
        status=_STATUS[result.finish_reason],
        metadata=sample.metadata,
        prefix_cache=_cache_counts(sample, result),
    )


def _cache_counts(sample: Sample, result: GenerateResult) -> dict[str, int]:
    before = sample.prefix_cache
    return {
        "prompt_tokens": before.get("prompt_tokens", 0) + result.prompt_tokens,
        "cached_tokens": before.get("cached_tokens", 0) + result.cached_tokens,
    }


def merge_spans(spans: np.ndarray) -> np.ndarray:
    """int64 [S, 2]: neighbouring spans of one version become one."""
    if len(spans) < 2:
        return spans
    starts = np.flatnonzero(np.concatenate(([True], spans[1:, 0] != spans[:-1, 0])))
    return np.stack([spans[starts, 0], np.add.reduceat(spans[:, 1], starts)], axis=1)
