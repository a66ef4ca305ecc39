"""Which prompts training never sees: chosen by a hash of the prompt alone, so that no seed ever trains on them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable


def is_held_out(key: str, fraction: float) -> bool:
    """The side of a prompt of a task without end: true for `fraction` of all keys."""
    return _hash(key) < fraction * 2**32


def held_out_keys(keys: Iterable[str], fraction: float) -> frozenset[str]:
    """Of the distinct keys of a task that ends, those with the smallest hashes: `fraction` of them to the nearest
    whole number, but at least one on either side where there are two.
    """
    distinct = sorted(set(keys), key=lambda key: (_hash(key), key))
    if fraction == 0.0 or len(distinct) < 2:
        return frozenset()
    count = min(max(round(fraction * len(distinct)), 1), len(distinct) - 1)
    return frozenset(distinct[:count])


def _hash(key: str) -> int:
    return zlib.crc32(key.encode())
