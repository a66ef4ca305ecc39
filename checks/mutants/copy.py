"""A copy of the tree in which changes are made, and forked children with limits that run tests there."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

_MEMORY = 8 << 30
_FILE_SIZE = 2 << 30
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class End:
    """`code`: of the child, None when it was killed by a limit or a signal; `how` says it in words."""

    code: int | None
    how: str
    output: str


class Copy:
    """The files that git tracks or would, copied to `beside/tree`; `roots`: folders of it that imports start from."""

    def __init__(self, source: Path, beside: Path, roots: tuple[str, ...]) -> None:
        self.beside = beside.resolve()
        self.root = self.beside / "tree"
        self._roots = [str((self.root / name).resolve()) for name in roots]
        self._stamp = 1_000_000_000
        _copy_tree(source, self.root)
        # Orphans of a child come to this process, so that none is missed when the child's tree is killed.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def write(self, path: str, source: bytes) -> None:
        """A time of its own for each content: compiled files are matched by time in seconds and size."""
        self._stamp += 1
        (self.root / path).write_bytes(source)
        os.utime(self.root / path, (self._stamp, self._stamp))

    def run(
        self, work: Callable[[], int], *, cpu_s: float, wall_s: float, environ: Mapping[str, str] | None = None
    ) -> End:
        """Run `work` in a forked child; whatever it started is dead when this returns."""
        output = self.beside / "output"
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            self._child(work, output, cpu_s, dict(environ or {}))
        status = _wait(child, wall_s)
        _kill_children()
        text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
        if status is None:
            return End(None, f"still running after {wall_s:.0f} s", text)
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            return End(
                None, f"killed by {name}" + (" (processor time)" if name in ("SIGXCPU", "SIGPROF") else ""), text
            )
        return End(os.WEXITSTATUS(status), f"exit code {os.WEXITSTATUS(status)}", text)

    def _child(self, work: Callable[[], int], output: Path, cpu_s: float, environ: dict[str, str]) -> None:
        code = 70
        try:
            os.setsid()
            handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 5))
            resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
            resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_SIZE, _FILE_SIZE))
            os.chdir(self.root)
            os.environ.update(environ)
            os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [environ.get("PYTHONPATH")]), *self._roots])
            sys.path[:0] = self._roots
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _wait(child: int, wall_s: float) -> int | None:
    """Its status; None when the time is over, after killing it."""
    end = time.monotonic() + wall_s
    pause = 0.01
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(pause)
        pause = min(0.25, 1.5 * pause)


def _kill_children() -> None:
    """Again and again, since a process may start another before it dies."""
    for _ in range(50):
        left = psutil.Process().children(recursive=True)
        if not left:
            return
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=1)
    raise RuntimeError(f"processes {[process.pid for process in left]} of a test cannot be killed")


def _copy_tree(source: Path, target: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=source, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, listed):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)
    # What npm installed is ignored by git and only read.
    for modules in source.glob("ci/*/workflows/node/node_modules"):
        (target / modules.relative_to(source)).symlink_to(modules)
    git = ["git", "-c", "user.name=mutants", "-c", "user.email=mutants@localhost"]
    subprocess.run(["git", "init", "-q"], cwd=target, check=True)
    subprocess.run([*git, "add", "-A"], cwd=target, check=True)
    subprocess.run([*git, "commit", "-q", "-m", "copy"], cwd=target, check=True)
