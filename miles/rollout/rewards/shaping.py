"""What training adds to a judged reward for the length of an answer. Evaluation reports rewards as they were judged.

Lengths are in tokens that the policy wrote (trained tokens), over all segments of a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles.data.sample import Sample
from miles.rollout.rewards.config import RewardConfig

# Parts of a shaped reward, beside those of the reward function.
JUDGED, OVERLONG, LENGTH = "judged", "overlong", "length"


def soft_overlong_punishment(length: int, *, limit: int, buffer: int) -> float:
    """0 up to limit - buffer tokens, falling to -1 at `limit` and -1 beyond (DAPO, Yu et al. 2025, equation 13)."""
    return -min(max((length - (limit - buffer)) / buffer, 0.0), 1.0)


def length_normalised(lengths: Sequence[int], solved: Sequence[bool]) -> list[float]:
    """Length rewards of one group: 0.5 - (l - min)/(max - min) of a solved answer, at most 0 of another one; all 0 when
    the lengths are equal (Kimi k1.5, 2025, section 2.3.3)."""
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    scale = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [value if good else min(0.0, value) for value, good in zip(scale, solved, strict=True)]


def shape_rewards(samples: Sequence[Sample], config: RewardConfig, *, max_new_tokens: int) -> None:
    """Add to the rewards of one judged group what `config` asks for, and each term to their parts.

    Samples without a reward stay without one and have no place in the group's shortest and longest.
    """
    if not config.shapes:
        return
    judged = [sample for sample in samples if sample.reward is not None and sample.status.has_outcome]
    written: dict[int, int] = {}
    rewards: dict[int, float] = {}
    for sample in judged:
        assert sample.loss_mask is not None
        assert sample.reward is not None
        written[sample.rollout_id] = written.get(sample.rollout_id, 0) + int(sample.loss_mask.sum())
        rewards[sample.rollout_id] = sample.reward
    terms: dict[str, dict[int, float]] = {}
    if (overlong := config.overlong) is not None:
        terms[OVERLONG] = {
            rollout: overlong.penalty
            * soft_overlong_punishment(length, limit=max_new_tokens, buffer=overlong.buffer_tokens)
            for rollout, length in written.items()
        }
    if (by_length := config.length_normalised) is not None and written:
        solved = [rewards[rollout] >= by_length.solved_from for rollout in written]
        values = length_normalised(list(written.values()), solved)
        terms[LENGTH] = {rollout: by_length.weight * value for rollout, value in zip(written, values, strict=True)}
    for sample in judged:
        assert sample.reward is not None
        parts = {name: term[sample.rollout_id] for name, term in terms.items()}
        sample.reward_parts = {**sample.reward_parts, JUDGED: sample.reward, **parts}
        sample.reward += sum(parts.values())
