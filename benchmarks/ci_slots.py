"""Tests of 1, 2, 4 and 8 devices on one host: how well the leases pack, and what the supervisor costs.

    python benchmarks/ci_slots.py [--jobs 40] [--seeds 3] [--seconds 1.5] [--out FILE]

Devices are fake, everything else is real: lock files, leases, one supervised process for each test (it sleeps for its
duration), threads of the runner. Printed for each seed, from the same jobs in the same run:

    makespan / lower bound      lower bound = max(longest, device-seconds / 8, tests that exclude each other)
    one after another / makespan   the alternative: each test alone, through the same supervisor (run for the first
                                seed, the sum of durations for the others)
    schedule                    what the planner predicts for the same jobs, without any overhead

and once: wall time of an empty file under the supervisor beside a plain subprocess, median of many.
Targets: makespan <= 1.10 x lower bound, supervisor <= 50 ms for each file; exits 1 when one is missed. Writes
benchmarks/results/ci_slots.json. About four minutes, whatever the number of cores: the tests sleep.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import cpu_record

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "ci"))

from miles_ci.plan.slots import lower_bound, schedule, start_key  # noqa: E402
from miles_ci.run.devices.dispatch import dispatch  # noqa: E402
from miles_ci.run.devices.inventory import Device  # noqa: E402
from miles_ci.run.devices.slots import LeaseManager, Request  # noqa: E402
from miles_ci.run.process import supervisor_client  # noqa: E402
from miles_ci.run.process.supervisor_client import Command  # noqa: E402

WIDTH = 8
WEIGHTS = {1: 4, 2: 3, 4: 2, 8: 1}
DEVICES = tuple(Device(n, f"0000:{n:02x}:00.0", f"GPU-{n}", "fake", 1000) for n in range(WIDTH))


@dataclass(frozen=True)
class Job:
    id: str
    ms: int
    devices: int
    serial: bool = False


def make_jobs(count: int, seed: int, seconds: float) -> list[Job]:
    """Lognormal durations around `seconds` (sigma 0.8), at least 50 ms."""
    rng = random.Random(seed)
    sizes, weights = list(WEIGHTS), list(WEIGHTS.values())
    jobs = [
        Job(f"job-{n:03d}", max(50, round(1000 * seconds * rng.lognormvariate(0, 0.8))), rng.choices(sizes, weights)[0])
        for n in range(count)
    ]
    return sorted(jobs, key=start_key)


def run_one(job: Job, folder: Path, fds: tuple[int, ...] = ()) -> None:
    """A real supervised process that takes the job's time."""
    command = Command(
        argv=["/bin/sleep", f"{job.ms / 1000:.3f}"],
        cwd=folder,
        env={"PATH": os.environ.get("PATH", "")},
        log=folder / f"{job.id}.log",
        timeout_s=job.ms / 1000 + 60,
        private_fds=fds,
    )
    ended = supervisor_client.run(command)
    if ended.reason != "exited" or ended.exit_code != 0:
        raise RuntimeError(f"{job.id}: {ended}")


def packed(jobs: list[Job], folder: Path) -> float:
    manager = LeaseManager(folder / "locks", DEVICES, tmp_parent=folder)
    requests = [Request(job.id, job.devices, job.ms / 1000) for job in jobs]
    started = time.monotonic()
    dispatch(manager, requests, lambda place, lease: run_one(jobs[place], folder, lease.fds))
    return time.monotonic() - started


def one_after_another(jobs: list[Job], folder: Path) -> float:
    started = time.monotonic()
    for job in jobs:
        run_one(job, folder)
    return time.monotonic() - started


def overhead_ms(folder: Path, rounds: int = 30) -> tuple[float, float]:
    """Median wall time of /bin/true: under the supervisor, and as a plain subprocess."""
    supervised, plain = [], []
    for number in range(rounds):
        command = Command(["/bin/true"], folder, {}, folder / f"true-{number}.log", 30.0)
        started = time.monotonic()
        supervisor_client.run(command)
        supervised.append(time.monotonic() - started)
        started = time.monotonic()
        subprocess.run(["/bin/true"], check=True)
        plain.append(time.monotonic() - started)
    return 1000 * statistics.median(supervised), 1000 * statistics.median(plain)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=40, help="tests for each seed (default: 40)")
    parser.add_argument("--seeds", type=int, default=3, help="job lists to try (default: 3)")
    parser.add_argument("--seconds", type=float, default=1.5, help="median duration of a test (default: 1.5)")
    parser.add_argument("--out", type=Path, default=cpu_record.RESULTS / "ci_slots.json")
    args = parser.parse_args()
    head = cpu_record.head()
    rows = []
    with tempfile.TemporaryDirectory(prefix="slots-") as name:
        folder = Path(name)
        for seed in range(args.seeds):
            jobs = make_jobs(args.jobs, seed, args.seconds)
            bound = lower_bound(jobs, WIDTH, 1) / 1000
            predicted = max(start.end_ms for start in schedule(jobs, WIDTH)) / 1000
            makespan = packed(jobs, folder)
            serial = one_after_another(jobs, folder) if seed == 0 else sum(job.ms for job in jobs) / 1000
            row = {"seed": seed, "jobs": len(jobs), "bound_s": bound, "predicted_s": predicted, "makespan_s": makespan}
            rows.append({**row, "serial_s": serial, "ratio": makespan / bound, "speedup": serial / makespan})
            print(
                f"seed {seed}: {len(jobs)} tests, lower bound {bound:.2f} s, schedule {predicted:.2f} s "
                f"({predicted / bound:.3f}), makespan {makespan:.2f} s = {makespan / bound:.3f} x bound; "
                f"one after another {serial:.2f} s{'' if seed == 0 else ' (computed)'} = {serial / makespan:.2f} x ours",
                flush=True,
            )
        supervised, plain = overhead_ms(folder)
    worst, overhead = max(row["ratio"] for row in rows), supervised - plain
    packed_well, cheap = worst <= 1.10, overhead <= 50
    print(f"worst makespan / bound: {worst:.3f} (target 1.10): {'met' if packed_well else 'MISSED'}")
    print(
        f"supervisor: {supervised:.1f} ms for an empty process, plain subprocess {plain:.1f} ms, "
        f"difference {overhead:.1f} ms (target 50): {'met' if cheap else 'MISSED'}"
    )
    numbers = {
        **head,
        "benchmark": "ci_slots",
        "rows": rows,
        "worst_ratio": worst,
        "supervisor_ms": supervised,
        "plain_ms": plain,
    }
    cpu_record.write(args.out, numbers)
    return 0 if packed_well and cheap else 1


if __name__ == "__main__":
    sys.exit(main())
