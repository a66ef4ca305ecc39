"""The engine's computing thread: runs the batch when it may, and commands (pause, abort, update) between two steps.

Everything that touches model, cache or queue happens on the thread of `run`; public methods post to it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from miles.rollout.engines.embedded.batch import Batch
from miles.rollout.engines.embedded.requests import EngineRequest, Job, Refusal
from miles.rollout.engines.embedded.weight_state import (
    SERVING,
    UPDATING,
    BeginUpdate,
    UpdateSession,
    WeightState,
    WeightUpdateError,
)

logger = logging.getLogger(__name__)

PAUSE_MODES = ("abort", "retract", "in_place")
_RELEASE = {"weights": "release_weights", "kv_cache": "release_cache"}
_RESUME = {"weights": "resume_weights", "kv_cache": "resume_cache"}
CALL_TIMEOUT_S = 120.0
# Whose pause `/pause_generation` is when it does not say.
USER = "user"
MAX_OWNERS = 64


class Scheduler:
    """Thread-safe front of a `Batch`; implements `WeightHost`."""

    def __init__(self, batch: Batch, *, after_update: Callable[[], object] = lambda: None) -> None:
        """`after_update` runs when all weights of an update are in place, before any of them is used."""
        self.after_update = after_update
        self._batch = batch
        self.state = WeightState(batch.version)
        self.state.listener = self._wake
        # Owner -> mode. Each ends its own pause only; the batch runs while there is none.
        self._pauses: dict[str, str] = {}
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

    @property
    def paused(self) -> bool:
        return bool(self._pauses)

    @property
    def pauses(self) -> dict[str, str]:
        """Owner -> mode of every pause that holds now."""
        return dict(self._pauses)

    def pause(self, mode: str, owner: str = USER) -> Future[None]:
        """`abort` ends everything with partial output, `retract` re-queues and drops caches, `in_place` freezes."""
        return self._call(lambda: self._pause(mode, owner))

    def resume(self, owner: str = USER) -> Future[None]:
        """End this owner's pause; others stay."""
        return self._call(lambda: self._pauses.pop(owner, None) and None)

    def flush(self) -> Future[bool]:
        """Drop cached prefixes; False while requests run."""
        return self._call(self._flush_if_idle)

    def release_memory(self, tags: Sequence[str]) -> Future[bool]:
        """Free `kv_cache` or `weights`; False while requests run. `IllegalTransition` during an update."""
        return self._call(lambda: self._release(tags))

    def resume_memory(self, tags: Sequence[str]) -> Future[None]:
        """Allocate again. Weights come back empty: the engine serves after a whole weight sync."""
        return self._call(lambda: self._restore(tags))

    def stop(self) -> None:
        self._stopping = True
        self._wake()

    def held_bytes(self) -> dict[str, int]:
        """Device memory by tag (`weights`, `kv_cache`); 0 for what is released."""
        return self._batch.held_bytes

    def load(self) -> dict[str, int]:
        """Counts for `/server_info`; a snapshot, not synchronised."""
        batch = self._batch
        return {
            "running": batch.running,
            "waiting": len(batch.queue.waiting),
            "early": len(batch.queue.early),
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
        return self.state.get().version

    def begin_update(self, begin: BeginUpdate, now: float, client: Hashable = None) -> UpdateSession:
        return self._call(lambda: self.state.begin(begin, now, client=client)).result(CALL_TIMEOUT_S)

    def finish_update(self, token: str) -> None:
        self._call(lambda: self._finish_update(token)).result(CALL_TIMEOUT_S)

    def refuse_all(self) -> None:
        self._call(self._refuse_all).result(CALL_TIMEOUT_S)

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
                    self._obey(self._inbox.popleft())
                if self._may_compute():
                    try:
                        self._batch.step()
                    except Exception as error:
                        self.failure = f"the engine failed while computing: {type(error).__name__}: {error}; restart it"
                        self._refuse_all()
        self._batch.end_where(lambda r: True, "engine is shutting down")

    @staticmethod
    def _obey(command: Callable[[], object]) -> None:
        # Commands answer their own errors; what still escapes is the command's loss, not the engine's.
        try:
            command()
        except Exception:
            logger.exception("a command failed inside the engine")

    def _may_compute(self) -> bool:
        return not self.paused and not self.failure and self.state.get().phase == SERVING and self._batch.has_work

    def _enqueue(self, job: Job) -> None:
        early = any(request.min_version > self._batch.version for request in job.requests)
        refusal = self._refusal(early)
        if refusal is None:
            try:
                self._batch.add(job.requests)
                return
            except Exception as error:
                # A request that cannot be queued is its own misfortune, not the engine's.
                refusal = Refusal(500, "request_failed", f"the request could not be queued: {error!r:.300}")
        for request in job.requests:
            request.settle(refusal)

    def _refusal(self, early: bool = False) -> Refusal | None:
        if self.failure:
            return Refusal(500, "engine_failed", self.failure)
        view = self.state.get()
        # A request that arrives while paused, or that is for a later version, waits for the update's end.
        if view.refusal is None or (view.phase == UPDATING and (self.paused or early)):
            return None
        return Refusal(503, *view.refusal)

    def _pause(self, mode: str, owner: str) -> None:
        if owner not in self._pauses and len(self._pauses) >= MAX_OWNERS:
            raise WeightUpdateError("too_many_pauses", f"{MAX_OWNERS} owners hold a pause already", fatal=False)
        # Idempotent: what arrived during a pause keeps waiting when the pause is asked for again.
        if mode == "abort" and (not self.paused or self._batch.running):
            # What waits for a later weight version was not to be computed now.
            version = self._batch.version
            self._batch.end_where(lambda r: r.min_version <= version, "paused with mode abort")
        elif mode == "retract":
            self._batch.retract()
        self._pauses[owner] = mode

    def _finish_update(self, token: str) -> None:
        begin = self.state.require_session(token).begin
        self.after_update()
        self._batch.change_version(begin.version)
        self.state.finish(token)

    def _refuse_all(self) -> None:
        self._batch.end_where(lambda r: True, "", self._refusal())

    def _flush_if_idle(self) -> bool:
        if self._batch.running:
            return False
        self._batch.pool.invalidate()
        return True

    def _release(self, tags: Sequence[str]) -> bool:
        for tag in tags:
            self.state.require(_RELEASE[tag])
        if self._batch.running:
            return False
        if "kv_cache" in tags:
            self._batch.drop_cache()
            self.state.cache_released()
        if "weights" in tags:
            self.state.weights_released()
            self._batch.model.store.release()
            self._refuse_all()
        if self._batch.model.device.type == "cuda":
            # The allocator keeps freed memory for this process: hand it to the device.
            torch.cuda.empty_cache()
        return True

    def _restore(self, tags: Sequence[str]) -> None:
        for tag in tags:
            self.state.require(_RESUME[tag])
        if "weights" in tags:
            self._batch.model.store.restore()
            self.state.weights_resumed()
        if "kv_cache" in tags:
            self._batch.restore_cache()
            self.state.cache_resumed()

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
