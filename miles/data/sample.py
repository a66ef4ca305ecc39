"""`Sample`: the one record from rollout engine to optimizer.

Arrays are numpy, never lists. T = len(tokens), P = prompt_length, R = T - P. What is computed from a sample
(advantages, losses) is not here; who counts in a step is `miles.data.counting`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from miles.data.sampling_mask import RolloutSamplingMask


class Status(StrEnum):
    """How a generation ended. `aborted`, `failed` and `env_error` never count; `pending` is never trained."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"
    ENV_ERROR = "env_error"

    @property
    def has_outcome(self) -> bool:
        """True when the rollout ran to an end that a reward can judge."""
        return self in (Status.COMPLETED, Status.TRUNCATED)


# float32 [R] each, or None.
RESPONSE_FIELDS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "teacher_log_probs", "values")
# int32 [T-1, layers, k] each, or None: row t belongs to the forward pass that read tokens[t].
ROUTING_FIELDS = ("routed_experts", "indexer_topk")


@dataclass(slots=True)
class Sample:
    """One trainable sequence: a whole rollout, or one segment of it (compaction, sub-agent).

    group = same prompt; rollout = one execution; siblings share `rollout_id` and differ in `segment`.

    >>> s = Sample("s0", 0, 0, tokens=np.array([5, 6, 7, 1]), prompt_length=2, reward=1.0, status=Status.COMPLETED)
    >>> s.response_length, s.loss_mask.tolist()
    (2, [1, 1])
    """

    sample_id: str
    group_id: int
    rollout_id: int
    tokens: np.ndarray  # int64 [T]
    prompt_length: int
    segment: int = 0
    loss_mask: np.ndarray | None = None  # uint8 [R] in {0, 1}; None becomes all ones
    rollout_log_probs: np.ndarray | None = None
    old_log_probs: np.ndarray | None = None
    ref_log_probs: np.ndarray | None = None
    teacher_log_probs: np.ndarray | None = None
    values: np.ndarray | None = None
    version_spans: np.ndarray | None = None  # int64 [S, 2] = (weight version, token count); observation: -1
    routed_experts: np.ndarray | None = None
    indexer_topk: np.ndarray | None = None
    sampling_mask: RolloutSamplingMask | None = None
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    status: Status = Status.PENDING
    removed: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    spec_info: dict[str, int] = field(default_factory=dict)
    prefix_cache: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.loss_mask is None:
            self.loss_mask = np.ones(len(self.tokens) - self.prompt_length, dtype=np.uint8)

    @property
    def total_length(self) -> int:
        return len(self.tokens)

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True, slots=True)
class Rollout:
    """One execution: its segments in order. `reward` is the one reward that its siblings share."""

    rollout_id: int
    group_id: int
    samples: tuple[Sample, ...]

    @property
    def reward(self) -> float | None:
        return self.samples[0].reward


def gather_rollouts(samples: Sequence[Sample]) -> list[Rollout]:
    """Group samples by `rollout_id`, in order of first appearance; segments ascending.

    `ValueError` when siblings disagree on group or reward, or repeat a segment.
    """
    by_id: dict[int, list[Sample]] = {}
    for sample in samples:
        by_id.setdefault(sample.rollout_id, []).append(sample)
    rollouts = []
    for rollout_id, members in by_id.items():
        first = members[0]
        if len(members) > 1:
            members = sorted(members, key=lambda s: s.segment)
            _check_siblings(rollout_id, members)
        rollouts.append(Rollout(rollout_id, first.group_id, tuple(members)))
    return rollouts


def _check_siblings(rollout_id: int, members: list[Sample]) -> None:
    first = members[0]
    for sample in members[1:]:
        for name in ("group_id", "reward"):
            if getattr(sample, name) != getattr(first, name):
                raise ValueError(
                    f"rollout {rollout_id}: siblings {first.sample_id!r} and {sample.sample_id!r} disagree on {name} "
                    f"({getattr(first, name)!r} and {getattr(sample, name)!r}); a rollout has one {name}, set it on "
                    "every segment"
                )
    segments = [s.segment for s in members]
    if len(set(segments)) != len(segments):
        raise ValueError(f"rollout {rollout_id}: segment numbers {segments} repeat; number the segments 0, 1, ...")


def _fail(sample: Sample, name: str, got: object, expected: str) -> None:
    raise ValueError(f"sample {sample.sample_id!r}: {name} is {got}, expected {expected}")


def _check_array(sample: Sample, name: str, value: Any, dtype: type, shape: tuple[int, ...], ndim: int) -> None:
    expected = f"a numpy {np.dtype(dtype).name} array of shape {list(shape) + ['*'] * (ndim - len(shape))}"
    if not isinstance(value, np.ndarray):
        _fail(sample, name, type(value).__name__, expected)
    if value.dtype != dtype or value.ndim != ndim or value.shape[: len(shape)] != shape:
        _fail(sample, name, f"{value.dtype.name} {list(value.shape)}", expected)


def validate_sample(sample: Sample) -> Sample:
    """Check every field against T and R; returns the sample. `ValueError` names field, got and expected."""
    _check_array(sample, "tokens", sample.tokens, np.int64, (), 1)
    total, prompt = len(sample.tokens), sample.prompt_length
    if not 0 < prompt <= total:
        _fail(sample, "prompt_length", prompt, f"1 to {total} (the number of tokens)")
    n = total - prompt
    mask = sample.loss_mask
    _check_array(sample, "loss_mask", mask, np.uint8, (n,), 1)
    assert mask is not None
    if n and mask.max() > 1:
        _fail(sample, "loss_mask", f"up to {int(mask.max())}", "values 0 and 1")
    for name in RESPONSE_FIELDS:
        value = getattr(sample, name)
        if value is not None:
            _check_array(sample, name, value, np.float32, (n,), 1)
    for name in ROUTING_FIELDS:
        value = getattr(sample, name)
        if value is not None:
            _check_array(sample, name, value, np.int32, (total - 1,), 3)
    if sample.sampling_mask is not None and len(sample.sampling_mask) != n:
        _fail(sample, "sampling_mask", f"{len(sample.sampling_mask)} rows", f"{n} rows, one per response token")
    if sample.sampling_mask is not None:
        try:
            sample.sampling_mask.require_tokens(sample.tokens[prompt:])
        except ValueError as error:
            raise ValueError(f"sample {sample.sample_id!r}: {error}") from error
    spans = sample.version_spans
    if spans is not None:
        if not isinstance(spans, np.ndarray) or spans.dtype != np.int64 or spans.ndim != 2 or spans.shape[1] != 2:
            _fail(sample, "version_spans", getattr(spans, "shape", type(spans).__name__), "an int64 array [S, 2]")
        if int(spans[:, 1].sum()) != n or (len(spans) and int(spans[:, 1].min()) < 1):
            _fail(sample, "version_spans", f"counts {spans[:, 1].tolist()}", f"positive counts that sum to {n}")
    _check_rewards(sample)
    return sample


def _check_rewards(sample: Sample) -> None:
    if sample.reward is not None and not math.isfinite(sample.reward):
        _fail(sample, "reward", sample.reward, "a finite number, or None when there is no reward")
    for key, value in sample.reward_parts.items():
        if not math.isfinite(value):
            _fail(sample, f"reward_parts[{key!r}]", value, "a finite number")
    if sample.status == Status.COMPLETED and sample.response_length == 0:
        _fail(sample, "status", "completed", "a response of at least one token, or status failed")
