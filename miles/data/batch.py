"""Samples of one optimizer step as arrays, arranged by data-parallel rank and micro-batch.

Everything is numpy on the host, so that a batch pickles cheaply and is built without torch;
`miles.data.tensors` moves one micro-batch to a device. Loss weights are final here: the step's loss is the
plain sum of weight x per-token loss over all micro-batches and ranks, no collective needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from miles.data.batch_layout import BatchLayout
from miles.data.counting import Counted
from miles.data.sample import Sample, Status
from miles.data.sampling_mask import RolloutSamplingMask
from miles.data.schedule import Bin, StepSchedule

Reduction = Literal["rollout_mean", "token_mean", "fixed"]
# Optional per-token fields: on every sample of a step, or on none.
OPTIONAL_FIELDS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "teacher_log_probs", "values")


@dataclass(frozen=True, slots=True)
class Denominators:
    """Scalars of the whole step. `rollouts` is N, `tokens` is the sum of all masks."""

    rollouts: int
    tokens: int
    reduction: Reduction = "rollout_mean"
    fixed_length: int | None = None

    def weights(self, mask: np.ndarray, rollout_tokens: np.ndarray) -> np.ndarray:
        """float32 [n]: what each token's loss is multiplied by. `rollout_tokens` is D_r of each token's rollout.

        rollout_mean m/(N·max(D_r,1)) · token_mean m/max(sum m,1) · fixed m/(N·L_max).
        """
        active = mask.astype(np.float64)
        n = max(self.rollouts, 1)
        if self.reduction == "rollout_mean":
            weights = active / (n * np.maximum(rollout_tokens, 1))
        elif self.reduction == "token_mean":
            weights = active / max(self.tokens, 1)
        elif self.fixed_length is None:
            raise ValueError("reduction fixed divides by N·L_max; set algo.fixed_length")
        else:
            weights = active / (n * self.fixed_length)
        return weights.astype(np.float32)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """S sequences with n response tokens in all, in order of sequence, then response index.

    Layout kind bshd: `input_ids` int64 [S, T], padded on the right. Layout thd: [1, T], documents end to end, with
    `document_lengths` (their sum is T; a padded tail is one last document). `logit_index` points into the
    flattened `input_ids`: the position whose logits predict that response token.
    """

    layout: BatchLayout
    input_ids: np.ndarray
    position_ids: np.ndarray  # int64, like input_ids; restarts at each document
    document_lengths: tuple[int, ...]
    pad_from: int | None
    starts: np.ndarray  # int64 [S]: where each sequence begins in the flattened input_ids
    prompt_lengths: np.ndarray  # int64 [S]
    total_lengths: np.ndarray  # int64 [S]
    sample_index: np.ndarray  # int64 [S], -1 for a dummy
    sample_ids: tuple[str, ...]
    logit_index: np.ndarray  # int64 [n]
    sequence: np.ndarray  # int64 [n]: 0 to S-1
    response_index: np.ndarray  # int64 [n]
    target_ids: np.ndarray  # int64 [n]
    mask: np.ndarray  # uint8 [n]
    weights: np.ndarray  # float32 [n]
    advantages: np.ndarray  # float32 [n]
    rollout_log_probs: np.ndarray | None = None
    old_log_probs: np.ndarray | None = None
    ref_log_probs: np.ndarray | None = None
    teacher_log_probs: np.ndarray | None = None
    values: np.ndarray | None = None
    returns: np.ndarray | None = None
    support: RolloutSamplingMask | None = None  # n rows

    @property
    def token_counts(self) -> np.ndarray:
        """int64 [S]: how many of the n tokens each sequence has here (a context-parallel slice may hold none)."""
        return np.bincount(self.sequence, minlength=len(self.sample_ids))

    @property
    def support_counts(self) -> np.ndarray:
        """int64 [S]: how many ids the supports of each sequence's tokens here hold together."""
        assert self.support is not None
        return np.diff(self.support.offsets[np.cumsum(np.append(0, self.token_counts))])


