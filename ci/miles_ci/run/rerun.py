"""Repeats the failed tests of a finished shard, to tell flaky from broken. Never changes an outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from miles_ci.run import results
from miles_ci.run.console import Console
from miles_ci.run.devices.inventory import Device
from miles_ci.run.judge.retry import may_retry
from miles_ci.run.results import ShardResults
from miles_ci.run.runner import run_plan
from miles_ci.run.shard import ShardJob

_REPEATABLE = (results.FAILED, results.ERROR, results.TIMEOUT)


def rerun_failed(
    job: ShardJob, record: ShardResults, times: int, *, devices: Sequence[Device], console: Console
) -> ShardResults:
    """Run each failed unit up to `times` more and add the outcomes to its result (`reruns`).

    Stops repeating a unit once it has passed. Does nothing when so much failed that chance is no explanation, or
    when the shard was interrupted.
    """
    failed = {test.unit for test in record.tests if test.outcome in _REPEATABLE}
    if not failed or record.status != "complete" or not may_retry(len(failed), len(record.tests)):
        return record
    seen: dict[str, list[str]] = {name: [] for name in failed}
    for number in range(1, times + 1):
        # One that has passed is known to be flaky: no need to run it again.
        units = tuple(unit for unit in job.units if unit.id in failed and results.PASSED not in seen[unit.id])
        if not units:
            break
        console.line(f"repetition {number} of {len(units)} failed file(s), to tell flaky from broken")
        folder = job.folder / f"{results.RERUN_PREFIX}{number}"
        again = run_plan(
            dataclasses.replace(job, units=units, retry_rows=(), folder=folder), devices=devices, console=console
        )
        for test in again.tests:
            seen[test.unit].append(test.outcome)
        if again.status != "complete":
            record.status = again.status
            break
    record.tests = [
        dataclasses.replace(test, reruns=tuple(seen[test.unit])) if test.unit in seen else test for test in record.tests
    ]
    record.write(job.folder)
    return record
