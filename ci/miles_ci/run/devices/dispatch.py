"""Starts requests as their devices become free, in the fair order of `LeaseManager`; one thread for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from miles_ci.run.devices.slots import Lease, LeaseManager, Request

# Our own releases wake the loop at once; this is for devices that other runners give back.
POLL_S = 0.5


def dispatch(
    manager: LeaseManager,
    requests: Sequence[Request],
    work: Callable[[int, Lease], None],
    *,
    stopped: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Call `work(place, lease)` once for each request, in a thread of its own, and return when all calls are over.

    `requests` are in start order. The lease is released when `work` returns. Returns the places that were never
    started because `stopped()` became true; what runs then is still waited for.
    """
    pending = list(range(len(requests)))
    changed = threading.Condition()
    threads: list[threading.Thread] = []
    releases = 0

    def guarded(place: int, lease: Lease) -> None:
        nonlocal releases
        try:
            work(place, lease)
        finally:
            lease.release()
            with changed:
                releases += 1
                changed.notify_all()

    while pending and not stopped():
        with changed:
            before = releases
        granted = manager.acquire_next([requests[place] for place in pending])
        if granted is None:
            with changed:
                # A release between the attempt and here must not be slept over.
                if releases == before:
                    changed.wait(POLL_S)
            continue
        index, lease = granted
        place = pending.pop(index)
        thread = threading.Thread(target=guarded, args=(place, lease), name=lease.request.label)
        threads.append(thread)
        thread.start()
    manager.close()
    for thread in threads:
        # In short waits, so that the main thread can still take signals.
        while thread.is_alive():
            thread.join(POLL_S)
    return pending
