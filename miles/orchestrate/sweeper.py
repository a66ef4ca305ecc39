"""Program beside a driver: when the driver is gone, however it ended, end what is left of its Ray cluster.

    python sweeper.py MARK FOLDER DRIVER < pipe        (the driver, a process id, holds the pipe's other end)

Ray's own agents notice a killed driver only after a minute, one that is late writes its folder again, and a stopped
daemon lets Ray's calls wait for ever. So this program looks once a second who belongs to the run, and kills them all,
until there is none, when the pipe ends, when the driver is no longer its parent, or `STOP_LIMIT_S` after the driver
first wrote to the pipe: that it is stopping, or the number of a signal that stops it. A driver that hangs even then is
killed `DRIVER_LIMIT_S` later. At the end FOLDER is removed. Standard library only, so that it costs nothing to start;
never imported by the driver.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time

# Isolated mode leaves this folder out of the path.
sys.path.append(os.path.dirname(os.path.abspath(__file__)))
import process_mark

LOOK_S = 1.0
POLL_S = 0.2
LIMIT_S = 20.0
STOP_LIMIT_S = 15.0
# Its own bounded steps, the report of the run, and a busy machine; Ray itself gives up after 60 s.
DRIVER_LIMIT_S = 120.0
STOPPING = {ord("e"), *map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))}
# Processes that were just told to end may still start another one.
QUIET_ROUNDS = 3


class Run:
    """The processes of one run. `driver` is left alone: it ends itself."""

    def __init__(self, mark: str, folder: str, driver: int) -> None:
        self.mark, self.folder, self.driver = mark, folder, driver
        self._driver = {process for pid, process in process_mark.processes().items() if pid == driver}
        self.seen: set[process_mark.Process] = set()

    def look(self, *, open_files: bool) -> set[process_mark.Process]:
        """Who lives now; remembered by later looks."""
        found = process_mark.members(
            self.mark, self.folder, seen=self.seen, without=self._driver, open_files=open_files
        )
        self.seen = found
        return found

    def watch(self, limit_s: float | None = None) -> bool:
        """Wait for the end of the driver or of the pipe; False when its patience, or `limit_s`, ended before."""
        looked = -LOOK_S
        limit = None if limit_s is None else time.monotonic() + limit_s
        while os.getppid() == self.driver:
            if limit is not None and time.monotonic() >= limit:
                return False
            if time.monotonic() - looked >= LOOK_S:
                self.look(open_files=False)
                looked = time.monotonic()
            if select.select([sys.stdin], [], [], POLL_S)[0]:
                said = os.read(sys.stdin.fileno(), 4096)
                if not said:
                    return True
                if limit is None and STOPPING.intersection(said):
                    limit = time.monotonic() + STOP_LIMIT_S
        return True

    def end_driver(self) -> None:
        """Where all that it waited for is gone and it still hangs."""
        if os.getppid() == self.driver:
            with contextlib.suppress(OSError):
                os.write(
                    2,
                    b"error: the run hung while it was stopping and was killed; run the same command again to resume\n",
                )
            with contextlib.suppress(OSError):
                os.kill(self.driver, signal.SIGKILL)

    def sweep(self) -> None:
        """Kill every member until there is none."""
        deadline, quiet = time.monotonic() + LIMIT_S, 0
        while quiet < QUIET_ROUNDS and time.monotonic() < deadline:
            left = self.look(open_files=True)
            quiet = 0 if left else quiet + 1
            for process in left:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.02)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run = Run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    if not run.watch():
        run.sweep()
        if not run.watch(DRIVER_LIMIT_S):
            run.end_driver()
    run.sweep()
    shutil.rmtree(run.folder, ignore_errors=True)
