from __future__ import annotations

import pickle
import time

import numpy as np
import pytest

from miles.data.batch import build_batch
from miles.data.batch_layout import BatchLayout
from miles.data.counting import count_rollouts
from miles.data.sample import Status
from miles.data.sampling_mask import RolloutSamplingMask
from miles.data.schedule import ScheduleConfig, build_dp_schedule
from miles.data.tensors import to_tensors


def batch_of(samples, *, layout="thd", ranks=1, reduction="rollout_mean", **options):
    lies = BatchLayout(layout, **options)
    counted = count_rollouts(samples)
    config = ScheduleConfig(data_parallel=ranks, layout=lies, max_tokens_per_gpu=64)
    schedule = build_dp_schedule([s.total_length for s in samples], [s.rollout_id for s in samples], config)
    advantages = [np.full(s.response_length, i + 1, dtype=np.float32) for i, s in enumerate(samples)]
    return build_batch(samples, schedule.steps[0], counted, advantages, layout=lies, reduction=reduction)


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_logit_index_points_at_the_token_before_the_target(make_sample, layout, multiple):
    rng = np.random.default_rng(0)
    samples = [
        make_sample(r, p, tokens=rng.integers(0, 99, p + r).astype(np.int64))
        for p, r in ((3, 4), (1, 6), (5, 1), (2, 9))
    ]
    micro_batch = batch_of(samples, layout=layout, pad_multiple=multiple).ranks[0][0]
    flat = micro_batch.input_ids.ravel()
    for position, target, s, j in zip(
        micro_batch.logit_index, micro_batch.target_ids, micro_batch.sequence, micro_batch.response_index, strict=True
    ):
        sample = samples[micro_batch.sample_index[s]]
        at = sample.prompt_length + j
        assert target == sample.tokens[at]
        assert flat[position] == sample.tokens[at - 1]
        assert micro_batch.position_ids.ravel()[position] == at - 1
        assert micro_batch.advantages[(micro_batch.sequence == s) & (micro_batch.response_index == j)] == (
            micro_batch.sample_index[s] + 1
        )
    assert micro_batch.input_ids.shape[1] % multiple == 0


def test_packed_padding_is_one_trailing_document(make_sample):
    micro_batch = batch_of([make_sample(3, 2), make_sample(2, 2)], pad_multiple=8).ranks[0][0]
    assert micro_batch.document_lengths == (5, 4, 7)
    assert micro_batch.pad_from == 9
    assert micro_batch.position_ids[0, 9:].tolist() == list(range(7))
    bounds = to_tensors(micro_batch).bounds
    assert bounds is not None
    assert bounds.cu_seqlens.tolist() == [0, 5, 9, 16]


def test_weights_sum_to_one_whatever_the_split(make_sample):
    samples = [make_sample(n, reward=float(n)) for n in (2, 7, 3, 5, 30, 28)]
    for ranks in (1, 2, 3):
        for reduction in ("rollout_mean", "token_mean"):
            batch = batch_of(samples, ranks=ranks, reduction=reduction)
            total = sum(float(mb.weights.sum()) for rank in batch.ranks for mb in rank)
            assert total == pytest.approx(1.0, rel=1e-6)
            assert batch.denominators.rollouts == 6
            assert batch.denominators.tokens == 75


def test_ranks_without_samples_get_a_masked_dummy_with_the_same_fields(make_sample):
    mask = RolloutSamplingMask.from_rows([[5], [6], [7], [8]], vocab_size=16)
    log_probs = np.zeros(4, dtype=np.float32)
    sample = make_sample(rollout_log_probs=log_probs, sampling_mask=mask)
    real, dummy = (rank[0] for rank in batch_of([sample], ranks=2, use_support=True, pad_id=9).ranks)
    assert real.sample_index.tolist() == [0]
    assert (dummy.sample_index < 0).all()
    assert dummy.weights.tolist() == [0.0]
    assert dummy.input_ids.tolist() == [[9, 9]]
    assert dummy.rollout_log_probs is not None
    assert dummy.support is not None
    assert dummy.support.row(0).tolist() == [9]
    assert dummy.old_log_probs is None


def test_a_field_on_some_samples_only_is_refused(make_sample):
    lacking = make_sample()
    with pytest.raises(ValueError, match=f"sample '{lacking.sample_id}' has no rollout_log_probs but others"):
        batch_of([make_sample(rollout_log_probs=np.zeros(4, dtype=np.float32)), lacking])


def test_a_missing_sampling_mask_is_refused(make_sample):
    with pytest.raises(ValueError, match=r"has no sampling_mask.*algo\.support_log_probs=off"):
        batch_of([make_sample()], use_support=True)


def test_a_sample_without_a_response_needs_no_sampling_mask(make_sample):
    masked = make_sample(2, sampling_mask=RolloutSamplingMask.from_rows([[5, 1], [6]], vocab_size=16))
    empty = make_sample(0, status=Status.TRUNCATED)
    counted = count_rollouts([masked, empty])
    for cap, rows in ((100, [2]), (4, [2, 0])):
        plan = build_dp_schedule([5, 3], range(2), ScheduleConfig(max_tokens_per_gpu=cap))
        batch = build_batch([masked, empty], plan.steps[0], counted, layout=BatchLayout(use_support=True))
        assert [len(item.support) for item in batch.ranks[0]] == rows
        assert sum(item.support_counts.sum() for item in batch.ranks[0]) == 3


def test_advantages_of_the_wrong_length_are_refused(make_sample):
    sample = make_sample()
    counted = count_rollouts([sample])
    step = build_dp_schedule([7], [sample.rollout_id], ScheduleConfig()).steps[0]
    with pytest.raises(ValueError, match="3 advantages for 4 response tokens"):
        build_batch([sample], step, counted, [np.zeros(3, dtype=np.float32)])


def test_a_rank_batch_survives_pickling_and_read_only_memory(make_sample):
    batch = batch_of([make_sample(), make_sample()]).for_rank(0)
    again = pickle.loads(pickle.dumps(batch, 5))
    micro_batch = again.micro_batches[0]
    np.testing.assert_array_equal(micro_batch.weights, batch.micro_batches[0].weights)
    micro_batch.weights.setflags(write=False)
    tensors = to_tensors(micro_batch)
    assert tensors.mask.all()
    assert tensors.token_counts.tolist() == [4, 4]


def test_256_short_samples_are_collated_in_milliseconds(make_sample):
    samples = [make_sample(4, 4) for _ in range(256)]
    config = ScheduleConfig(max_tokens_per_gpu=8192)

    def once() -> float:
        start = time.perf_counter()
        counted = count_rollouts(samples)
        plan = build_dp_schedule([s.total_length for s in samples], [s.rollout_id for s in samples], config)
        build_batch(samples, plan.steps[0], counted)
        return time.perf_counter() - start

    # 1.5 ms on two idle cores; the best of several keeps a busy machine out of the verdict.
    assert min(once() for _ in range(20)) < 0.02
