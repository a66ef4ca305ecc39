"""Numbers of a step's rollout, from raw lengths and statuses, never from masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles.config.metric_table import REWARD_PARTS
from miles.data.sample import Sample, Status
from miles.rollout.filters import ZERO_SPREAD, counted_rewards


def rollout_metrics(groups: Sequence[Sequence[Sample]], refused: Sequence[Sample]) -> dict[str, float]:
    """Means over samples; `reward_mean_all` includes the groups that the filters refused."""
    samples = [s for group in groups for s in group]
    rewards = np.array([s.reward for s in samples if s.reward is not None], dtype=np.float64)
    every = np.concatenate((rewards, [s.reward for s in refused if s.reward is not None]))
    lengths = np.array([len(s.tokens) - s.prompt_length for s in samples], dtype=np.float64)
    n = max(len(samples), 1)
    spreads = [float(np.ptp(r)) if len(r := counted_rewards(group)) else 0.0 for group in groups]
    prompt_tokens = sum(s.prefix_cache.get("prompt_tokens", 0) for s in samples)
    cached = sum(s.prefix_cache.get("cached_tokens", 0) for s in samples)
    return _part_means(samples) | {
        "rollout/reward_mean": float(rewards.mean()) if len(rewards) else 0.0,
        "rollout/reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "rollout/reward_mean_all": float(every.mean()) if len(every) else 0.0,
        "rollout/samples": float(len(samples)),
        "rollout/response_tokens": float(lengths.sum()),
        "rollout/response_length_mean": float(lengths.mean()) if len(lengths) else 0.0,
        "rollout/response_length_max": float(lengths.max()) if len(lengths) else 0.0,
        "rollout/truncated_frac": sum(s.status == Status.TRUNCATED for s in samples) / n,
        "rollout/aborted_frac": sum(not s.status.has_outcome for s in samples) / n,
        "rollout/zero_std_frac": sum(s <= ZERO_SPREAD for s in spreads) / max(len(groups), 1),
        "rollout/prefix_cached_frac": cached / max(prompt_tokens, 1),
    }


def _part_means(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean of each part over the samples that have it."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.reward_parts.items():
            values.setdefault(name, []).append(value)
    return {f"{REWARD_PARTS}{name}": float(np.mean(values[name])) for name in sorted(values)}


def trained_version(sample: Sample) -> int | None:
    """The oldest weight version of a token that is trained on; None when no token is."""
    spans = sample.version_spans
    if spans is None or not len(spans):
        return None
    if len(spans) == 1:
        return int(spans[0, 0])
    versions = np.repeat(spans[:, 0], spans[:, 1])
    trained = versions[(sample.loss_mask == 1) & (versions >= 0)] if sample.loss_mask is not None else versions
    return int(trained.min()) if len(trained) else None


def oldest_version(samples: Sequence[Sample]) -> int | None:
    """The oldest weight version of any trained token of the samples."""
    versions = [v for v in map(trained_version, samples) if v is not None]
    return min(versions) if versions else None
