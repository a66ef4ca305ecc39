"""A run's handlers of stop signals while Ray starts, runs and is taken down."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from miles.orchestrate.stop_signals import STOP_SIGNALS, keeping_signal_handlers


@pytest.fixture(autouse=True)
def got() -> Iterator[list[int]]:
    """Signals that the run's own handlers were called for."""
    numbers: list[int] = []
    before = {number: signal.signal(number, lambda number, _: numbers.append(number)) for number in STOP_SIGNALS}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def raise_all() -> None:
    for number in STOP_SIGNALS:
        signal.raise_signal(number)


def test_handlers_come_back_when_a_library_took_them(got: list[int]) -> None:
    with keeping_signal_handlers() as taken:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        taken()
        raise_all()
    assert got == [*STOP_SIGNALS]


def test_signals_are_ignored_while_stops_run_and_heard_before_and_after(got: list[int]) -> None:
    with keeping_signal_handlers(raise_all):
        raise_all()
    assert got == [*STOP_SIGNALS]
    raise_all()
    assert got == [*STOP_SIGNALS] * 2


def test_stops_run_in_their_order_and_one_that_fails_keeps_no_other_from_running(got: list[int]) -> None:
    order: list[str] = []

    def fail() -> None:
        order.append("first")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        with keeping_signal_handlers(fail, lambda: order.append("second")):
            pass
    assert order == ["first", "second"]
    raise_all()
    assert got == [*STOP_SIGNALS]
