"""A run's coroutine to its end, called from a plain program, a coroutine or a notebook, whose loop runs already."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import signal
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """What `main` returns or raises. Where this thread has a running loop, `main` gets one in a thread beside it while
    this one waits; Ctrl-C cancels `main`, waits for what it takes down, and raises `KeyboardInterrupt`.
    """
    if not _has_loop():
        return asyncio.run(main)
    outcome: Future[T] = Future()
    running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def announced() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.set_result((asyncio.get_running_loop(), task))
        return await main

    def target() -> None:
        try:
            outcome.set_result(asyncio.run(announced()))
        except BaseException as error:
            outcome.set_exception(error)

    # The context says which cell of a notebook the output belongs to.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(target,), name="miles-run")
    thread.start()
    try:
        return outcome.result()
    except KeyboardInterrupt:
        with _ignoring_interrupts():
            loop, task = running.result()
            with contextlib.suppress(RuntimeError):  # closed: it had just ended
                loop.call_soon_threadsafe(task.cancel)
            thread.join()
        raise
    finally:
        thread.join()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C raises `KeyboardInterrupt` in this thread, also below a running loop, which would cancel its task after we
    have returned. Nothing is changed outside of the main thread, or where the program ignores Ctrl-C."""
    if not _has_loop() or not _may_set_handlers() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    with _handler(signal.default_int_handler):
        yield


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    if _may_set_handlers():
        with _handler(signal.SIG_IGN):
            yield
    else:
        yield


@contextlib.contextmanager
def _handler(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _may_set_handlers() -> bool:
    return threading.current_thread() is threading.main_thread()


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