@dataclass(frozen=True, slots=True)
class RankBatch:
    """What one data-parallel rank consumes in one step. `skip`: N is 0, every rank takes no optimizer step."""

    dp_rank: int
    dp_size: int
    micro_batches: tuple[MicroBatch, ...]
    denominators: Denominators

    @property
    def skip(self) -> bool:
        return self.denominators.rollouts == 0


@dataclass(frozen=True, slots=True)
class TrainBatch:
    ranks: tuple[tuple[MicroBatch, ...], ...]
    denominators: Denominators
    metrics: dict[str, float] = field(default_factory=dict)

    def for_rank(self, dp_rank: int) -> RankBatch:
        return RankBatch(dp_rank, len(self.ranks), self.ranks[dp_rank], self.denominators)


def build_batch(
    samples: Sequence[Sample],
    schedule: StepSchedule,
    counted: Counted,
    advantages: Sequence[np.ndarray] | None = None,
    returns: Sequence[np.ndarray] | None = None,
    *,
    layout: BatchLayout = BatchLayout(),
    reduction: Reduction = "rollout_mean",
    fixed_length: int | None = None,
) -> TrainBatch:
    """Arrays of one step. Indices in `schedule` refer to `samples`; `counted` covers all of `samples`.

    advantages, returns: float32 [R] per sample; None (a log-prob pass) becomes zeros. `layout` is the one that
    `schedule` was made for.
    """
    members = np.asarray(schedule.samples, dtype=np.int64)
    inside = np.zeros(len(counted.rollouts), dtype=bool)
    inside[counted.rollout_index[members]] = True
    denominators = Denominators(
        int((counted.in_step & inside).sum()), int(counted.tokens[inside].sum()), reduction, fixed_length
    )
    source = _Source(samples, counted, advantages, returns, denominators, _present(samples, members), layout)
    ranks = tuple(tuple(_build(source, members) for members in rank) for rank in schedule.ranks)
    return TrainBatch(ranks, denominators)


@dataclass(frozen=True, slots=True)
class _Source:
    samples: Sequence[Sample]
    counted: Counted
    advantages: Sequence[np.ndarray] | None
    returns: Sequence[np.ndarray] | None
    denominators: Denominators
    fields: tuple[str, ...]
    layout: BatchLayout


def _present(samples: Sequence[Sample], members: np.ndarray) -> tuple[str, ...]:
    present = []
    for name in OPTIONAL_FIELDS:
        lacking = [i for i in members.tolist() if getattr(samples[i], name) is None]
        if 0 < len(lacking) < len(members):
            raise ValueError(
                f"sample {samples[lacking[0]].sample_id!r} has no {name} but others of the step do; "
                "set it on every sample or on none"
            )
        if not lacking and len(members):
            present.append(name)
    return tuple(present)


def _build(source: _Source, members: Bin) -> MicroBatch:
    layout = source.layout
    if members:
        chosen = [source.samples[i] for i in members]
        masks = [source.counted.masks[i] for i in members]
        index = np.array(members, dtype=np.int64)
    else:
        chosen, index = [_dummy(source)], np.array([-1], dtype=np.int64)
        masks = [np.zeros(1, dtype=np.uint8)]
    totals = np.array([len(s.tokens) for s in chosen], dtype=np.int64)
    prompts = np.array([s.prompt_length for s in chosen], dtype=np.int64)
    responses = totals - prompts
    place = _place_packed if layout.kind == "thd" else _place_padded
    input_ids, position_ids, starts, documents, pad_from = place(chosen, totals, layout.pad_id, layout.pad_multiple)
    sequence = np.repeat(np.arange(len(chosen)), responses)
    response_index = np.arange(len(sequence)) - np.repeat(np.cumsum(responses) - responses, responses)
    logit_index = (starts + prompts - 1)[sequence] + response_index
    mask = np.concatenate(masks)
    if members:
        per_sample = source.counted.tokens[source.counted.rollout_index[index]]
        weights = source.denominators.weights(mask, per_sample[sequence])
    else:
        weights = np.zeros(1, dtype=np.float32)
    return MicroBatch(
        layout=layout,
        input_ids=input_ids,
        position_ids=position_ids,
        document_lengths=documents,
        pad_from=pad_from,
        starts=starts,
        prompt_lengths=prompts,
        total_lengths=totals,
        sample_index=index,
        sample_ids=tuple(s.sample_id for s in chosen),
        logit_index=logit_index,
        sequence=sequence,
        response_index=response_index,
        target_ids=np.concatenate([s.tokens[s.prompt_length :] for s in chosen]),
        mask=mask,
        weights=weights,
        advantages=_gather(source.advantages, members, responses, "advantages", source),
        returns=None if source.returns is None else _gather(source.returns, members, responses, "returns", source),
        support=_support(source, chosen) if layout.use_support else None,
        **{name: np.concatenate([getattr(s, name) for s in chosen]) for name in source.fields},
    )


