"""`Coverage` against a counter per element."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.rollout.engines.embedded.weight_coverage import MAX_PIECES, Coverage


@st.composite
def shapes_and_slots(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    slots = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=4).map(tuple)
    return shape, draw(st.lists(st.none() | slots, max_size=12))


@settings(max_examples=400)
@given(shapes_and_slots())
def test_a_slot_is_taken_once_and_completeness_counts_elements(case):
    shape, slots = case
    coverage, count = Coverage(shape), np.zeros(shape, dtype=int)
    for slot in slots:
        box = slot or ()
        fits = len(box) <= len(shape) and all(a < b <= n for (a, b), n in zip(box, shape, strict=False))
        where = tuple(slice(a, b) for a, b in box) if fits else ()
        refused = not fits or count[where].any()
        assert (coverage.refusal(slot) is not None) == bool(refused), slot
        if not refused:
            coverage.add(slot)
            count[where] += 1
        assert coverage.covered == count.sum()
        assert coverage.complete == bool(count.all())
    rows = np.flatnonzero((count == 0).reshape(shape[0], -1).any(axis=1))
    named = [range(int(a), int(b)) for a, b in _intervals(coverage.gaps(most=99))]
    assert [row for interval in named for row in interval] == rows.tolist()


def _intervals(text):
    import re

    return re.findall(r"\[(\d+), (\d+)\)", text)


def test_one_row_of_a_matrix_is_not_the_matrix():
    coverage = Coverage((3, 2))
    coverage.add(((0, 1),))
    assert not coverage.complete
    assert coverage.gaps() == "4 of 6 elements, in rows [1, 3)"


def test_neighbours_along_an_inner_dimension_do_not_overlap():
    coverage = Coverage((2, 4))
    for slot in (((0, 2), (0, 1)), ((0, 1), (1, 4)), ((1, 2), (1, 4))):
        assert coverage.refusal(slot) is None
        coverage.add(slot)
    assert coverage.complete


def test_a_long_slot_is_seen_behind_later_short_ones():
    coverage = Coverage((10, 2))
    for slot in (((0, 9), (0, 1)), ((7, 8), (1, 2))):
        coverage.add(slot)
    assert coverage.refusal(((8, 9), (0, 2))) is not None


def test_pieces_are_bounded():
    coverage = Coverage((MAX_PIECES + 1,))
    for row in range(MAX_PIECES):
        coverage.add(((row, row + 1),))
    assert "pieces" in coverage.refusal(((MAX_PIECES, MAX_PIECES + 1),))


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3)])
def test_a_whole_destination_is_complete_in_one(shape):
    coverage = Coverage(shape)
    coverage.add(None)
    assert coverage.complete
