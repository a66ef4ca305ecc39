"""One local Ray cluster per run, started and stopped by the command that needs it.

Every cluster has its own temporary folder and ports chosen by Ray, so two runs on a machine do not meet.
Ray's daemons die with the driver (parent-death signal), workers die with the raylet; the rest, and the folder, are
the sweeper's, which outlives the driver. Callers need a token that only the run's own processes have.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.orchestrate.errors import RunError

PREFIX = "miles-ray-"
# Ray puts sockets about 64 characters below its folder; the kernel takes paths of 107.
LONGEST_BASE = 24
OBJECT_STORE_BYTES = 128 * 1024 * 1024
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SWEEP_WAIT_S = 10.0
# A folder without a lock is either a second old or was written again after its removal.
UNLOCKED_AGE_S = 60.0


@dataclass(frozen=True)
class Cluster:
    """A running local cluster: its folder holds Ray's session logs."""

    folder: Path


@contextlib.contextmanager
def local_cluster(*, cpus: int, gpus: int = 0) -> Iterator[Cluster]:
    """Start Ray with `cpus` logical CPU slots (one per actor), yield, stop it and remove its folder."""
    _remove_stale_folders()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_base()))
    # Held until this process ends: a folder whose lock can be taken belongs to nobody.
    lock = (folder / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    sweeper = subprocess.Popen(
        [sys.executable, "-I", str(Path(__file__).with_name("sweeper.py")), str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )

    def sweep() -> None:
        assert sweeper.stdin is not None
        sweeper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            sweeper.wait(SWEEP_WAIT_S)

    try:
        ray = _import_ray()
        with keeping_signal_handlers(ray.shutdown, sweep) as started:
            _start(ray, folder, cpus=cpus, gpus=gpus)
            started()
            yield Cluster(folder=folder)
    finally:
        sweep()
        lock.close()


@contextlib.contextmanager
def keeping_signal_handlers(*stops: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Ray takes SIGTERM for itself: call what is yielded when it has. `stops` run at the end, with signals ignored."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield lambda: _set_handlers(handlers)
    finally:
        # A second Ctrl-C must not keep Ray from being stopped; the wait is bounded.
        _set_handlers(dict.fromkeys(STOP_SIGNALS, signal.SIG_IGN))
        try:
            for stop in stops:
                stop()
        finally:
            _set_handlers(handlers)


def _set_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    """Only the main thread may set handlers."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _start(ray: Any, folder: Path, *, cpus: int, gpus: int) -> None:
    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=gpus,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=OBJECT_STORE_BYTES,
            namespace="miles",
            _temp_dir=str(folder),
        )
    except SystemExit as error:
        # What Ray's own handler makes of a SIGTERM while it starts.
        if error.code == signal.SIGTERM:
            raise KeyboardInterrupt from None
        raise RunError(f"the local Ray cluster did not start: Ray ended the process with {error.code}") from error
    except Exception as error:
        # Ray raises bare Exception when a daemon does not answer in time, and OSError or ValueError before that.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        said = "".join(f"; {name}: {line}" for name, line in _last_words(folder).items())
        raise RunError(
            f"the local Ray cluster did not start: {reason}{said}; free memory and processor time on this machine "
            f"(`miles doctor` shows them) and run the same command again"
        ) from error


def _last_words(folder: Path) -> dict[str, str]:
    """The last line of each daemon's error log, which goes away with the folder."""
    found = {}
    for log in sorted(folder.glob("session_*/logs/*.err")):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if lines and not log.is_symlink():
            found[log.name] = lines[-1][:300]
    return found


def _base() -> str:
    """The temporary folder of this user, or /tmp where that one's path leaves no room for Ray's sockets."""
    chosen = tempfile.gettempdir()
    return chosen if len(chosen) <= LONGEST_BASE else "/tmp"


def _import_ray() -> Any:
    # Ray listens on every interface. A token of this run keeps others out, and needs no file in the home folder.
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray starts workers at niceness 15; ours are the run itself, not background jobs.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    return ray


def _remove_stale_folders() -> None:
    for folder in Path(_base()).glob(f"{PREFIX}*"):
        try:
            with (folder / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                if time.time() - folder.stat().st_mtime > UNLOCKED_AGE_S:
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # Locked by a living driver, or vanished meanwhile: not ours to remove.
            continue
