"""Each distinct prompt of a micro-batch is computed once, however many samples answer it.

A group of 16 samples repeats its prompt 16 times. Attention is the only place where a response looks at its prompt,
so the prompt's tokens pass through the layers once and every response attends to their keys and values; gradients
add up where the rows are gathered. The last token of a sample predicts nothing and is left out. The result is the
same function of the same weights: equal to separate rows up to the rounding of sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from miles.data.batch import MicroBatch
from miles.data.tensors import BatchTensors
from miles.train.megatron.documents import Bucket, DocumentLayout, move_rows, restore_rows, rows_by_length


@dataclass(frozen=True)
class _Parts:
    """Prompts first, then responses without their last token; int64 arrays. `prompt_of` names each sequence's prompt."""

    tokens: np.ndarray
    positions: np.ndarray
    prompt_starts: np.ndarray
    prompt_sizes: np.ndarray
    prompt_of: np.ndarray
    response_starts: np.ndarray
    response_sizes: np.ndarray


def share_prompts(
    batch: MicroBatch, tensors: BatchTensors, device: torch.device, *, multiple: int = 1
) -> tuple[BatchTensors, DocumentLayout] | None:
    """The micro-batch with shared prompts as one packed row and its layout; None when no prompt repeats.

    The row is padded to a multiple of `multiple` tokens with a document of its own.
    """
    flat = batch.input_ids.reshape(-1)
    prompts, prompt_of = _distinct(flat, batch.starts, batch.prompt_lengths)
    if len(prompts) == len(batch.starts):
        return None
    parts = _lay_out(flat, batch, prompts, prompt_of, multiple)
    layout = DocumentLayout(move_rows(parts.positions, device), *_buckets(parts, device))
    ends = parts.prompt_starts + parts.prompt_sizes - 1
    first = ends[prompt_of][batch.sequence]
    later = parts.response_starts[batch.sequence] + batch.response_index - 1
    index = np.where(batch.response_index == 0, first, later)
    shared = replace(
        tensors,
        input_ids=move_rows(parts.tokens, device)[None],
        position_ids=move_rows(parts.positions, device)[None],
        bounds=None,
        logit_index=move_rows(index, device),
    )
    return shared, layout


def _distinct(flat: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Distinct prompts in order of first appearance, and the number of each sequence's prompt."""
    seen: dict[bytes, int] = {}
    prompts: list[np.ndarray] = []
    numbers = np.empty(len(starts), dtype=np.int64)
    for sequence, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        prompt = flat[start : start + size]
        key = prompt.tobytes()
        if key not in seen:
            seen[key] = len(prompts)
            prompts.append(prompt)
        numbers[sequence] = seen[key]
    return prompts, numbers


def _lay_out(
    flat: np.ndarray, batch: MicroBatch, prompts: list[np.ndarray], prompt_of: np.ndarray, multiple: int
) -> _Parts:
    prompt_sizes = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    response_sizes = np.maximum(batch.total_lengths - batch.prompt_lengths - 1, 0)
    used = int(prompt_sizes.sum() + response_sizes.sum())
    padding = -used % multiple
    if padding:
        # A prompt that nobody answers: it sees itself only.
        prompts, prompt_sizes = [*prompts, np.zeros(padding, dtype=np.int64)], np.append(prompt_sizes, padding)
    prompt_starts = np.cumsum(prompt_sizes) - prompt_sizes
    prompt_total = int(prompt_sizes.sum())
    response_starts = prompt_total + np.cumsum(response_sizes) - response_sizes
    within = np.arange(int(response_sizes.sum())) - np.repeat(response_starts - prompt_total, response_sizes)
    source = np.repeat(batch.starts + batch.prompt_lengths, response_sizes) + within
    return _Parts(
        tokens=np.concatenate([*prompts, flat[source]]),
        positions=np.concatenate(
            [
                np.arange(prompt_total) - np.repeat(prompt_starts, prompt_sizes),
                np.repeat(batch.prompt_lengths, response_sizes) + within,
            ]
        ),
        prompt_starts=prompt_starts,
        prompt_sizes=prompt_sizes,
        prompt_of=prompt_of,
        response_starts=response_starts,
        response_sizes=response_sizes,
    )


def _buckets(parts: _Parts, device: torch.device) -> tuple[tuple[Bucket, ...], torch.Tensor]:
    buckets = [Bucket(move_rows(rows, device)) for rows, _ in rows_by_length(parts.prompt_starts, parts.prompt_sizes)]
    prompt_total = int(parts.prompt_sizes.sum())
    restore = restore_rows(buckets, prompt_total, parts.prompt_starts, parts.prompt_sizes)
    answered = np.flatnonzero(parts.response_sizes)
    if len(answered) == 0:
        return tuple(buckets), restore
    offset = sum(bucket.queries.numel() for bucket in buckets)
    sizes = parts.response_sizes[answered]
    for rows, members in rows_by_length(parts.response_starts[answered], sizes):
        buckets.append(_response_bucket(parts, rows, answered[members], device))
    responses = [bucket for bucket in buckets if bucket.keys is not None]
    later = restore_rows(responses, int(sizes.sum()), parts.response_starts[answered] - prompt_total, sizes)
    return tuple(buckets), torch.cat([restore, later + offset])


def _response_bucket(parts: _Parts, rows: np.ndarray, sequences: np.ndarray, device: torch.device) -> Bucket:
    """Queries are response tokens; keys are the prompt's tokens, then the response's own up to the query."""
    starts = parts.prompt_starts[parts.prompt_of[sequences]]
    sizes = parts.prompt_sizes[parts.prompt_of[sequences]]
    slots = np.arange(int(sizes.max()))[None, :]
    real = slots < sizes[:, None]
    keys = np.concatenate([np.where(real, starts[:, None] + slots, 0), rows], axis=1)
    width = rows.shape[1]
    if real.all():
        real = real[:1]
    before = np.broadcast_to(real[:, None, :], (len(real), width, slots.shape[1]))
    # Padding of a response row stands after its real tokens, so that causality hides it.
    own = np.broadcast_to(np.tril(np.ones((width, width), dtype=bool)), (len(real), width, width))
    allowed = np.concatenate([before, own], axis=2)[:, None]
    return Bucket(move_rows(rows, device), move_rows(keys, device), move_rows(allowed, device))
