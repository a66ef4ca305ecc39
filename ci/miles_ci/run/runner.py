"""Runs one shard from start to finish: the entry of `miles_ci.run`.

`run_plan` installs handlers for SIGINT, SIGTERM and SIGHUP, chooses the CPU or GPU form, and leaves `results.json` and
`observed.json` behind whatever happens. It returns the results; the exit code is `results.exit_code()`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from miles_ci.history.store import HistoryStore
from miles_ci.run import cpu_runner, gpu_runner, results
from miles_ci.run.console import Console
from miles_ci.run.devices.inventory import Device
from miles_ci.run.judge.metric_bounds import MetricJudge
from miles_ci.run.shard import ShardJob, ShardRun


def run_plan(
    job: ShardJob,
    *,
    devices: Sequence[Device] = (),
    console: Console | None = None,
    open_store: Callable[[], HistoryStore] | None = None,
    default_branch: str = "main",
) -> results.ShardResults:
    """Run the job's units. `devices`: those this runner may use (GPU backends)."""
    record = results.ShardResults(job.info, devices=[dataclasses.asdict(device) for device in devices])
    shard = ShardRun(job, console or Console(), record)
    keeper = MetricJudge(job.info, open_store, default_branch)
    record.write(job.folder)
    faulty = [unit for unit in job.units if unit.declaration_error is not None]
    present = [unit for unit in job.units if unit.declaration_error is None]
    # pytest runs nothing at all when one of its arguments does not exist.
    gone = [unit for unit in present if not (job.root / unit.path).is_file()]
    sound = tuple(unit for unit in present if unit not in gone)
    shard.job = dataclasses.replace(job, units=sound)
    for unit in faulty:
        shard.console.line(f"{unit.id}: {unit.declaration_error}")
        shard.add(
            results.TestResult(unit.id, unit.path, results.DECLARATION_ERROR, message=unit.declaration_error or "")
        )
    for unit in gone:
        message = f"{unit.path} does not exist in this checkout, although the plan names it"
        shard.console.line(f"{unit.id}: {message}")
        shard.add(results.TestResult(unit.id, unit.path, results.ERROR, message=message))
    with cancel_on_signal(shard.cancel):
        try:
            if sound and job.info.backend == "cpu":
                cpu_runner.run(shard, keeper)
            elif sound:
                gpu_runner.run(shard, keeper, devices)
        finally:
            _complete(shard, keeper)
    return record


def _complete(shard: ShardRun, keeper: MetricJudge) -> None:
    """Close the record: every unit has a result, even when the form ended by an exception."""
    record = shard.record
    known = {test.unit for test in record.tests}
    for unit in shard.job.units:
        if unit.id not in known:
            record.tests.append(results.TestResult(unit.id, unit.path, results.NOT_RUN, message="the runner failed"))
    if shard.stop_reason:
        record.notes.append(f"stopped: {shard.stop_reason}")
    if not shard.cancel.is_set():
        note = keeper.record_durations(record.tests)
        if note:
            record.notes.append(note)
    keeper.close()
    record.status = "interrupted" if shard.cancel.is_set() else "complete"
    record.ended_at = time.time()
    record.provisional.clear()
    record.write(shard.job.folder)


@contextlib.contextmanager
def cancel_on_signal(cancel: threading.Event) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP ask for a cancel; a second one of the same kind acts as usual, except SIGHUP: a
    terminal that goes away sends several. Under nohup SIGHUP stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]

    def ask(number: int, _frame: FrameType | None) -> None:
        cancel.set()
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else before[signal.Signals(number)])
        with contextlib.suppress(OSError, ValueError):
            # The terminal may be gone.
            sys.stderr.write(f"miles-ci: {signal.Signals(number).name} received, ending the tests\n")

    for number in before:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)
