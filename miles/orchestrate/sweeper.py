"""Program beside a driver: when the driver is gone, however it ended, kill what is left of its Ray cluster.

    python sweeper.py FOLDER < pipe        (the driver holds the pipe's other end)

Ray's own agents notice a killed driver only after a minute, and one that is late writes its folder again. At the
end of the pipe every process that names FOLDER in its command line is killed, until there is none, and FOLDER is
removed. Standard library only, so that it costs nothing to start; never imported.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

LIMIT_S = 20.0
PROGRAMS = (b"python", b"raylet", b"gcs_server", b"ray::")
# Processes that were just told to end may still start another one.
QUIET_ROUNDS = 3


def members(folder: str) -> list[int]:
    """Living processes of Ray that name the folder (an editor or `tail` that does is somebody's own)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()  # empty for a zombie
                name = command.split(b"\0")[0].rsplit(b"/", 1)[-1]
                if folder.encode() in command and name.startswith(PROGRAMS):
                    found.append(int(entry.name))
    return found


def sweep(folder: str) -> None:
    deadline, quiet = time.monotonic() + LIMIT_S, 0
    while quiet < QUIET_ROUNDS and time.monotonic() < deadline:
        left = members(folder)
        quiet = 0 if left else quiet + 1
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    sweep(sys.argv[1])