def _gather(
    values: Sequence[np.ndarray] | None, members: Bin, responses: np.ndarray, name: str, source: _Source
) -> np.ndarray:
    if values is None or not members:
        return np.zeros(int(responses.sum()), dtype=np.float32)
    parts = [values[i] for i in members]
    for i, part, n in zip(members, parts, responses.tolist(), strict=True):
        if len(part) != n:
            raise ValueError(f"sample {source.samples[i].sample_id!r}: {len(part)} {name} for {n} response tokens")
    return np.concatenate(parts).astype(np.float32, copy=False)


def _dummy(source: _Source) -> Sample:
    """One masked response token: keeps collectives and autograd alike on every rank."""
    pad_id = source.layout.pad_id
    zeros: dict[str, Any] = {name: np.zeros(1, dtype=np.float32) for name in source.fields}
    sample = Sample("dummy", -1, -1, np.full(2, pad_id, dtype=np.int64), 1, status=Status.COMPLETED, **zeros)
    if source.layout.use_support:
        other = next((s.sampling_mask for s in source.samples if s.sampling_mask), None)
        vocab_size = pad_id + 1 if other is None else other.vocab_size
        sample.sampling_mask = RolloutSamplingMask.singletons(sample.tokens[1:], vocab_size=vocab_size)
        if other is not None and other.ref_log_probs is not None:
            sample.sampling_mask = sample.sampling_mask.with_ref_log_probs(np.zeros(1, dtype=np.float32))
    return sample


def _support(source: _Source, chosen: Sequence[Sample]) -> RolloutSamplingMask:
    # A sample without a response has no rows, and an engine that was never asked gave it no mask.
    drawn = [sample for sample in chosen if sample.response_length]
    for sample in drawn:
        if sample.sampling_mask is None:
            raise ValueError(
                f"sample {sample.sample_id!r} has no sampling_mask, but the rollout samples with top-p, top-k or min-p; "
                "use an engine that returns masks, or set algo.support_log_probs=off"
            )
    if not drawn:
        return RolloutSamplingMask.from_rows([], vocab_size=1)
    return RolloutSamplingMask.concatenate(s.sampling_mask for s in drawn if s.sampling_mask is not None)


def _place_packed(
    chosen: Sequence[Sample], totals: np.ndarray, pad_id: int, multiple: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...], int | None]:
    used = int(totals.sum())
    padding = -used % multiple
    documents = totals.tolist() + ([padding] if padding else [])
    input_ids = np.full(used + padding, pad_id, dtype=np.int64)
    input_ids[:used] = np.concatenate([s.tokens for s in chosen])
    lengths = np.array(documents, dtype=np.int64)
    ends = np.cumsum(lengths)
    position_ids = np.arange(used + padding) - np.repeat(ends - lengths, lengths)
    starts = np.cumsum(totals) - totals
    return input_ids[None], position_ids[None], starts, tuple(documents), used if padding else None


def _place_padded(
    chosen: Sequence[Sample], totals: np.ndarray, pad_id: int, multiple: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...], int | None]:
    rows, width = len(chosen), -(-int(totals.max()) // multiple) * multiple
    input_ids = np.full((rows, width), pad_id, dtype=np.int64)
    filled = np.arange(width) < totals[:, None]
    input_ids[filled] = np.concatenate([s.tokens for s in chosen])
    position_ids = np.broadcast_to(np.arange(width), (rows, width)).copy()
    return input_ids, position_ids, np.arange(rows, dtype=np.int64) * width, (width,) * rows, None
