"""Program: makes the reward function once, then copies itself for each worker that the driver asks for.

    python -I fork_server.py FD < SPEC   (FD: a socket of the driver; messages are JSON, `fork` brings two descriptors)

It ends with everything below it when the driver closes the socket or dies, however it dies. Adopted orphans
(processes that a reward function started) are ended too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

MAX_MESSAGE = 1 << 20
# Between asking a hanging worker where it is and ending it.
DUMP_TIME_S = 0.2
# numpy's and torch's own threads would fight over the cores that the workers share.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
IMPORT_IN_EACH_WORKER = "--import-in-each-worker"


class _Ended(BaseException):
    """The driver said so, or is gone."""


def main() -> None:
    from miles.rollout.reward_worker import linux

    control = socket.socket(fileno=int(sys.argv[1]))
    spec = _spec()
    driver = os.pidfd_open(spec["driver"])
    if os.getppid() != spec["driver"]:
        os._exit(1)
    linux.adopt_orphans()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    function = None if IMPORT_IN_EACH_WORKER in sys.argv else _make(spec)
    if function is not None and len(os.listdir("/proc/self/task")) > 1:
        # A process with threads cannot be copied safely: start again, and let each worker import for itself.
        control.set_inheritable(True)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], IMPORT_IN_EACH_WORKER])
    server = _ForkServer(control, driver, spec, function)
    try:
        server.run()
    except _Ended:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        server.end_all()
    os._exit(0)


def _spec() -> dict[str, Any]:
    """Standard input is a file, so that a second start reads the same."""
    return json.loads(os.pread(0, os.fstat(0).st_size, 0))


def _end(*_: object) -> None:
    raise _Ended


def _make(spec: dict[str, Any]) -> Callable[..., Any] | str:
    """The function, or why there is none: each worker reports it."""
    import importlib

    module_name, _, name = spec["make"].partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)(**spec["arguments"])
    except (KeyboardInterrupt, _Ended):
        raise
    except BaseException as error:  # a module of the user's may do anything on import, `sys.exit` too
        return str(error) or type(error).__name__


class _ForkServer:
    def __init__(
        self, control: socket.socket, driver: int, spec: dict[str, Any], function: Callable[..., Any] | str | None
    ) -> None:
        # Imported before the first copy, so that no copy pays for it.
        from miles.rollout.reward_worker import worker

        self._serve = worker.serve
        self._control = control
        self._driver = driver  # a descriptor that is readable once the driver is dead
        self._spec = spec
        self._function = function
        self._workers: set[int] = set()
        self._doomed: list[tuple[float, int]] = []  # (when, pid)

    def run(self) -> None:
        import gc

        warm = getattr(self._function, "warm", None)
        if warm is not None and not select.select([self._control], [], [], 0)[0]:
            # Nobody waits yet: what few calls need is loaded once for all workers.
            warm()
        gc.collect()
        gc.freeze()
        woken, waker = socket.socketpair()
        for end in (woken, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            wait = max(min((when for when, _ in self._doomed), default=time.monotonic() + 60) - time.monotonic(), 0)
            watched: list[Any] = [self._control, self._driver, woken]
            ready, _, _ = select.select(watched, [], [], wait)
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096)
            self._reap()
            self._kill_doomed()
            if self._driver in ready:
                raise _Ended
            if self._control in ready:
                self._obey()

    def _obey(self) -> None:
        message, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 2)
        if not message:
            raise _Ended
        order = json.loads(message)
        if order["do"] == "fork":
            self._fork(*fds)
        elif order["pid"] in self._workers:
            # A pid that is not reaped yet is still this worker's.
            if order["dump"]:
                os.kill(order["pid"], signal.SIGUSR1)
            self._doomed.append((time.monotonic() + (DUMP_TIME_S if order["dump"] else 0), order["pid"]))
            self._kill_doomed()

    def _fork(self, channel_fd: int, output_fd: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._workers.add(pid)
            os.close(channel_fd)
            os.close(output_fd)
            return
        # The copy: nothing of the server is left in it.
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            self._control.close()
            os.close(self._driver)
            function = _make(self._spec) if self._function is None else self._function
            self._serve(socket.socket(fileno=channel_fd), output_fd, function, self._spec, parent=parent)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _kill_doomed(self) -> None:
        now = time.monotonic()
        for when, pid in list(self._doomed):
            if when <= now:
                self._doomed.remove((when, pid))
                if pid in self._workers:
                    _kill_group(pid)

    def _reap(self) -> None:
        from miles.rollout.reward_worker import linux

        ended = set()
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if pid in self._workers:
                    ended.add(pid)
        self._workers -= ended
        if ended:
            # What the functions started and left: their groups, and orphans of their sessions.
            for pid in ended:
                _kill_group(pid)
            for child, session in linux.children():
                if session in ended:
                    _kill(child)

    def end_all(self) -> None:
        """Every child, adopted ones included, until there is none."""
        from miles.rollout.reward_worker import linux

        for pid in self._workers:
            _kill_group(pid)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            for child, _ in linux.children():
                _kill(child)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.005)


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    _kill(pid)


if __name__ == "__main__":
    for name in ONE_THREAD:
        os.environ.setdefault(name, "1")
    sys.path[:] = _spec()["path"]
    main()
