"""The sequences in the batch: admit, prefill, decode, settle, retract, end. One thread; knows no pause, no HTTP.

A request gets all pages it may ever need before it starts, so no request is preempted because of another one and
its result depends on nothing but itself. Requests start in order of arrival. Identical prompts that arrive together
are computed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from miles.rollout.engines.embedded.attention import ROW_BLOCK, KVCache
from miles.rollout.engines.embedded.models import Model
from miles.rollout.engines.embedded.pages import PAGE, PagePool
from miles.rollout.engines.embedded.requests import EngineRequest, Output, Refusal
from miles.rollout.engines.embedded.sampling import draw
from miles.rollout.engines.embedded.slots import Slots, page_contents


@dataclass(slots=True)
class _Prefill:
    """A prompt being computed: `done` of its tokens are cached. `followers` wait for the same content."""

    slot: int
    tokens: np.ndarray
    done: int
    version: int
    key: tuple[int, bytes]
    followers: list[int] = field(default_factory=list)


class Batch:
    """Model, cache, queue and slots. `version` is the weight version that computes now."""

    def __init__(
        self, model: Model, *, max_running: int, max_total_tokens: int, max_prefill_tokens: int, share_prefixes: bool,
        version: int,
    ) -> None:  # fmt: skip
        self.model = model
        self.version = version
        self.max_prefill_tokens = max_prefill_tokens
        self._page_count = -(-max_total_tokens // PAGE) + 1
        self._share = share_prefixes
        self.pool = PagePool(self._page_count, share_prefixes=share_prefixes)
        self.cache: KVCache | None = self._new_cache()
        self.slots = Slots(max_running)
        self.waiting: deque[EngineRequest] = deque()
        # Requests for a weight version that has not come yet, in order of arrival.
        self.early: list[EngineRequest] = []
        self.prefills: deque[_Prefill] = deque()
        self.active = np.empty(0, dtype=np.int64)
        self.tokens_generated = 0
        self._leaders: dict[tuple[int, bytes], _Prefill] = {}

    @property
    def running(self) -> int:
        return len(self.active) + sum(1 + len(p.followers) for p in self.prefills)

    @property
    def has_work(self) -> bool:
        return bool(self.cache is not None and (self.waiting or self.prefills or len(self.active)))

    def add(self, requests: Iterable[EngineRequest]) -> None:
        """Queue requests; one for a later weight version waits until `change_version` brings it."""
        for request in requests:
            (self.waiting if request.min_version <= self.version else self.early).append(request)

    def step(self) -> None:
        """Start what fits, then one prefill pass and one decode pass."""
        self._admit()
        if self.prefills:
            self._prefill()
        if len(self.active):
            self._decode()

    def retract(self) -> None:
        """Running requests go back to the front of the queue, in order; what they produced is kept."""
        requests = []
        for slot in self.active.tolist():
            request = self.slots.request[slot]
            self._hold_output(slot, request)
            self.pool.release(self.slots.give_back(slot))
            requests.append(request)
        self.active = self.active[:0]
        for entry in self.prefills:
            requests += self._unwind(entry)
        self.prefills.clear()
        self.waiting.extendleft(reversed(requests))

    def _unwind(self, entry: _Prefill) -> list[EngineRequest]:
        self._leaders.pop(entry.key, None)
        requests = []
        for slot in (entry.slot, *entry.followers):
            requests.append(self.slots.request[slot])
            self.pool.release(self.slots.give_back(slot))
        return requests

    def end_where(self, matches: Callable[[EngineRequest], bool], why: str, refusal: Refusal | None = None) -> int:
        """Settle the matching requests with what they produced, or with `refusal`; the number of them."""
        finish = {"type": "abort", "message": why}
        ended: list[EngineRequest] = []
        kept: deque[_Prefill] = deque()
        for entry in self.prefills:
            if any(matches(self.slots.request[s]) for s in (entry.slot, *entry.followers)):
                # The others of the entry start over.
                self.waiting.extendleft(reversed(self._unwind(entry)))
            else:
                kept.append(entry)
        self.prefills = kept
        stopped = [s for s in self.active.tolist() if matches(self.slots.request[s])]
        for slot in stopped:
            request = self.slots.request[slot]
            self._hold_output(slot, request)
            self.pool.release(self.slots.give_back(slot))
            ended.append(request)
        if stopped:
            self.active = self.active[~np.isin(self.active, stopped)]
        ended += [r for r in (*self.waiting, *self.early) if matches(r)]
        self.waiting = deque(r for r in self.waiting if not matches(r))
        self.early = [r for r in self.early if not matches(r)]
        for request in ended:
            request.settle(refusal or self._output(request, finish))
        return len(ended)

    def change_version(self, version: int) -> None:
        """The weights changed under what is still running: note which tokens the old ones drew, drop cached prefixes."""
        self.pool.invalidate()
        self._leaders.clear()
        for slot in self.active.tolist():
            self._close_span(self.slots.request[slot], int(self.slots.produced[slot]))
        for request in self.waiting:
            self._close_span(request, len(request.carried_tokens))
        self.version = version
        due, self.early = self.early, []
        self.add(due)

    def drop_cache(self) -> None:
        self.pool.invalidate()
        self.cache = None

    def restore_cache(self) -> None:
        if self.cache is None:
            self.cache = self._new_cache()

    def _admit(self) -> None:
        slots, pool, version = self.slots, self.pool, self.version
        taken: list[int] = []
        while self.waiting and slots.free:
            request = self.waiting[0]
            tokens = request.input_ids
            if request.carried_tokens:
                tokens = np.concatenate((tokens, np.array(request.carried_tokens, dtype=np.int64)))
            key = (version, tokens.tobytes())
            leader = self._leaders.get(key)
            if leader is not None:
                shared = slots.pages[leader.slot][: len(tokens) // PAGE]
                pool.share(shared)
            else:
                shared = pool.match(version, page_contents(tokens[:-1]))
            total = -(-(len(request.input_ids) + request.sampling.max_new) // PAGE)
            if total - len(shared) > pool.available:
                pool.release(shared)
                break
            self.waiting.popleft()
            slot = slots.take(request, shared + pool.alloc(total - len(shared)))
            taken.append(slot)
            if leader is not None:
                leader.followers.append(slot)
                request.cached_tokens = len(tokens)
                continue
            request.cached_tokens = len(shared) * PAGE
            entry = _Prefill(slot, tokens, len(shared) * PAGE, version, key)
            self._leaders[key] = entry
            self.prefills.append(entry)
        if taken:
            slots.fill(taken, version)

    def _prefill(self) -> None:
        """One forward pass over at most `max_prefill_tokens` prompt tokens."""
        room, chosen, counts = self.max_prefill_tokens, [], []
        for entry in self.prefills:
            if room == 0:
                break
            chosen.append(entry)
            counts.append(min(len(entry.tokens) - entry.done, room))
            room -= counts[-1]
        count = np.array(counts, dtype=np.int64)
        start = np.array([e.done for e in chosen], dtype=np.int64)
        tokens = np.concatenate([e.tokens[e.done : e.done + n] for e, n in zip(chosen, counts, strict=True)])
        hidden = self._forward(tokens, start, count, self.slots.tables[[e.slot for e in chosen]])
        ends, finished = np.cumsum(count) - 1, []
        for index, (entry, n) in enumerate(zip(chosen, counts, strict=True)):
            entry.done += n
            if entry.done == len(entry.tokens):
                finished.append(index)
        if finished:
            self._first_tokens([chosen[i] for i in finished], hidden, ends[finished])
            done = {id(chosen[i]) for i in finished}
            self.prefills = deque(e for e in self.prefills if id(e) not in done)

    def _first_tokens(self, entries: list[_Prefill], hidden: torch.Tensor, rows: np.ndarray) -> None:
        logits = self._logits(hidden, rows)
        members: list[int] = []
        repeats = []
        self._share_partial_pages(entries)
        for entry in entries:
            self._leaders.pop(entry.key, None)
            members += [entry.slot, *entry.followers]
            repeats.append(1 + len(entry.followers))
            if entry.version == self.version:
                contents = page_contents(entry.tokens)
                self.pool.remember(entry.version, contents, self.slots.pages[entry.slot][: len(contents)])
        slots = np.array(members, dtype=np.int64)
        self.active = np.concatenate((self.active, slots))
        self._draw(slots, logits[torch.from_numpy(np.repeat(np.arange(len(entries)), repeats)).to(logits.device)])

    def _share_partial_pages(self, entries: list[_Prefill]) -> None:
        """Followers share full pages; the page that they go on writing is copied."""
        source: list[int] = []
        target: list[int] = []
        for entry in entries:
            full = len(entry.tokens) // PAGE
            if len(entry.tokens) % PAGE:
                source += [self.slots.pages[entry.slot][full]] * len(entry.followers)
                target += [self.slots.pages[slot][full] for slot in entry.followers]
        if source:
            assert self.cache is not None
            self.cache.copy_pages(source, target)

    def _decode(self) -> None:
        slots = self.active
        start = self.slots.length[slots] - 1
        hidden = self._forward(
            self.slots.last_token[slots], start, np.ones(len(slots), dtype=np.int64), self.slots.tables[slots]
        )
        self._draw(slots, self._logits(hidden, None)[: len(slots)])

    def _forward(self, tokens: np.ndarray, start: np.ndarray, count: np.ndarray, tables: np.ndarray) -> torch.Tensor:
        assert self.cache is not None
        rows = -(-len(tokens) // ROW_BLOCK) * ROW_BLOCK
        plan = self.cache.plan(start, count, tables, rows)
        padded = np.zeros(rows, dtype=np.int64)
        padded[: len(tokens)] = tokens
        ids = torch.from_numpy(padded).to(self.model.device)
        return self.model.hidden_states(ids, plan.positions, plan.attend)

    def _logits(self, hidden: torch.Tensor, rows: np.ndarray | None) -> torch.Tensor:
        if rows is not None:
            padded = np.zeros(-(-len(rows) // ROW_BLOCK) * ROW_BLOCK, dtype=np.int64)
            padded[: len(rows)] = rows
            hidden = hidden[torch.from_numpy(padded).to(hidden.device)]
        logits = self.model.logits(hidden)
        return logits if rows is None else logits[: len(rows)]

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
        current = (slots.kv_version[over] == self.version).tolist()
        for i, (slot, n, has_stopped) in enumerate(zip(over.tolist(), counts, stopped.tolist(), strict=True)):
            request = slots.request[slot]
            request.carried_tokens, request.carried_log_probs = tokens[i][:n], log_probs[i][:n]
            if self._share and current[i]:
                contents = slots.cached_content(slot)
                pool.remember(self.version, contents, slots.pages[slot][: len(contents)])
            pool.release(slots.give_back(slot))
            if has_stopped:
                finish: dict[str, Any] = {"type": "stop", "matched": tokens[i][n - 1]}
            else:
                finish = {"type": "length", "length": n}
            request.settle(self._output(request, finish))

    def _settle_broken(self, slot: int) -> None:
        request = self.slots.request[slot]
        pages = self.slots.give_back(slot)
        assert self.cache is not None
        self.cache.wipe_pages(self.pool.forget_private(pages))
        self.pool.release(pages)
        text = f"logits are not finite at weight version {self.version}; the weights hold NaN or Inf"
        request.settle(Refusal(500, "nonfinite_logits", text))

    def _hold_output(self, slot: int, request: EngineRequest) -> None:
        n = int(self.slots.produced[slot])
        request.carried_tokens = self.slots.tokens[slot, :n].tolist()
        request.carried_log_probs = self.slots.log_probs[slot, :n].tolist()

    def _output(self, request: EngineRequest, finish: dict[str, Any]) -> Output:
        self._close_span(request, len(request.carried_tokens))
        return Output(
            tokens=request.carried_tokens,
            log_probs=request.carried_log_probs,
            finish=finish,
            cached_tokens=request.cached_tokens,
            spans=request.spans or [(self.version, 0)],
            support=request.support if request.want_support else None,
        )

    def _close_span(self, request: EngineRequest, produced: int) -> None:
        rest = produced - sum(count for _, count in request.spans)
        if rest:
            request.spans.append((self.version, rest))

    def _new_cache(self) -> KVCache:
        m = self.model
        return KVCache(
            layers=m.num_layers, kv_heads=m.num_kv_heads, heads=m.num_heads, head_dim=m.head_dim,
            pages=self._page_count, dtype=m.dtype, device=m.device,
        )  # fmt: skip
