"""A Ray cluster of several node daemons on this machine, as `ray start` gives it: node 0 is the head.

Node 0 has the machine's own address, node i the loopback address 127.0.0.<i + 1>; each has its own folder, by which its
processes are known.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
START_S = 90
ENDED_S = 20.0


@dataclass
class Raylets:
    """`environment` is what a command needs to join; `addresses` are the nodes'."""

    environment: dict[str, str]
    folders: list[Path] = field(default_factory=list)
    address: str = ""

    @property
    def addresses(self) -> list[str]:
        return [self.address.rpartition(":")[0], *(f"127.0.0.{n + 1}" for n in range(1, len(self.folders)))]

    def start(self, cpus: int) -> None:
        """One more node."""
        number = len(self.folders)
        # Short: Ray's socket paths below it have a length limit.
        folder = Path(tempfile.mkdtemp(prefix=f"rl{number}", dir="/tmp"))
        self.folders.append(folder)
        place = ["--head", "--port=0", "--include-dashboard=false"]
        if number:
            place = [f"--address={self.address}", f"--node-ip-address=127.0.0.{number + 1}"]
        command = [*RAY, "start", *place, f"--num-cpus={cpus}", "--num-gpus=0", f"--temp-dir={folder}"]
        command += ["--object-store-memory=100000000", "--disable-usage-stats"]
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if not number:
            self.address = (folder / "ray_current_cluster").read_text().strip()

    def processes(self, number: int) -> list[psutil.Process]:
        """Living processes of one node: its daemons, and what its raylet started."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter(["cmdline", "status"]):
            words = " ".join(process.info["cmdline"] or [])
            if str(self.folders[number]) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
                found[process.pid] = process
                with contextlib.suppress(psutil.Error):
                    found.update({child.pid: child for child in process.children(recursive=True)})
        return [process for process in found.values() if process.pid != os.getpid()]

    def kill(self, number: int) -> None:
        """The whole node at once, as a machine that loses power."""
        deadline = time.monotonic() + ENDED_S
        while processes := self.processes(number):
            assert time.monotonic() < deadline, processes
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            time.sleep(0.05)


@contextlib.contextmanager
def raylets(cpus: Sequence[int]) -> Iterator[Raylets]:
    """A node for each number of processes; all of them are gone afterwards."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    cluster = Raylets({**token, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"})
    try:
        for count in cpus:
            cluster.start(count)
        yield cluster
    finally:
        # Workers first, head last: daemons that miss the head linger.
        for number in reversed(range(len(cluster.folders))):
            cluster.kill(number)
            shutil.rmtree(cluster.folders[number], ignore_errors=True)
