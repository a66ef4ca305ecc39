"""The engine's computing thread: runs the batch when it may, and commands (pause, abort, update) between two steps.

Everything that touches model, cache or queue happens on the thread of `run`; public methods post to it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Literal

import torch

from miles.rollout.engines.embedded.batch import Batch
from miles.rollout.engines.embedded.gate import GateState, ServingGate
from miles.rollout.engines.embedded.requests import EngineRequest, Job, Refusal

PauseMode = Literal["abort", "retract", "in_place"]
CALL_TIMEOUT_S = 120.0


class Scheduler:
    """Thread-safe front of a `Batch`; implements `WeightHost`."""

    def __init__(self, batch: Batch, *, after_update: Callable[[], object] = lambda: None) -> None:
        """`after_update` runs when all weights of an update are in place, before any of them is used."""
        self.after_update = after_update
        self._batch = batch
        self.gate = ServingGate(batch.version)
        self.gate.listener = self._wake
        self.paused = False
        self.failure: str | None = None
        self._inbox: deque[Callable[[], object]] = deque()
        self._wakeup = threading.Condition()
        self._stopping = False

    def submit(self, job: Job) -> None:
        """Queue all requests of the job; each is settled later, or at once when the engine refuses."""
        self._post(lambda: self._enqueue(job))

    def abort(self, matches: Callable[[str], bool]) -> Future[int]:
        """End the requests with matching ids, with what they have; the number of them."""
        return self._call(lambda: self._batch.end_where(lambda r: matches(r.rid), "aborted by request"))

    def abort_requests(self, requests: list[EngineRequest]) -> None:
        """Their client is gone."""
        wanted = set(map(id, requests))
        self._post(lambda: self._batch.end_where(lambda r: id(r) in wanted, "client disconnected"))

    def pause(self, mode: PauseMode) -> Future[None]:
        """`abort` ends everything with partial output, `retract` re-queues and drops caches, `in_place` freezes."""
        return self._call(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        return self._call(lambda: setattr(self, "paused", False))

    def flush(self) -> Future[bool]:
        """Drop cached prefixes; False while requests run."""
        return self._call(self._flush_if_idle)

    def release_memory(self, tags: list[str]) -> Future[bool]:
        """Free `kv_cache` or `weights`; False while requests run. Without weights the engine is dirty."""
        return self._call(lambda: self._release(tags))

    def resume_memory(self, tags: list[str]) -> Future[None]:
        """Allocate again. Weights come back empty: the engine serves after a whole weight sync."""
        return self._call(lambda: self._restore(tags))

    def stop(self) -> None:
        self._stopping = True
        self._wake()

    def load(self) -> dict[str, int]:
        """Counts for `/server_info`; a snapshot, not synchronised."""
        batch = self._batch
        return {
            "running": batch.running,
            "waiting": len(batch.waiting),
            "early": len(batch.early),
            "tokens_generated": batch.tokens_generated,
            "cached_tokens": batch.pool.cached_tokens,
        }

    # WeightHost

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._batch.model.parameters()

    def aliases(self) -> Mapping[str, str]:
        return self._batch.model.aliases()

    @property
    def weight_version(self) -> int:
        return self.gate.get().version

    @property
    def gate_state(self) -> GateState:
        return self.gate.get()

    def begin_update(self) -> None:
        self._call(lambda: self.gate.set("updating")).result(CALL_TIMEOUT_S)

    def finish_update(self, version: int) -> None:
        self._call(lambda: self._finish_update(version)).result(CALL_TIMEOUT_S)

    def fail_update(self, reason: str) -> None:
        self._call(lambda: self._fail_update(reason)).result(CALL_TIMEOUT_S)

    def flush_caches(self) -> None:
        self._call(self._batch.pool.invalidate).result(CALL_TIMEOUT_S)

    def cached_prefix_tokens(self) -> int:
        return self._batch.pool.cached_tokens

    # the computing thread

    def run(self) -> None:
        """Loop until `stop`. An exception refuses everything from then on; the process stays to say why."""
        with torch.inference_mode():
            while not self._stopping:
                with self._wakeup:
                    while not self._stopping and not self._inbox and not self._may_compute():
                        self._wakeup.wait()
                while self._inbox:
                    self._inbox.popleft()()
                if self._may_compute():
                    try:
                        self._batch.step()
                    except Exception as error:
                        self.failure = f"the engine failed while computing: {type(error).__name__}: {error}; restart it"
                        self._refuse_all()
        self._batch.end_where(lambda r: True, "engine is shutting down")

    def _may_compute(self) -> bool:
        return not self.paused and not self.failure and self.gate.get().state == "serving" and self._batch.has_work

    def _enqueue(self, job: Job) -> None:
        early = any(request.min_version > self._batch.version for request in job.requests)
        refusal = self._refusal(early)
        if refusal is None:
            self._batch.add(job.requests)
            return
        for request in job.requests:
            request.settle(refusal)

    def _refusal(self, early: bool = False) -> Refusal | None:
        if self.failure:
            return Refusal(500, "engine_failed", self.failure)
        state = self.gate.get()
        # A request that arrives while paused, or that is for a later version, waits for the update's end.
        if state.refusal is None or (state.state == "updating" and (self.paused or early)):
            return None
        return Refusal(503, *state.refusal)

    def _pause(self, mode: PauseMode) -> None:
        # Idempotent: what arrived during a pause keeps waiting when the pause is asked for again.
        if mode == "abort" and (not self.paused or self._batch.running):
            # What waits for a later weight version was not to be computed now.
            version = self._batch.version
            self._batch.end_where(lambda r: r.min_version <= version, "paused with mode abort")
        elif mode == "retract":
            self._batch.retract()
        self.paused = True

    def _finish_update(self, version: int) -> None:
        self.after_update()
        self._batch.change_version(version)
        self.gate.set("serving", version=version)

    def _fail_update(self, reason: str) -> None:
        self.gate.set("dirty", reason=reason)
        self._refuse_all()

    def _refuse_all(self) -> None:
        self._batch.end_where(lambda r: True, "", self._refusal())

    def _flush_if_idle(self) -> bool:
        if self._batch.running:
            return False
        self._batch.pool.invalidate()
        return True

    def _release(self, tags: list[str]) -> bool:
        if self._batch.running:
            return False
        if "kv_cache" in tags:
            self._batch.drop_cache()
        if "weights" in tags:
            self._batch.model.store.release()
            self._fail_update("the weights were released from memory")
        return True

    def _restore(self, tags: list[str]) -> None:
        if "weights" in tags:
            self._batch.model.store.restore()
        if "kv_cache" in tags:
            self._batch.restore_cache()

    def _call(self, fn: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(fn())
            except Exception as error:
                future.set_exception(error)

        self._post(work)
        return future

    def _post(self, work: Callable[[], object]) -> None:
        with self._wakeup:
            self._inbox.append(work)
            self._wakeup.notify()

    def _wake(self) -> None:
        with self._wakeup:
            self._wakeup.notify()
