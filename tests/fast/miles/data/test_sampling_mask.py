from __future__ import annotations

import numpy as np
import pytest

from miles.data.sampling_mask import RolloutSamplingMask

ROWS = [[3, 1], [4], [0, 5, 2], [7], [6, 1]]


def mask() -> RolloutSamplingMask:
    return RolloutSamplingMask.from_rows(ROWS, vocab_size=8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [0, 1, 3]), "last offset is 3, expected 2"),
        (([1, 2], [1, 2]), "offsets must start with 0"),
        (([], []), "ids is float64"),
        (([1, 2], [0, 0, 2]), "row 0 has 0 ids"),
        (([1, 2], [0, 2, 1, 2]), "row 1 has -1 ids"),
        (([1, 8], [0, 2]), "id 8 at 1 is outside the vocabulary of 8"),
        (([-1, 2], [0, 2]), "id -1 at 0 is outside"),
        (([2, 2], [0, 2]), "row 0 holds id 2 twice"),
        (([1.0, 2.0], [0, 2]), "ids is float64"),
        (([True, False], [0, 2]), "ids is bool"),
        (([[1, 2]], [0, 2]), r"ids is int64 \[1, 2\], expected 1-D"),
        (([2**40], [0, 1]), "ids does not fit int32"),
        (([1, 2], [0, 2], [0.0]), "1 log_probs for 2 ids"),
        (([1, 2], [0, 2], [-0.5, np.nan]), "finite and at most 0"),
        (([1, 2], [0, 2], [0.1, -3.0]), "finite and at most 0"),
        (([1, 2], [0, 2], [-0.1, -3.0]), "row 0 have a sum of probabilities of 0.95"),
    ],
)
def test_csr_rejects(arguments, message):
    ids, offsets, *log_probs = arguments
    with pytest.raises(ValueError, match=message):
        RolloutSamplingMask(np.array(ids), np.array(offsets, dtype=np.int64), 8, *map(np.array, log_probs))


def test_rows_with_probabilities_are_accepted_and_owned():
    ids = np.array([1, 2])
    probabilities = np.log(np.array([0.25, 0.75], dtype=np.float32))
    built = RolloutSamplingMask(ids, np.array([0, 2]), 8, probabilities)
    ids[0] = 5
    assert built.ids.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        built.ids[0] = 5


def test_a_unit_step_range_is_a_view_and_other_selections_are_copies():
    built = mask()
    view = built.select(range(1, 4))
    assert np.shares_memory(view.ids, built.ids)
    assert [view.row(i).tolist() for i in range(3)] == ROWS[1:4]
    picked = built.select([4, 0, 1])
    assert not np.shares_memory(picked.ids, built.ids)
    assert [picked.row(i).tolist() for i in range(3)] == [ROWS[4], ROWS[0], ROWS[1]]
    assert len(built.select([])) == 0
    assert len(built.select(range(2, 2))) == 0


def test_selection_outside_the_rows_raises():
    for wanted in (range(3, 6), [0, 5], [-1]):
        with pytest.raises(IndexError):
            mask().select(wanted)


def test_selection_and_concatenation_restores_the_mask():
    built = mask()
    rest = built.select(range(2, 5))
    assert RolloutSamplingMask.concatenate([built.select(range(2)), rest]) == built
    forced = RolloutSamplingMask.singletons(np.array([6, 0]), vocab_size=8)
    merged = RolloutSamplingMask.concatenate([built, forced])
    assert [merged.row(i).tolist() for i in (5, 6)] == [[6], [0]]


def test_reference_log_probs_travel_with_their_ids():
    built = mask()
    scores = np.concatenate([np.log(np.full(len(row), 1 / len(row))) for row in ROWS]).astype(np.float32)
    scored = built.with_ref_log_probs(scores)
    assert scored != built
    picked = scored.select([4, 0])
    np.testing.assert_array_equal(picked.ref_log_probs, np.concatenate([scores[7:9], scores[0:2]]))
    np.testing.assert_array_equal(scores[built.places(np.array([4, 0]))], picked.ref_log_probs)
    assert RolloutSamplingMask.concatenate([scored.select(range(2)), scored.select(range(2, 5))]) == scored
    assert RolloutSamplingMask.concatenate([scored, built]).ref_log_probs is None
    for wrong, message in (
        (scores[1:], "8 ref_log_probs for 9 ids"),
        (scores - 1, "ref_log_probs of row . have a sum"),
    ):
        with pytest.raises(ValueError, match=message):
            built.with_ref_log_probs(wrong)


def test_concatenating_different_vocabularies_is_refused():
    with pytest.raises(ValueError, match="vocabularies differ"):
        RolloutSamplingMask.concatenate([mask(), RolloutSamplingMask.from_rows([[1]], vocab_size=9)])


def test_the_sampled_token_must_be_in_its_row():
    mask().require_tokens(np.array([1, 4, 2, 7, 6]))
    with pytest.raises(ValueError, match="token 0 at response index 3 is not in its own row"):
        mask().require_tokens(np.array([1, 4, 2, 0, 6]))
