"""State of the sequences in the batch, as arrays with one row a slot, so that a step costs no Python per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from miles.rollout.engines.embedded.pages import PAGE, SCRATCH
from miles.rollout.engines.embedded.requests import EngineRequest
from miles.rollout.engines.embedded.sampling import SamplingRows

# In a slot that is free: nothing may be read of it.
_NOBODY: Any = None


class Slots:
    """Arrays of `capacity` rows. `length` counts prompt plus drawn tokens; the last drawn one is not cached yet."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = list(range(capacity - 1, -1, -1))
        # None (never read) where the slot is free.
        self.request: list[EngineRequest] = [_NOBODY] * capacity
        self.pages: list[list[int]] = [[] for _ in range(capacity)]
        self.length = np.zeros(capacity, dtype=np.int64)
        self.last_token = np.zeros(capacity, dtype=np.int64)
        self.produced = np.zeros(capacity, dtype=np.int64)
        self.max_new = np.zeros(capacity, dtype=np.int64)
        self.generation = np.zeros(capacity, dtype=np.int64)
        self.temperature = np.zeros(capacity, dtype=np.float32)
        self.top_p = np.ones(capacity, dtype=np.float64)
        self.top_k = np.zeros(capacity, dtype=np.int64)
        self.min_p = np.zeros(capacity, dtype=np.float64)
        self.seed = np.zeros(capacity, dtype=np.uint64)
        self.want_support = np.zeros(capacity, dtype=bool)
        self.stops = np.full((capacity, 4), -1, dtype=np.int64)
        self.tables = np.full((capacity, 4), SCRATCH, dtype=np.int64)
        self.tokens = np.zeros((capacity, 64), dtype=np.int64)
        self.log_probs = np.zeros((capacity, 64), dtype=np.float32)

    def take(self, request: EngineRequest, pages: list[int]) -> int:
        """Reserve a slot; `fill` must follow before anything is computed in it."""
        slot = self.free.pop()
        self.request[slot] = request
        self.pages[slot] = pages
        return slot

    def fill(self, slots: list[int], generation: int) -> None:
        """Write the rows of slots just taken, all at once."""
        requests = [self.request[slot] for slot in slots]
        params = [r.sampling for r in requests]
        pages = [self.pages[slot] for slot in slots]
        index = np.array(slots, dtype=np.int64)
        self.stops = _widened(self.stops, max(len(p.stop_ids) for p in params), -1)
        self.tables = _widened(self.tables, max(map(len, pages)), SCRATCH)
        longest = max(p.max_new for p in params)
        self.tokens = _widened(self.tokens, longest, 0)
        self.log_probs = _widened(self.log_probs, longest, 0)
        carried = np.array([len(r.carried_tokens) for r in requests])
        self.length[index] = carried + [len(r.input_ids) for r in requests]
        self.produced[index] = carried
        self.max_new[index] = [p.max_new for p in params]
        self.generation[index] = generation
        self.temperature[index] = [p.temperature for p in params]
        self.top_p[index] = [p.top_p for p in params]
        self.top_k[index] = [p.top_k for p in params]
        self.min_p[index] = [p.min_p for p in params]
        self.seed[index] = np.array([r.seed for r in requests], dtype=np.uint64)
        self.want_support[index] = [r.want_support for r in requests]
        self.stops[index] = _rectangle([p.stop_ids for p in params], self.stops.shape[1], -1)
        self.tables[index] = _rectangle(pages, self.tables.shape[1], SCRATCH)
        for i in np.flatnonzero(carried):
            n, slot = int(carried[i]), slots[i]
            self.tokens[slot, :n] = requests[i].carried_tokens
            self.log_probs[slot, :n] = requests[i].carried_log_probs

    def give_back(self, slot: int) -> list[int]:
        """Free the slot; returns its pages, which the caller releases."""
        pages, self.pages[slot], self.request[slot] = self.pages[slot], [], _NOBODY
        self.free.append(slot)
        return pages

    def sampling(self, slots: np.ndarray) -> SamplingRows:
        return SamplingRows(
            self.temperature[slots],
            self.top_p[slots],
            self.top_k[slots],
            self.min_p[slots],
            self.seed[slots],
            self.length[slots],
            self.want_support[slots],
        )

    def append(self, slots: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Record one drawn token a slot; returns (stopped by a stop token, out of budget), bool each."""
        at = self.produced[slots]
        self.tokens[slots, at] = tokens
        self.log_probs[slots, at] = log_probs
        self.produced[slots] = at + 1
        self.length[slots] += 1
        self.last_token[slots] = tokens
        stopped = (tokens[:, None] == self.stops[slots]).any(axis=1)
        return stopped, at + 1 >= self.max_new[slots]

    def cached_content(self, slot: int) -> list[bytes]:
        """Tokens of each full page whose keys and values are complete; empty when no page filled since the prompt."""
        request = self.request[slot]
        complete = int(self.length[slot]) - 1
        if complete // PAGE == len(request.input_ids) // PAGE:
            return []
        tokens = np.concatenate((request.input_ids, self.tokens[slot, : int(self.produced[slot])]))[:complete]
        return page_contents(tokens)


def page_contents(tokens: np.ndarray) -> list[bytes]:
    """int64 [n] -> the bytes of each full page."""
    full = len(tokens) // PAGE
    if not full:
        return []
    raw = np.ascontiguousarray(tokens[: full * PAGE]).tobytes()
    size = PAGE * 8
    return [raw[i : i + size] for i in range(0, len(raw), size)]


def _widened(array: np.ndarray, columns: int, fill: int) -> np.ndarray:
    if columns <= array.shape[1]:
        return array
    wider = np.full((array.shape[0], max(columns, 2 * array.shape[1])), fill, dtype=array.dtype)
    wider[:, : array.shape[1]] = array
    return wider


def _rectangle(rows: Sequence[Sequence[int]], columns: int, fill: int) -> np.ndarray:
    """Rows of different lengths as int64 [n, columns]."""
    lengths = np.array([len(row) for row in rows])
    table = np.full((len(rows), columns), fill, dtype=np.int64)
    table[np.arange(columns)[None, :] < lengths[:, None]] = np.fromiter(chain.from_iterable(rows), np.int64)
    return table
