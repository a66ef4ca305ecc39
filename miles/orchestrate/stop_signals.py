"""Signals that end a run, kept from libraries that take them and ignored while the run is taken down."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def keeping_signal_handlers(*stops: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Ray takes SIGTERM for itself, also without Python's knowledge: call what is yielded when it has.

    `stops` run at the end, all of them, with signals ignored: a second Ctrl-C must not keep Ray from being stopped. Each
    of them has to be bounded.
    """
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with contextlib.ExitStack() as last:
        last.callback(_set_handlers, handlers)
        for stop in reversed(stops):
            last.callback(stop)
        last.callback(_set_handlers, dict.fromkeys(STOP_SIGNALS, signal.SIG_IGN))
        yield lambda: _set_handlers(handlers)


def _set_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    """Only the main thread may set handlers."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)
