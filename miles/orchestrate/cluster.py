"""One local Ray cluster per run, started and stopped by the command that needs it.

Every cluster has its own temporary folder, which only this user enters, and ports chosen by Ray on the loopback
interface, so two runs on a machine do not meet; starts take turns. What the driver does not end, and the folder, are the
sweeper's, which outlives it and knows the run's processes by their mark. Callers need a token that only the run's own
processes have.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.orchestrate.bounded import BoundedCalls
from miles.orchestrate.errors import RunError
from miles.orchestrate.placement import LOOPBACK
from miles.orchestrate.start_turn import lock_path, start_turn
from miles.orchestrate.stop_signals import keeping_signal_handlers
from miles.orchestrate.sweeper_handle import SweeperHandle, marked, sweeping

PREFIX = "miles-ray-"
# Ray opens its own folder to everybody; the one around it stays closed.
INNER = "r"
# Ray puts sockets about 64 characters below its folder; the kernel takes paths of 107.
LONGEST_BASE = 22
OBJECT_STORE_BYTES = 128 * 1024 * 1024
# Ray's own steps have limits of 30 to 60 s, but not all of them.
START_LIMIT_S = 240.0
# The sweeper kills Ray's processes 15 s after it was told of the stop; without them Ray's shutdown returns.
SHUTDOWN_WAIT_S = 20.0
# Runnable processes for each processor above which a slow start is the machine's.
BUSY = 1.5
# A folder without a lock is either a second old or was written again after its removal.
UNLOCKED_AGE_S = 60.0


@dataclass(frozen=True)
class Cluster:
    """A running local cluster: its folder holds Ray's session logs."""

    folder: Path


@contextlib.contextmanager
def local_cluster(*, cpus: int, gpus: int = 0, note: Callable[[str], None] = lambda _: None) -> Iterator[Cluster]:
    """Start Ray with `cpus` logical CPU slots (one per actor), yield, stop it and remove its folder.

    `note` is told when the start has to wait. Start and end are bounded: what does not stop is killed.
    """
    _remove_stale_folders()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_base()))
    # Held until this process ends: a folder whose lock can be taken belongs to nobody.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with marked() as mark, sweeping(mark, folder) as sweeper:
            ray, calls = _import_ray(), BoundedCalls()
            with keeping_signal_handlers(lambda: _stop(ray, calls, sweeper), sweeper.sweep) as started:
                with start_turn(lock_path(_base()), note):
                    _start(ray, calls, folder, cpus=cpus, gpus=gpus)
                started()
                yield Cluster(folder=folder)


def _stop(ray: Any, calls: BoundedCalls, sweeper: SweeperHandle) -> None:
    """Ray waits for ever for a daemon that is stopped or stuck."""
    sweeper.stopping()
    if not calls.finishes_within(SHUTDOWN_WAIT_S, ray.shutdown):
        # The interpreter's end must not wait either.
        atexit.unregister(ray.shutdown)
    calls.close()


def _start(ray: Any, calls: BoundedCalls, folder: Path, *, cpus: int, gpus: int) -> None:
    def start() -> None:
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=gpus,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=OBJECT_STORE_BYTES,
            namespace="miles",
            _node_ip_address=LOOPBACK,
            _temp_dir=str(folder / INNER),
        )

    reason = f"nothing answered for {START_LIMIT_S:g} s"
    cause: BaseException | None = None
    try:
        if calls.finishes_within(START_LIMIT_S, start):
            return
    except SystemExit as error:
        reason, cause = f"Ray ended the process with {error.code}", error
    except Exception as error:
        # Ray raises bare Exception when a daemon does not answer in time, and OSError or ValueError before that.
        reason, cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__, error
    said = "".join(f"; {name}: {line}" for name, line in _last_words(folder).items())
    raise RunError(f"the local Ray cluster did not start: {reason}{said}; {_advice()}") from cause


def _advice() -> str:
    """Whether the machine was too busy, or something is broken."""
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * processors:
        return (
            f"this machine is busy ({load:.1f} runnable processes on {processors} processors): wait until it is quieter, "
            "then run the same command again"
        )
    return (
        f"this machine is not busy (load {load:.1f} on {processors} processors), so a process failed: look at what is "
        "said above and at its memory (`miles doctor`), then run the same command again"
    )


def _last_words(folder: Path) -> dict[str, str]:
    """The last line of each daemon's error log, which goes away with the folder."""
    found = {}
    for log in sorted(folder.glob(f"{INNER}/session_*/logs/*.err")):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if lines and not log.is_symlink():
            found[log.name] = lines[-1][:300]
    return found


def _base() -> str:
    """The temporary folder of this user, or /tmp where that one's path leaves no room for Ray's sockets."""
    chosen = tempfile.gettempdir()
    return chosen if len(chosen) <= LONGEST_BASE else "/tmp"


def _import_ray() -> Any:
    # Other users of this machine reach the loopback, too: a token of this run keeps them out.
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Ray then takes the loopback address for the node's, and its servers listen nowhere else.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
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
