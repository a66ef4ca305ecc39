"""State that all tests of one running shard share, and the step from one process to one attempt."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles_ci.history.corridor import MetricVerdict
from miles_ci.plan.model import Unit
from miles_ci.run import results
from miles_ci.run.console import Console
from miles_ci.run.devices.added import AddedBackend
from miles_ci.run.judge import judge, never_executed
from miles_ci.run.judge.judge import Judgement, ProcessEvidence
from miles_ci.run.judge.pytest_events import Failure, FileEvidence
from miles_ci.run.judge.retry import RetryRow, may_retry
from miles_ci.run.process import pytest_process

# Kept back from the shard's own limit, to end the tests and to write results.
RESERVE_S = 30.0


@dataclass(frozen=True)
class ShardJob:
    """What to run and where. `env` is the environment tests inherit; `timeout_s` limits the whole shard.

    `wait_memory_s`: how long to wait for a device to be empty before its test is an infra failure.
    `backend`: of a suite whose backend the registry adds.
    """

    root: Path
    folder: Path
    info: results.RunInfo
    units: tuple[Unit, ...]
    retry_rows: tuple[RetryRow, ...]
    env: Mapping[str, str]
    lock_dir: Path
    timeout_s: float = 3600.0
    workers: int = pytest_process.CPU_WORKERS
    wait_memory_s: float = 120.0
    backend: AddedBackend | None = None


@dataclass
class ShardRun:
    """The running shard. `stop_reason` is set when the host must take no further test."""

    job: ShardJob
    console: Console
    record: results.ShardResults
    cancel: threading.Event = field(default_factory=threading.Event)
    stop_reason: str = ""
    failures: int = 0
    started: float = field(default_factory=time.monotonic)
    _sources: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def left_s(self) -> float:
        return self.job.timeout_s - (time.monotonic() - self.started)

    def stop(self, reason: str) -> None:
        with self._lock:
            self.stop_reason = self.stop_reason or reason

    def add(self, test: results.TestResult) -> None:
        """Record a finished unit and write the results files again."""
        with self._lock:
            self.record.tests.append(test)
            self.record.provisional.pop(test.unit, None)
            self.record.write(self.job.folder)

    def report(self, provisional: Sequence[results.Provisional]) -> None:
        """Write down what files have reported while their process still runs."""
        with self._lock:
            self.record.provisional.update({each.unit: each for each in provisional})
            self.record.write(self.job.folder)

    def note(self, text: str) -> None:
        with self._lock:
            self.record.notes.append(text)

    def count_failure(self) -> None:
        """Every unit whose first attempt was bad is counted once."""
        with self._lock:
            self.failures += 1

    def retry_allowed(self, judgement: Judgement, attempt: int) -> bool:
        """May this attempt be followed by another one here?"""
        with self._lock:
            few = may_retry(self.failures, len(self.job.units))
        cause = judgement.cause
        return bool(cause and cause.allows(attempt) and few and not self.cancel.is_set() and not self.stop_reason)

    def remember_sources(self, units: Sequence[Unit]) -> None:
        """Keep the source that is about to run: what is compared with the collected tests must be the same text."""
        for unit in units:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                self._sources[unit.path] = (self.job.root / unit.path).read_text(encoding="utf-8-sig")

    def judge(self, unit: Unit, process: ProcessEvidence) -> Judgement:
        judgement = judge.judge_unit(unit, process, self._never_executed(unit, process), self.job.retry_rows)
        if judgement.cause is not None and judgement.cause.action == "stop_host":
            self.stop(judgement.message)
        return judgement

    def _never_executed(self, unit: Unit, process: ProcessEvidence) -> list[never_executed.NeverExecuted]:
        """Tests never executed of a whole file; parts that name their nodes run only what they name."""
        evidence = process.observed.files.get(unit.path)
        if evidence is None or unit.nodes or evidence.skipped_whole is not None or evidence.collection_failures:
            return []
        with contextlib.suppress(SyntaxError):
            return never_executed.find(self._sources.get(unit.path, ""), [*evidence.items, *evidence.left_out])
        return []


def attempt_record(
    number: int,
    judgement: Judgement,
    process: ProcessEvidence | None,
    unit: Unit,
    *,
    log: str = "",
    devices: Sequence[str] = (),
    shared: bool = False,
) -> results.Attempt:
    """`shared`: the process ran other units too, so wall time is the sum of this unit's own items."""
    cause = judgement.cause
    base = results.Attempt(
        number=number,
        outcome=judgement.outcome,
        wall_s=0.0,
        message=judgement.message,
        cause="" if cause is None else cause.name,
        cause_kind="" if cause is None else cause.kind,
        action="" if cause is None else cause.action,
        devices=tuple(devices),
        log=log,
    )
    if process is None:
        return base
    evidence = process.observed.files.get(unit.path, FileEvidence())
    return dataclasses.replace(
        base,
        wall_s=round(evidence.seconds() if shared else process.ended.wall_s, 3),
        exit_code=process.ended.exit_code,
        signal=process.ended.signal,
        counts=evidence.counts(),
        failures=tuple(failure_record(failure) for failure in evidence.failures()),
        leaked=() if shared else tuple(f"pid {left.pid}: {left.command}" for left in process.ended.leaked),
        max_rss_mib=process.ended.max_rss_mib,
    )


