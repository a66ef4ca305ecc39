"""The router's view of its workers: states, who may get a request, and which one gets it. Pure; knows no HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from miles.rollout.config import RouterConfig


class WorkerState(StrEnum):
    """`suspect` workers still get requests (one missed check moves no session); `quarantined` ones do not."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class Worker:
    """One engine. `reason` says why it is not healthy, `joined` whether it was ever admitted."""

    url: str
    index: int
    state: WorkerState = WorkerState.QUARANTINED
    reason: str = "joining"
    inflight: int = 0
    failures: int = 0
    successes: int = 0
    joined: bool = False
    draining: bool = False
    weight_version: int = -1
    weight_run: str | None = None

    @property
    def eligible(self) -> bool:
        return self.state != WorkerState.QUARANTINED and not self.draining

    def describe(self) -> dict[str, object]:
        return {
            "url": self.url,
            "state": self.state.value,
            "reason": self.reason,
            "inflight": self.inflight,
            "draining": self.draining,
            "weight_version": str(self.weight_version),
            "weight_run": self.weight_run,
        }


class WorkerSet:
    """Workers in order of addition, with the routing policy.

    `required_version`: older ones are kept out, and with `required_run` those of any other run: its numbers say nothing.
    """

    def __init__(self, config: RouterConfig, urls: Iterable[str] = ()) -> None:
        self._config = config
        self._workers: dict[str, Worker] = {}
        self._added = 0
        self._turn = 0
        self.required_version = -1
        self.required_run: str | None = None
        for url in urls:
            self.add(url)

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def get(self, url: str) -> Worker | None:
        return self._workers.get(url.rstrip("/"))

    def add(self, url: str) -> Worker:
        """A new worker joins quarantined; one that is there already is returned."""
        url = url.rstrip("/")
        if url not in self._workers:
            self._workers[url] = Worker(url, self._added)
            self._added += 1
        return self._workers[url]

    def remove(self, url: str) -> Worker | None:
        return self._workers.pop(url.rstrip("/"), None)

    def pick(self, key: str | None, *, without: Iterable[str] = ()) -> Worker | None:
        """The worker for the next request, or None when none is eligible. `key`: the session, for policy session."""
        avoid = set(without)
        candidates = [w for w in self._workers.values() if w.eligible and w.url not in avoid]
        if not candidates:
            return None
        if self._config.policy == "least_inflight":
            return min(candidates, key=lambda w: (w.inflight, w.index))
        if self._config.policy == "round_robin":
            self._turn += 1
            return candidates[(self._turn - 1) % len(candidates)]
        # Rendezvous hashing: without one worker only its own keys move.
        return max(candidates, key=lambda w: hashlib.blake2b(f"{key}\0{w.url}".encode(), digest_size=8).digest())

    def succeeded(
        self, worker: Worker, *, weight_version: int, weight_state: str = "serving", run_id: str | None = None
    ) -> None:
        """A health check passed. Old or dirty weights keep a worker out however healthy its process is."""
        worker.weight_version, worker.weight_run = weight_version, run_id
        stale = weight_version < self.required_version
        stale |= self.required_run is not None and run_id != self.required_run
        if stale or weight_state not in ("serving", "updating"):
            worker.state, worker.successes = WorkerState.QUARANTINED, 0
            worker.reason = "stale_weights" if stale else f"weights_{weight_state}"
            return
        worker.failures = 0
        if worker.state == WorkerState.QUARANTINED:
            worker.successes += 1
            needed = self._config.recover_threshold if worker.joined else 1
            if worker.successes < needed:
                return
        worker.state, worker.reason, worker.successes, worker.joined = WorkerState.HEALTHY, "", 0, True

    def failed(self, worker: Worker, reason: str) -> None:
        """A health check failed, or a request could not be delivered."""
        worker.successes = 0
        worker.failures += 1
        worker.reason = reason
        if worker.failures >= self._config.fail_threshold or worker.state == WorkerState.QUARANTINED:
            worker.state = WorkerState.QUARANTINED
        else:
            worker.state = WorkerState.SUSPECT
