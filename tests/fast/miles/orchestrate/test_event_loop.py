"""A coroutine is run to its end below a running loop, and Ctrl-C takes it down there before it goes on."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from miles.orchestrate.event_loop import interruptible, run_to_end

CELL: contextvars.ContextVar[str] = contextvars.ContextVar("cell", default="none")


async def answer() -> tuple[str, bool]:
    await asyncio.sleep(0)
    return CELL.get(), threading.current_thread() is threading.main_thread()


async def broken() -> None:
    raise LookupError("in the run")


def test_without_a_loop_it_runs_in_this_thread() -> None:
    assert run_to_end(answer()) == ("none", True)
    with pytest.raises(LookupError, match="in the run"):
        run_to_end(broken())


def test_below_a_running_loop_it_has_one_of_its_own_and_this_context() -> None:
    async def outer() -> None:
        CELL.set("7")
        assert run_to_end(answer()) == ("7", False)
        with pytest.raises(LookupError, match="in the run"):
            run_to_end(broken())
        assert not [thread for thread in threading.enumerate() if thread.name == "miles-run"]

    asyncio.run(outer())


# Two Ctrl-C: the second one comes while the first is answered, and changes nothing.
INTERRUPTED = """
import asyncio, os, signal, threading, time
from miles.orchestrate.event_loop import interruptible, run_to_end

async def run():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        await asyncio.sleep(60)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.2)
        print("taken down", flush=True)

async def main():
    before = signal.getsignal(signal.SIGINT)
    try:
        with interruptible():
            run_to_end(run())
    except KeyboardInterrupt:
        print("interrupted", signal.getsignal(signal.SIGINT) is before, flush=True)
    await asyncio.sleep(0)
    print("goes on", threading.active_count(), flush=True)

asyncio.run(main())
"""


def test_an_interrupt_waits_for_what_is_taken_down_and_the_program_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=Path(__file__).parents[4],
    )
    assert done.stdout.split("\n") == ["taken down", "interrupted True", "goes on 1", ""], done.stderr
    assert done.returncode == 0


def test_handlers_are_left_alone_without_a_loop_and_where_the_program_ignores_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)

    def seen() -> object:
        with interruptible():
            return signal.getsignal(signal.SIGINT)

    async def below_a_loop() -> object:
        return seen()

    assert seen() is before
    assert asyncio.run(below_a_loop()) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert asyncio.run(below_a_loop()) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
