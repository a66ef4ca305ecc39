"""Waiting for code that may never return, such as another library's shutdown, no longer than a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable


def finishes_within(limit_s: float, work: Callable[[], object]) -> bool:
    """Run `work` in a thread of its own; False when it is still running after `limit_s`, its own errors as they are.

    A thread that is left behind ends with the process.
    """
    failure: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # of whatever kind, it belongs to the caller
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if failure:
        raise failure[0]
    return not thread.is_alive()
