"""Which processes belong to a run, by marks that they cannot all lose. Linux, standard library only.

A process that a run starts inherits a variable with the run's mark. Ray's agents overwrite their environment and their
command line with a title; they keep log files below the run's folder open, and they descend from daemons with the
mark. So a member is who has the mark, who names the folder in its command line or has a file below it open (only
Python's and Ray's programs: an editor that shows a log is somebody's own), who was seen as a member before, and
whatever descends from one of these or shares a session that one of them leads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = "MILES_RUN_MARK"
PROGRAMS = ("python", "raylet", "gcs_server", "ray::")
_ZOMBIE, _DEAD = "Z", "X"


@dataclass(frozen=True)
class Process:
    """`started`: clock ticks since boot. With it a process id that was given again is told from its first bearer."""

    pid: int
    started: int
    parent: int = field(compare=False)
    session: int = field(compare=False)


def processes(proc: Path = Path("/proc")) -> dict[int, Process]:
    """Every living process by id; zombies have ended."""
    found = {}
    for entry in os.listdir(proc):
        if entry.isdigit():
            try:
                text = (proc / entry / "stat").read_bytes()
            except OSError:
                continue  # ended meanwhile
            # The name in brackets may hold blanks and brackets.
            fields = text.rpartition(b")")[2].split()
            if fields and fields[0].decode() not in (_ZOMBIE, _DEAD):
                found[int(entry)] = Process(int(entry), int(fields[19]), int(fields[1]), int(fields[3]))
    return found


def members(
    mark: str,
    folder: str,
    *,
    seen: Iterable[Process] = (),
    without: Iterable[Process] = (),
    open_files: bool = True,
    proc: Path = Path("/proc"),
) -> set[Process]:
    """Living members of a run; never this process, nor one of `without`. `seen`: members of an earlier look.

    `open_files`: look for files below the folder, too, which costs a look at each open file of Python's programs.
    """
    left_out = set(without)
    living = {pid: p for pid, p in processes(proc).items() if pid != os.getpid() and p not in left_out}
    before = set(seen)
    found = {
        pid
        for pid, process in living.items()
        if process in before
        or _is_marked(proc / str(pid), mark)
        or _holds(proc / str(pid), folder, open_files=open_files)
    }
    while True:
        more = {
            pid
            for pid, process in living.items()
            if pid not in found and (process.parent in found or process.session in found)
        }
        if not more:
            return {living[pid] for pid in found}
        found |= more


def _is_marked(entry: Path, mark: str) -> bool:
    try:
        return f"{VARIABLE}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
    except OSError:  # ended, or another user's
        return False


def _holds(entry: Path, folder: str, *, open_files: bool) -> bool:
    try:
        command = (entry / "cmdline").read_bytes()
        name = os.fsdecode(command.split(b"\0")[0]).rpartition("/")[2]
        if not name.startswith(PROGRAMS):
            return False
        if folder.encode() in command:
            return True
        return open_files and any(_leads_below(entry / "fd" / number, folder) for number in os.listdir(entry / "fd"))
    except OSError:
        return False


def _leads_below(link: Path, folder: str) -> bool:
    try:
        return os.readlink(link).startswith(folder + "/")
    except OSError:
        return False