def failure_record(failure: Failure) -> results.FailureRecord:
    inside = [frame for frame in failure.frames if frame.in_repository]
    place = f"{inside[-1].file}:{inside[-1].function}:{inside[-1].line}" if inside else ""
    return results.FailureRecord(failure.node, failure.kind, failure.message, failure.signature, place)


def finish(
    unit: Unit,
    judgement: Judgement,
    attempts: Sequence[results.Attempt],
    process: ProcessEvidence | None,
    metrics: Sequence[MetricVerdict] = (),
) -> results.TestResult:
    """The unit's final result: flaky when it passed after a failure, tolerated where the declaration says so."""
    final, tolerated = judgement.outcome, ""
    if final == results.PASSED and len(attempts) > 1:
        final = results.FLAKY
    elif final == results.ALL_SKIPPED and unit.allow_all_skipped:
        tolerated = unit.allow_all_skipped
    elif unit.unstable and final in (results.FAILED, results.ERROR, results.TIMEOUT, results.INFRA):
        final, tolerated = results.UNSTABLE_FAILED, unit.unstable
    evidence = FileEvidence() if process is None else process.observed.files.get(unit.path, FileEvidence())
    missing, allowed = never_executed.left_out(unit, evidence)
    return results.TestResult(
        unit=unit.id,
        path=unit.path,
        outcome=final,
        num_gpus=unit.devices,
        est_s=unit.ms / 1000,
        message=judgement.message or (attempts[0].message if final == results.FLAKY else ""),
        tolerated=tolerated,
        attempts=tuple(attempts),
        metrics=tuple(metrics),
        nodes={node: item.outcome or "unfinished" for node, item in evidence.items.items()},
        node_ms={node: round(item.seconds * 1000) for node, item in evidence.items.items()},
        subtests={node: dict(item.subtests) for node, item in evidence.items.items() if item.subtests},
        only=unit.only,
        never_executed=missing,
        allowed=allowed,
    )


def not_run(unit: Unit, reason: str, *, cancelled: bool) -> results.TestResult:
    final = results.CANCELLED if cancelled else results.NOT_RUN
    return results.TestResult(unit.id, unit.path, final, unit.devices, unit.ms / 1000, reason, only=unit.only)


def skipped(unit: Unit, shard: ShardRun) -> results.TestResult:
    cancelled = shard.cancel.is_set()
    return not_run(unit, "the run was cancelled" if cancelled else shard.stop_reason, cancelled=cancelled)


def first_attempt_stands(unit: Unit, attempts: Sequence[results.Attempt]) -> results.TestResult:
    """A retry was due but could not start: the failure that was seen is the result."""
    first = attempts[0]
    return results.TestResult(
        unit.id, unit.path, first.outcome, unit.devices, unit.ms / 1000, first.message,
        attempts=tuple(attempts), only=unit.only,
    )  # fmt: skip
