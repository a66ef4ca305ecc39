"""Waiting for code that may never return, such as another library's start or shutdown, no longer than a limit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

POLL_S = 0.2


class BoundedCalls:
    """Calls in one thread, one after another; who asked waits no longer than a limit, and is reached by signals.

    The thread stays until `close`, and one that is stuck ends with the process: Linux ends the processes that asked
    for it with the thread that started them, and Ray's do.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], Future[None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="bounded calls", daemon=True).start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            work, done = call
            try:
                work()
            except BaseException as error:  # of whatever kind, it belongs to the caller
                done.set_exception(error)
            else:
                done.set_result(None)

    def finishes_within(self, limit_s: float, work: Callable[[], object]) -> bool:
        """False when `work`, or a call before it, is still running after `limit_s`; its own error as it is."""
        done: Future[None] = Future()
        self._calls.put((work, done))
        deadline = time.monotonic() + limit_s
        # A signal that comes just before a wait does not end it: many short ones.
        while not wait([done], min(POLL_S, max(0.0, deadline - time.monotonic()))).done:
            if time.monotonic() >= deadline:
                return False
        done.result()
        return True

    def close(self) -> None:
        """Let the thread end after the calls that were asked for."""
        self._calls.put(None)


def finishes_within(limit_s: float, work: Callable[[], object]) -> bool:
    """False when `work` is still running after `limit_s`; its own error as it is."""
    calls = BoundedCalls()
    try:
        return calls.finishes_within(limit_s, work)
    finally:
        calls.close()
