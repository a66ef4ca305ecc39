"""The sequences in the batch: admit, prefill, decode, settle, retract, end. One thread; knows no pause, no HTTP.

A request gets all pages it may ever need before it starts, so no request is preempted because of another one and
its result depends on nothing but itself. Requests start in order of arrival. Identical prompts that arrive together
are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from miles.rollout.engines.embedded.admission import Admission, Prefill
from miles.rollout.engines.embedded.forward import ForwardPass
from miles.rollout.engines.embedded.models import Model
from miles.rollout.engines.embedded.pages import PAGE, PagePool
from miles.rollout.engines.embedded.requests import EngineRequest, Refusal
from miles.rollout.engines.embedded.sampling import draw
from miles.rollout.engines.embedded.slots import Slots, page_contents


class Batch:
    """Model, cache, queue and slots. `version` is the weight version that computes now.

    `generation` counts the changes of the weights: what is cached belongs to one generation. A version would not do:
    another run may use the same number again.
    """

    def __init__(
        self, model: Model, *, max_running: int, max_total_tokens: int, max_prefill_tokens: int, share_prefixes: bool,
        version: int,
    ) -> None:  # fmt: skip
        self.model = model
        self.version = version
        self.generation = 0
        self.max_prefill_tokens = max_prefill_tokens
        self._share = share_prefixes
        pages = -(-max_total_tokens // PAGE) + 1
        self.pool = PagePool(pages, share_prefixes=share_prefixes)
        self._pass = ForwardPass(model, pages=pages)
        self.slots = Slots(max_running)
        self.queue = Admission(self.slots, self.pool)
        self.active = np.empty(0, dtype=np.int64)
        self.tokens_generated = 0

    @property
    def running(self) -> int:
        return len(self.active) + self.queue.started

    @property
    def has_work(self) -> bool:
        return bool(self._pass.cache is not None and (self.queue.waiting or self.queue.prefills or len(self.active)))

    def add(self, requests: Iterable[EngineRequest]) -> None:
        """Queue requests; one for a later weight version waits until `change_version` brings it."""
        self.queue.add(requests, self.version)

    def step(self) -> None:
        """Start what fits, then one prefill pass and one decode pass."""
        self.queue.admit(self.generation)
        if self.queue.prefills:
            self._prefill()
        if len(self.active):
            self._decode()

    def retract(self) -> None:
        """Running requests go back to the front of the queue, in order; what they produced is kept."""
        requests = []
        for slot in self.active.tolist():
            request = self.slots.request[slot]
            self._hold_output(slot, request)
            request.kv_spans = []
            self.pool.release(self.slots.give_back(slot))
            requests.append(request)
        self.active = self.active[:0]
        self.queue.put_back(requests + self.queue.unwind_all())

    def end_where(self, matches: Callable[[EngineRequest], bool], why: str, refusal: Refusal | None = None) -> int:
        """Settle the matching requests with what they produced, or with `refusal`; the number of them."""
        finish = {"type": "abort", "message": why}
        ended: list[EngineRequest] = []
        stopped = [s for s in self.active.tolist() if matches(self.slots.request[s])]
        for slot in stopped:
            request = self.slots.request[slot]
            self._hold_output(slot, request)
            self.pool.release(self.slots.give_back(slot))
            ended.append(request)
        if stopped:
            self.active = self.active[~np.isin(self.active, stopped)]
        ended += self.queue.take_out(matches)
        for request in ended:
            request.settle(refusal or request.output(finish, self.version))
        return len(ended)

    def change_version(self, version: int) -> None:
        """The weights changed. What is cached is dropped, a prompt that is half computed starts over; a response that
        goes on in place keeps its keys and values, and notes which tokens and positions the old weights made."""
        self.pool.invalidate()
        self.queue.put_back(self.queue.unwind_all())
        for slot in self.active.tolist():
            request = self.slots.request[slot]
            self._hold_output(slot, request)
            request.close_span(self.version)
            request.close_kv_span(self.version, int(self.slots.length[slot]) - 1)
        for request in self.queue.waiting:
            request.close_span(self.version)
        self.version = version
        self.generation += 1
        self.queue.version_came(version)

    @property
    def held_bytes(self) -> dict[str, int]:
        """Device memory by tag."""
        return {"weights": self.model.store.held_bytes, "kv_cache": self._pass.cache_bytes}

    def drop_cache(self) -> None:
        self.pool.invalidate()
        self._pass.drop_cache()

    def restore_cache(self) -> None:
        self._pass.restore_cache()

    def _prefill(self) -> None:
        """One forward pass over at most `max_prefill_tokens` prompt tokens."""
        room, chosen, counts = self.max_prefill_tokens, [], []
        for entry in self.queue.prefills:
            if room == 0:
                break
            chosen.append(entry)
            counts.append(min(len(entry.tokens) - entry.done, room))
            room -= counts[-1]
        count = np.array(counts, dtype=np.int64)
        start = np.array([e.done for e in chosen], dtype=np.int64)
        tokens = np.concatenate([e.tokens[e.done : e.done + n] for e, n in zip(chosen, counts, strict=True)])
        hidden = self._pass.hidden(tokens, start, count, self.slots.tables[[e.slot for e in chosen]])
        ends, finished = np.cumsum(count) - 1, []
        for index, (entry, n) in enumerate(zip(chosen, counts, strict=True)):
            entry.done += n
            if entry.done == len(entry.tokens):
                finished.append(index)
        if finished:
            self._first_tokens([chosen[i] for i in finished], hidden, ends[finished])

    def _first_tokens(self, entries: list[Prefill], hidden: torch.Tensor, rows: np.ndarray) -> None:
        logits = self._pass.logits(hidden, rows)
        self.queue.computed(entries)
        members: list[int] = []
        repeats = []
        self._share_partial_pages(entries)
        for entry in entries:
            members += [entry.slot, *entry.followers]
            repeats.append(1 + len(entry.followers))
            contents = page_contents(entry.tokens)
            self.pool.remember(self.generation, contents, self.slots.pages[entry.slot][: len(contents)])
        slots = np.array(members, dtype=np.int64)
        self.active = np.concatenate((self.active, slots))
        self._draw(slots, logits[torch.from_numpy(np.repeat(np.arange(len(entries)), repeats)).to(logits.device)])

    def _share_partial_pages(self, entries: list[Prefill]) -> None:
        """Followers share full pages; the page that they go on writing is copied."""
        source: list[int] = []
        target: list[int] = []
        for entry in entries:
            full = len(entry.tokens) // PAGE
            if len(entry.tokens) % PAGE:
                source += [self.slots.pages[entry.slot][full]] * len(entry.followers)
                target += [self.slots.pages[slot][full] for slot in entry.followers]
        if source:
            self._pass.held_cache.copy_pages(source, target)

    def _decode(self) -> None:
        slots = self.active
        start = self.slots.length[slots] - 1
        hidden = self._pass.hidden(
            self.slots.last_token[slots], start, np.ones(len(slots), dtype=np.int64), self.slots.tables[slots]
        )
        self._draw(slots, self._pass.logits(hidden, None)[: len(slots)])

    def _draw(self, slots: np.ndarray, logits: torch.Tensor) -> None:
        """Sample one token for each slot, record it, settle what has ended. All `slots` are active."""
        drawn = draw(logits, self.slots.sampling(slots))
        for row, value in drawn.support.items():
            self.slots.request[slots[row]].support.append(value)
        stopped, spent = self.slots.append(slots, drawn.tokens, drawn.log_probs)
        self.tokens_generated += len(slots)
        broken = ~np.isfinite(drawn.log_probs)
        ended = stopped | spent | broken
        if not ended.any():
            return
        over = slots[ended]
        self.active = self.active[~np.isin(self.active, over)]
        for slot in over[broken[ended]].tolist():
            self._settle_broken(slot)
        fine = ~broken[ended]
        self._settle(over[fine], stopped[ended][fine])

    def _settle(self, over: np.ndarray, stopped: np.ndarray) -> None:
        """Give the results of slots that ended by a stop token, or else by their budget."""
        slots, pool = self.slots, self.pool
        counts, most = slots.produced[over].tolist(), int(slots.produced[over].max(initial=0))
        tokens, log_probs = slots.tokens[over, :most].tolist(), slots.log_probs[over, :most].tolist()
        current = (slots.generation[over] == self.generation).tolist()
        for i, (slot, n, has_stopped) in enumerate(zip(over.tolist(), counts, stopped.tolist(), strict=True)):
            request = slots.request[slot]
            request.carried_tokens, request.carried_log_probs = tokens[i][:n], log_probs[i][:n]
            if self._share and current[i]:
                contents = slots.cached_content(slot)
                pool.remember(self.generation, contents, slots.pages[slot][: len(contents)])
            pool.release(slots.give_back(slot))
            if has_stopped:
                finish: dict[str, Any] = {"type": "stop", "matched": tokens[i][n - 1]}
            else:
                finish = {"type": "length", "length": n}
            request.settle(request.output(finish, self.version))

    def _settle_broken(self, slot: int) -> None:
        request = self.slots.request[slot]
        pages = self.slots.give_back(slot)
        self._pass.held_cache.wipe_pages(self.pool.forget_private(pages))
        self.pool.release(pages)
        text = f"logits are not finite at weight version {self.version}; the weights hold NaN or Inf"
        request.settle(Refusal(500, "nonfinite_logits", text))

    def _hold_output(self, slot: int, request: EngineRequest) -> None:
        n = int(self.slots.produced[slot])
        request.carried_tokens = self.slots.tokens[slot, :n].tolist()
        request.carried_log_probs = self.slots.log_probs[slot, :n].tolist()
