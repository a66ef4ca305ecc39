"""State of the sequences in the batch, as arrays with one row a slot, so that a step costs no Python per sequence."""

from __future__ import annotations

import numpy as np

from miles.rollout.engines.embedded.pages import PAGE, SCRATCH
from miles.rollout.engines.embedded.requests import EngineRequest
from miles.rollout.engines.embedded.sampling import SamplingRows


class Slots:
    """Arrays of `capacity` rows. `length` counts prompt plus drawn tokens; the last drawn one is not cached yet."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = list(range(capacity - 1, -1, -1))
        self.request: list[EngineRequest | None] = [None] * capacity
        self.pages: list[list[int]] = [[] for _ in range(capacity)]
        self.length = np.zeros(capacity, dtype=np.int64)
        self.last_token = np.zeros(capacity, dtype=np.int64)
        self.produced = np.zeros(capacity, dtype=np.int64)
        self.max_new = np.zeros(capacity, dtype=np.int64)
        self.kv_version = np.zeros(capacity, dtype=np.int64)
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

    def take(self, request: EngineRequest, pages: list[int], version: int) -> int:
        slot = self.free.pop()
        self.request[slot] = request
        self.pages[slot] = pages
        self.stops = _widened(self.stops, len(request.stop_ids), -1)
        self.tables = _widened(self.tables, len(pages), SCRATCH)
        # One more than max_new: a retraction may come right after the last token that fits.
        self.tokens = _widened(self.tokens, request.max_new, 0)
        self.log_probs = _widened(self.log_probs, request.max_new, 0)
        carried = len(request.carried_tokens)
        self.length[slot] = len(request.input_ids) + carried
        self.produced[slot] = carried
        if carried:
            self.tokens[slot, :carried] = request.carried_tokens
            self.log_probs[slot, :carried] = request.carried_log_probs
        self.max_new[slot] = request.max_new
        self.kv_version[slot] = version
        self.temperature[slot] = request.temperature
        self.top_p[slot] = request.top_p
        self.top_k[slot] = request.top_k
        self.min_p[slot] = request.min_p
        self.seed[slot] = request.seed
        self.want_support[slot] = request.want_support
        self.stops[slot] = -1
        self.stops[slot, : len(request.stop_ids)] = request.stop_ids
        self.tables[slot] = SCRATCH
        self.tables[slot, : len(pages)] = pages
        return slot

    def give_back(self, slot: int) -> list[int]:
        """Free the slot; returns its pages, which the caller releases."""
        pages, self.pages[slot], self.request[slot] = self.pages[slot], [], None
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
        """Tokens of each full page whose keys and values are complete."""
        request = self.request[slot]
        assert request is not None
        produced = int(self.produced[slot])
        complete = int(self.length[slot]) - 1
        tokens = np.concatenate((request.input_ids, self.tokens[slot, :produced]))[:complete]
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
