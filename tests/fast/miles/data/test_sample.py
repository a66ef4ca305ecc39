from __future__ import annotations

import numpy as np
import pytest

from miles.data.sample import RESPONSE_FIELDS, Status, gather_rollouts, validate_sample
from miles.data.sampling_mask import RolloutSamplingMask


def full_fields(prompt: int, response: int) -> dict:
    rng = np.random.default_rng(0)
    total = prompt + response
    tokens = rng.integers(0, 50, total).astype(np.int64)
    return {
        "tokens": tokens,
        "loss_mask": rng.integers(0, 2, response).astype(np.uint8),
        **{name: rng.standard_normal(response).astype(np.float32) for name in RESPONSE_FIELDS},
        "version_spans": np.array([[3, 2], [-1, 1], [4, response - 3]], dtype=np.int64),
        "routed_experts": rng.integers(0, 8, (total - 1, 2, 2)).astype(np.int32),
        "indexer_topk": rng.integers(0, 8, (total - 1, 1, 4)).astype(np.int32),
        "sampling_mask": RolloutSamplingMask.from_rows([[int(t), 60] for t in tokens[prompt:]], vocab_size=64),
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": [1, 2, 3, 4, 5, 6, 7]}, "tokens is list"),
        ({"tokens": np.arange(7, dtype=np.int32)}, r"tokens is int32 \[7\], expected a numpy int64"),
        ({"prompt_length": 0}, "prompt_length is 0, expected 1 to 7"),
        ({"loss_mask": np.ones(3, dtype=np.uint8)}, r"loss_mask is uint8 \[3\].*shape \[4\]"),
        ({"loss_mask": np.full(4, 2, dtype=np.uint8)}, "loss_mask is up to 2"),
        ({"loss_mask": np.ones(4, dtype=bool)}, "loss_mask is bool"),
        ({"rollout_log_probs": np.zeros(4)}, "rollout_log_probs is float64"),
        ({"old_log_probs": np.zeros(5, dtype=np.float32)}, r"old_log_probs is float32 \[5\]"),
        ({"values": np.zeros((4, 1), dtype=np.float32)}, r"values is float32 \[4, 1\]"),
        ({"version_spans": np.array([[1, 3]])}, "counts .3.*sum to 4"),
        ({"version_spans": np.array([[1, 4], [2, 0]])}, "positive counts"),
        ({"routed_experts": np.zeros((5, 2, 2), dtype=np.int32)}, r"routed_experts is int32 \[5, 2, 2\]"),
        ({"sampling_mask": RolloutSamplingMask.from_rows([[1]], vocab_size=4)}, "sampling_mask is 1 rows, expected 4"),
        (
            {"sampling_mask": RolloutSamplingMask.from_rows([[5], [6], [9], [8]], vocab_size=16)},
            "token 7 at response index 2 is not in its own row",
        ),
        ({"reward": float("nan")}, "reward is nan, expected a finite number"),
        ({"reward_parts": {"format": float("inf")}}, r"reward_parts\['format'\] is inf"),
    ],
)
def test_validate_names_the_sample_the_field_and_what_was_expected(make_sample, fields, message):
    sample = make_sample(**fields)
    with pytest.raises(ValueError, match=message) as error:
        validate_sample(sample)
    assert sample.sample_id in str(error.value)


def test_a_completed_sample_without_a_response_is_refused(make_sample):
    with pytest.raises(ValueError, match="at least one token"):
        validate_sample(make_sample(0))
    validate_sample(make_sample(0, status=Status.ABORTED))


def test_siblings_are_gathered_in_segment_order(make_sample):
    later, other, first = make_sample(rollout_id=7, segment=1), make_sample(), make_sample(rollout_id=7, segment=0)
    rollouts = gather_rollouts([later, other, first])
    assert [r.rollout_id for r in rollouts] == [7, other.rollout_id]
    assert rollouts[0].samples == (first, later)


def test_siblings_that_disagree_are_refused(make_sample):
    with pytest.raises(ValueError, match=r"disagree on reward \(1\.0 and 0\.5\)"):
        gather_rollouts([make_sample(rollout_id=7), make_sample(rollout_id=7, segment=1, reward=0.5)])
    with pytest.raises(ValueError, match=r"segment numbers \[0, 0\] repeat"):
        gather_rollouts([make_sample(rollout_id=7), make_sample(rollout_id=7)])
