"""Waits on the network whose client may leave: the wait is left to its own time limit, nothing else waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a message. `gone` is done once its connection is closed."""

    client: Hashable = None
    gone: asyncio.Future[Any] | None = None

    @property
    def left(self) -> bool:
        return self.gone is not None and self.gone.done()


NOBODY = Caller()


class ClientLeft(Exception):
    """Nobody waits for the reply any more."""


class NetworkWaits:
    """Runs bounded blocking waits in threads of their own. `abandoned`: how many still run without a client."""

    def __init__(self) -> None:
        self.abandoned = 0

    async def run(self, wait: Callable[[], T], caller: Caller) -> T:
        """The result of `wait`, or `ClientLeft` as soon as the caller is gone."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        given_up = False

        def settle(result: T | None, error: BaseException | None) -> None:
            if given_up:
                self.abandoned -= 1
            elif error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            result, failure = None, None
            try:
                result = wait()
            except BaseException as error:
                failure = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, failure)

        threading.Thread(target=work, name="network-wait", daemon=True).start()
        watched: set[asyncio.Future[Any]] = {done}
        if caller.gone is not None:
            watched.add(caller.gone)
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            return done.result()
        given_up = True
        self.abandoned += 1
        raise ClientLeft
