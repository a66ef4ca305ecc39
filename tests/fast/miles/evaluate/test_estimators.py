"""pass@k and best of k equal what they estimate: the share, or the mean, over all subsets of k samples."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.evaluate.estimators import best_of_k, pass_at_k, sizes

TABLES = st.lists(st.booleans(), min_size=1, max_size=9)
REWARDS = st.lists(st.floats(-4.0, 4.0, allow_nan=False), min_size=1, max_size=8)


@given(solved=TABLES, data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_solved_sample(solved, data) -> None:
    k = data.draw(st.integers(1, len(solved)))
    subsets = list(itertools.combinations(solved, k))
    assert pass_at_k(len(solved), sum(solved), k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@given(n=st.integers(1, 300), data=st.data())
def test_pass_at_k_is_the_closed_form(n, data) -> None:
    solved, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    # The product form of 1 - C(n-c, k) / C(n, k), with exact fractions.
    missed = math.prod((1 - Fraction(k, i) for i in range(n - solved + 1, n + 1)), start=Fraction(1))
    expected = 1 - missed if n - solved >= k else Fraction(1)
    assert pass_at_k(n, solved, k) == pytest.approx(float(expected), abs=1e-12)


@given(rewards=REWARDS, data=st.data())
def test_best_of_k_is_the_mean_of_the_largest_over_all_subsets(rewards, data) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    largest = [max(subset) for subset in itertools.combinations(rewards, k)]
    assert best_of_k(rewards, k) == pytest.approx(math.fsum(largest) / len(largest), abs=1e-9)


@settings(max_examples=50)
@given(solved=st.lists(st.booleans(), min_size=1, max_size=40), data=st.data())
def test_best_of_k_of_rewards_that_are_0_or_1_is_pass_at_k(solved, data) -> None:
    k = data.draw(st.integers(1, len(solved)))
    best = best_of_k([float(right) for right in solved], k)
    assert best == pytest.approx(pass_at_k(len(solved), sum(solved), k), abs=1e-9)


def test_large_tables_neither_overflow_nor_lose_the_small_share() -> None:
    assert pass_at_k(1024, 1, 512) == 0.5
    assert best_of_k([0.0] * 1023 + [1.0], 512) == pytest.approx(0.5)


@pytest.mark.parametrize(("samples", "solved", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_what_cannot_be_estimated_is_refused(samples, solved, k) -> None:
    with pytest.raises(ValueError, match=r"cannot be solved|a prompt has 4 samples"):
        pass_at_k(samples, solved, k)


def test_reported_sizes_are_powers_of_two_and_all_samples() -> None:
    assert [sizes(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
