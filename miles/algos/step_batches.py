"""From finished samples to the batches of the optimizer steps: count, estimate, schedule, build.

`prepare_steps` is the one call of the training loop. Group estimators (GRPO, RLOO) need no torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from miles.algos.advantages import AdvantageInputs, run_estimator
from miles.algos.config import AlgoConfig
from miles.data.batch import TrainBatch, build_batch
from miles.data.counting import Counted, count_rollouts
from miles.data.sample import Sample
from miles.data.schedule import ScheduleConfig, build_dp_schedule

_CRITIC_HINT = "the advantage needs a critic's values; run the critic over the rollout"


@dataclass(frozen=True, slots=True)
class Advantages:
    """float32 [R] per sample; `returns` for a critic, else None. `kl`: mean per trained token, where rewards hold it."""

    advantages: list[np.ndarray]
    returns: list[np.ndarray] | None = None
    kl: float | None = None


@dataclass(frozen=True, slots=True)
class PreparedSteps:
    """`steps[k]` is the batch of optimizer step k; `trained[k]` are the indices of the samples in it."""

    steps: list[TrainBatch]
    trained: list[tuple[int, ...]]
    counted: Counted
    metrics: dict[str, float] = field(default_factory=dict)


def count_for(samples: Sequence[Sample], config: AlgoConfig) -> Counted:
    return count_rollouts(
        samples,
        mask_truncated=config.mask_truncated,
        zero_variance=config.zero_variance,
        needs_reward=config.declared_loss.advantages,
    )


def estimate_advantages(samples: Sequence[Sample], counted: Counted, config: AlgoConfig) -> Advantages:
    """Advantages that `config.advantage` names, one array per sample. `ValueError` names the sample that lacks a field
    or whose reward is not finite."""
    lengths = np.array([s.response_length for s in samples], dtype=np.int64)
    if not config.declared_loss.advantages:
        return Advantages(_split(np.zeros(int(lengths.sum()), dtype=np.float32), lengths))
    _check_rewards(samples)
    needs = config.declared_advantage
    mask = np.concatenate(counted.masks) if len(samples) else np.zeros(0, dtype=np.uint8)
    kl = _reward_kl(samples, mask, config)
    hint = f"algo.advantage {config.advantage} declares a reference; score the samples before the advantages"
    inputs = AdvantageInputs(
        rewards=_read_only(np.where(counted.in_baseline, counted.rewards, 0.0)),
        group_index=_read_only(counted.group_index),
        in_baseline=_read_only(counted.in_baseline),
        rollout_index=_read_only(counted.rollout_index),
        lengths=_read_only(lengths),
        mask=_read_only(mask.astype(bool)),
        config=config,
        kl=None if kl is None else _read_only(kl),
        values=_read_only(_field(samples, "values", _CRITIC_HINT)) if needs.critic else None,
        old_log_probs=_read_only(_field(samples, _policy_field(config), hint)) if needs.reference else None,
        ref_log_probs=_read_only(_field(samples, "ref_log_probs", hint)) if needs.reference else None,
    )
    found = run_estimator(inputs)
    returns = None if found.returns is None else _split(found.returns, lengths)
    return Advantages(_split(found.advantages, lengths), returns, _mean(kl, mask))


def prepare_steps(
    samples: Sequence[Sample],
    config: AlgoConfig,
    schedule: ScheduleConfig,
) -> PreparedSteps:
    """Count, estimate, schedule and build all optimizer steps of one rollout batch.

    Samples without an active token get no forward pass. When nothing counts there is one step with
    `denominators.rollouts == 0`, which every rank skips.
    """
    counted = count_for(samples, config)
    estimated = estimate_advantages(samples, counted, config)
    plan = build_dp_schedule(
        [s.total_length for s in samples],
        [s.rollout_id for s in samples],
        schedule,
        active=counted.trained.tolist(),
    )
    steps = [
        build_batch(
            samples,
            step,
            counted,
            estimated.advantages,
            estimated.returns,
            reduction=config.reduction,
            fixed_length=config.fixed_length,
            layout=schedule.layout,
        )
        for step in plan.steps
    ]
    metrics = plan.metrics | ({} if estimated.kl is None else {"train/kl": estimated.kl})
    return PreparedSteps(steps, [step.samples for step in plan.steps], counted, metrics)


def prepare_scoring(samples: Sequence[Sample], schedule: ScheduleConfig) -> TrainBatch:
    """A batch of all samples for a pass that scores tokens (old, reference or teacher log-probs, values)."""
    counted = count_rollouts(samples, needs_reward=False)
    whole = replace(schedule, global_batch_size=None)
    plan = build_dp_schedule([s.total_length for s in samples], list(range(len(samples))), whole)
    return build_batch(samples, plan.steps[0], counted, layout=schedule.layout)


def gather_scores(batch: TrainBatch, scores: Sequence[Sequence[np.ndarray]], count: int) -> list[np.ndarray]:
    """Scores in the order of the scored samples. `scores[r]`: what data-parallel rank r returned, float32 [R] each.

    Order inside a rank: micro-batches in order, their sequences in order, dummies included or not.
    """
    out: list[np.ndarray | None] = [None] * count
    for rank, (micro_batches, given) in enumerate(zip(batch.ranks, scores, strict=True)):
        slots = [int(i) for mb in micro_batches for i in mb.sample_index]
        if len(given) != len(slots):
            slots = [i for i in slots if i >= 0]
        if len(given) != len(slots):
            raise ValueError(f"rank {rank} scored {len(given)} sequences, its batch holds {len(slots)}")
        for index, values in zip(slots, given, strict=True):
            if index >= 0:
                out[index] = np.asarray(values, dtype=np.float32)
    missing = [i for i, values in enumerate(out) if values is None]
    if missing:
        raise ValueError(f"{len(missing)} samples were not scored, first {missing[0]}")
    return [values for values in out if values is not None]


def _check_rewards(samples: Sequence[Sample]) -> None:
    # A comparison with NaN is false, so a whole group would pass for one of equal rewards.
    for sample in samples:
        if sample.reward is not None and not math.isfinite(sample.reward):
            raise ValueError(
                f"sample {sample.sample_id!r} has reward {sample.reward}; rewards must be finite: mend the reward, or "
                "mark the sample env_error"
            )


def _split(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum(lengths)
    return [flat[end - n : end] for end, n in zip(ends.tolist(), lengths.tolist(), strict=True)]


def _mean(values: np.ndarray | None, mask: np.ndarray) -> float | None:
    active = mask.astype(bool)
    return None if values is None else float(values[active].mean()) if active.any() else 0.0


def _read_only(array: np.ndarray) -> np.ndarray:
    """A view that an estimator cannot write to: the arrays are the samples' and the denominators' too."""
    view = array.view()
    view.flags.writeable = False
    return view


def _policy_field(config: AlgoConfig) -> str:
    """The samples' field that holds the policy before the step."""
    return "rollout_log_probs" if config.correction.bypass else "old_log_probs"


def _field(samples: Sequence[Sample], name: str, hint: str) -> np.ndarray:
    for sample in samples:
        if getattr(sample, name) is None:
            raise ValueError(f"sample {sample.sample_id!r} has no {name}: {hint}")
    return np.concatenate([getattr(s, name) for s in samples]) if len(samples) else np.zeros(0, dtype=np.float32)


def _reward_kl(samples: Sequence[Sample], mask: np.ndarray, config: AlgoConfig) -> np.ndarray | None:
    if config.kl.where != "reward":
        return None
    import torch

    from miles.algos.kl import estimate

    hint = "algo.kl.where=reward compares them; compute both with Backend.score before the advantages"
    difference = _field(samples, _policy_field(config), hint) - _field(samples, "ref_log_probs", hint)
    return estimate(config.kl.estimator, torch.from_numpy(np.where(mask.astype(bool), difference, 0.0))).numpy()
