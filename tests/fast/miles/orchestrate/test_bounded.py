"""Code that may never return is waited for no longer than its limit."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from miles.orchestrate.bounded import BoundedCalls, finishes_within


def test_what_finishes_and_what_does_not_are_told_apart() -> None:
    done = []
    assert finishes_within(10, lambda: done.append(1))
    assert done == [1]
    release = threading.Event()
    started = time.monotonic()
    assert not finishes_within(0.05, release.wait)
    assert time.monotonic() - started < 5
    release.set()


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt(), TimeoutError("its own")])
def test_an_error_of_whatever_kind_belongs_to_the_caller(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        finishes_within(10, fail)
    assert raised.value is error


def test_a_call_waits_for_the_one_before_it_which_may_be_late() -> None:
    release, order = threading.Event(), []
    calls = BoundedCalls()
    assert not calls.finishes_within(0.01, lambda: (release.wait(10), order.append("first")))
    assert not calls.finishes_within(0.01, lambda: order.append("second"))
    release.set()
    assert calls.finishes_within(10, lambda: order.append("third"))
    assert order == ["first", "second", "third"]
    calls.close()


def test_an_error_does_not_end_the_thread_and_close_does() -> None:
    calls, threads = BoundedCalls(), []
    with pytest.raises(SystemExit):
        calls.finishes_within(10, lambda: sys.exit(1))
    assert calls.finishes_within(10, lambda: threads.append(threading.current_thread()))
    calls.close()
    threads[0].join(10)
    assert not threads[0].is_alive()
