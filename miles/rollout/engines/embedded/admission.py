"""Who starts when: requests in order of arrival, the slots and pages they take, and the prompts being computed.

A request gets all pages it may ever need before it starts. Identical prompts that arrive together are computed once:
the first one leads, the others follow. A request that cannot be started is refused and takes no other one with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from miles.rollout.engines.embedded.pages import PAGE, PagePool
from miles.rollout.engines.embedded.requests import EngineRequest, Refusal
from miles.rollout.engines.embedded.slots import Slots, page_contents


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt being computed: `done` of its tokens are cached. `followers` wait for the same content."""

    slot: int
    tokens: np.ndarray
    done: int
    key: tuple[int, bytes]
    followers: list[int] = field(default_factory=list)


class Admission:
    """The queue and the prompts that were started. `generation`: what is cached belongs to one (see `Batch`)."""

    def __init__(self, slots: Slots, pool: PagePool) -> None:
        self.waiting: deque[EngineRequest] = deque()
        # Requests for a weight version that has not come yet, in order of arrival.
        self.early: list[EngineRequest] = []
        self.prefills: deque[Prefill] = deque()
        self._slots = slots
        self._pool = pool
        self._leaders: dict[tuple[int, bytes], Prefill] = {}

    @property
    def started(self) -> int:
        """Requests whose prompt is being computed."""
        return sum(1 + len(entry.followers) for entry in self.prefills)

    def add(self, requests: Iterable[EngineRequest], version: int) -> None:
        """Queue requests; one for a later weight version waits until `version_came`."""
        for request in requests:
            (self.waiting if request.min_version <= version else self.early).append(request)

    def version_came(self, version: int) -> None:
        due, self.early = self.early, []
        self.add(due, version)

    def put_back(self, requests: Iterable[EngineRequest]) -> None:
        """To the front of the queue, in their order."""
        self.waiting.extendleft(reversed(list(requests)))

    def computed(self, entries: Iterable[Prefill]) -> None:
        """These prompts are cached whole."""
        done = set(map(id, entries))
        for entry in self.prefills:
            if id(entry) in done:
                self._leaders.pop(entry.key, None)
        self.prefills = deque(entry for entry in self.prefills if id(entry) not in done)

    def take_out(self, matches: Callable[[EngineRequest], bool]) -> list[EngineRequest]:
        """The matching requests of the queue, those in a prompt that is being computed included."""
        for entry in list(self.prefills):
            if any(matches(self._slots.request[slot]) for slot in (entry.slot, *entry.followers)):
                # The others of the entry start over.
                self.prefills.remove(entry)
                self.put_back(self.unwind(entry))
        out = [request for request in (*self.waiting, *self.early) if matches(request)]
        self.waiting = deque(request for request in self.waiting if not matches(request))
        self.early = [request for request in self.early if not matches(request)]
        return out

    def unwind_all(self) -> list[EngineRequest]:
        requests = [request for entry in self.prefills for request in self.unwind(entry)]
        self.prefills.clear()
        return requests

    def unwind(self, entry: Prefill) -> list[EngineRequest]:
        self._leaders.pop(entry.key, None)
        requests = []
        for slot in (entry.slot, *entry.followers):
            requests.append(self._slots.request[slot])
            self._pool.release(self._slots.give_back(slot))
        return requests

    def admit(self, generation: int) -> None:
        """Start what fits. A request that cannot be started is refused; it takes no other one with it."""
        taken: list[int] = []
        while self.waiting and self._slots.free:
            request = self.waiting[0]
            try:
                slot = self._start(request, generation)
            except Exception as error:
                self.waiting.popleft()
                request.settle(_cannot_start(error))
                continue
            if slot is None:
                break
            self.waiting.popleft()
            taken.append(slot)
        if not taken:
            return
        try:
            self._slots.fill(taken, generation)
        except Exception:
            for slot in taken:
                self._fill_alone(slot, generation)

    def _start(self, request: EngineRequest, generation: int) -> int | None:
        """Slot and pages for the request and a place among the prefills; None when there is no room yet."""
        slots, pool = self._slots, self._pool
        # What depends on the request's content comes first: nothing is held yet if it fails.
        tokens = request.input_ids
        if request.carried_tokens:
            tokens = np.concatenate((tokens, np.array(request.carried_tokens, dtype=np.int64)))
        key = (generation, tokens.tobytes())
        contents = page_contents(tokens[:-1])
        total = -(-(len(request.input_ids) + request.sampling.max_new) // PAGE)
        leader = self._leaders.get(key)
        if leader is not None:
            shared = slots.pages[leader.slot][: len(tokens) // PAGE]
            pool.share(shared)
        else:
            shared = pool.match(generation, contents)
        if total - len(shared) > pool.available:
            pool.release(shared)
            return None
        slot = slots.take(request, shared + pool.alloc(total - len(shared)))
        if leader is not None:
            leader.followers.append(slot)
            request.cached_tokens = len(tokens)
            return slot
        request.cached_tokens = len(shared) * PAGE
        entry = Prefill(slot, tokens, len(shared) * PAGE, key)
        self._leaders[key] = entry
        self.prefills.append(entry)
        return slot

    def _fill_alone(self, slot: int, generation: int) -> None:
        """`fill` for one slot of a start that failed; if the fault is its own, it is given up."""
        request = self._slots.request[slot]
        if request is None:
            return  # followed one that was given up, and waits again
        try:
            self._slots.fill([slot], generation)
        except Exception as error:
            entry = next(e for e in self.prefills if slot == e.slot or slot in e.followers)
            self.prefills.remove(entry)
            self.waiting.extendleft(r for r in reversed(self.unwind(entry)) if r is not request)
            request.settle(_cannot_start(error))


def _cannot_start(error: Exception) -> Refusal:
    return Refusal(500, "request_failed", f"the request could not be started: {type(error).__name__}: {error!s:.300}")
