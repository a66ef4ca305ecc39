"""Unbiased estimators of what k samples of a prompt would give, from n >= k samples of it. Pure functions.

pass@k: Chen et al., Evaluating Large Language Models Trained on Code (2021), equation 1. Best of k is its form for
rewards: the mean of the largest over all subsets of k samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Probability that k of `samples` samples, drawn without replacement, hold one of the `solved`: 1 - C(n-c, k) / C(n, k)."""
    _check(samples, k)
    if not 0 <= solved <= samples:
        raise ValueError(f"{solved} of {samples} samples cannot be solved")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def best_of_k(rewards: Sequence[float], k: int) -> float:
    """Mean of the largest reward over all subsets of k: sum over i of r_(i) C(i-1, k-1) / C(n, k), r ascending."""
    n = len(rewards)
    _check(n, k)
    subsets = math.comb(n, k)
    return math.fsum(
        reward * (math.comb(below, k - 1) / subsets) for below, reward in enumerate(sorted(rewards)) if below >= k - 1
    )


def sizes(samples: int) -> list[int]:
    """The k that are reported for so many samples: powers of two, and all of them."""
    return sorted({1 << power for power in range(samples.bit_length())} | {samples})


def _check(samples: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k}, but a prompt has {samples} samples")
