"""The engine process's side of `process`: the one-line report, and ending together with the parent."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PARENT_POLL_S = 0.25


def say(report: Any, message: dict[str, Any]) -> None:
    """Write the report's line; a pipe is closed after it."""
    report.write(json.dumps(message) + "\n")
    report.flush()
    if report is not sys.stdout:
        report.close()


def end_with_parent(parent: int) -> None:
    """Exit at once when process `parent` is no longer ours; 0: never."""
    _watch(parent, lambda: os._exit(0))


def end_group_with_parent(parent: int) -> None:
    """Kill the whole process group when process `parent` is no longer ours; 0: never."""
    _watch(parent, lambda: os.killpg(os.getpgid(0), signal.SIGKILL))


def _watch(parent: int, end: Callable[[], None]) -> None:
    # Polling, not a death signal: that one fires when the parent's *thread* ends.
    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        end()

    if parent:
        threading.Thread(target=poll, daemon=True).start()
