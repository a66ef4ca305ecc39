"""Program beside a driver: when the driver is gone, however it ended, end what is left of its Ray cluster.

    python sweeper.py MARK FOLDER DRIVER < pipe        (the driver, a process id, holds the pipe's other end)

Ray's own agents notice a killed driver only after a minute, one that is late writes its folder again, and a stopped
daemon lets Ray's shutdown wait for ever. So this program looks once a second who belongs to the run, and kills them all,
until there is none, when the pipe ends, when the driver is no longer its parent, or `STOP_LIMIT_S` after the driver
first wrote that it is stopping. Then FOLDER is removed. Standard library only, so that it costs nothing to start; never
imported by the driver.
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

    def watch(self) -> None:
        """Wait for the end of the driver, of the pipe, or of the driver's patience."""
        looked = -LOOK_S
        limit: float | None = None
        while os.getppid() == self.driver and (limit is None or time.monotonic() < limit):
            if time.monotonic() - looked >= LOOK_S:
                self.look(open_files=False)
                looked = time.monotonic()
            if select.select([sys.stdin], [], [], POLL_S)[0]:
                if not os.read(sys.stdin.fileno(), 4096):
                    return
                limit = limit or time.monotonic() + STOP_LIMIT_S

    def sweep(self) -> None:
        """Kill every member until there is none, then remove the folder."""
        deadline, quiet = time.monotonic() + LIMIT_S, 0
        while quiet < QUIET_ROUNDS and time.monotonic() < deadline:
            left = self.look(open_files=True)
            quiet = 0 if left else quiet + 1
            for process in left:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.02)
        shutil.rmtree(self.folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run = Run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    run.watch()
    run.sweep()
