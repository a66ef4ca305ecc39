"""From evidence to the outcome of one unit: pure functions, no processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ci.run import results
from ci.run.dark import DarkTest
from ci.run.evidence import Failure, FileEvidence, JUnitCounts, Observed, disagreement, disagreement_about
from ci.run.retry import PLAIN_TEST, Classification, Evidence, RetryRow, classify, last_lines
from ci.run.supervise import Ended
from ci.run.unit import RunUnit

# pytest's own exit codes.
OK, TESTS_FAILED, INTERRUPTED, INTERNAL, USAGE, NO_TESTS = range(6)
_REPORTED = (OK, TESTS_FAILED, NO_TESTS)


@dataclass(frozen=True)
class Judgement:
    """`cause` says why a bad outcome is what it is; None for a good one."""

    outcome: str
    message: str = ""
    cause: Classification | None = None

    @property
    def bad(self) -> bool:
        return self.outcome not in (results.PASSED, results.FLAKY)


@dataclass(frozen=True)
class ProcessEvidence:
    """One pytest process, over."""

    ended: Ended
    observed: Observed
    junit: JUnitCounts | None
    log_tail: str

    @property
    def exit_number(self) -> int | None:
        """Exit code as a shell shows it: 128 + N for a death by signal N."""
        if self.ended.signal is not None:
            return 128 + self.ended.signal
        return self.ended.exit_code


def judge(
    unit: RunUnit,
    process: ProcessEvidence,
    dark: Sequence[DarkTest],
    rows: Sequence[RetryRow],
) -> Judgement:
    """The outcome of one unit in this process, before retries, gates and tolerance are considered."""
    evidence = process.observed.files.get(unit.path, FileEvidence())
    early = _of_process(process)
    if early is not None:
        return early
    judgement = _of_file(unit, evidence, process, dark)
    if not judgement.bad or judgement.outcome in (results.CANCELLED, results.NOT_RUN, results.NO_TESTS):
        return judgement
    if judgement.outcome == results.ALL_SKIPPED:
        return judgement
    cause = _cause(judgement, evidence, process, rows)
    if cause.kind == "infra":
        message = f"{cause.name}: {cause.matched}; {judgement.message}".rstrip("; ")
        return Judgement(results.INFRA, message, cause)
    return Judgement(judgement.outcome, judgement.message, cause)


def _of_process(process: ProcessEvidence) -> Judgement | None:
    """Ends that say nothing about the test."""
    ended, devices = process.ended, process.observed.devices
    if ended.survivors:
        names = ", ".join(f"pid {left.pid} {left.command}" for left in ended.survivors)
        return _infra("unkillable", "stop_host", f"still alive after SIGKILL: {names}")
    if ended.reason == "spawn":
        return _infra("spawn", "none", f"the test process could not be started: {ended.error}")
    if ended.reason == "lost":
        return _infra("supervisor-lost", "retry", ended.error)
    if devices is not None and devices["seen"] != devices["expected"]:
        message = f"leased {devices['expected']} device(s), the test process saw {devices['seen']}"
        return _infra("lease-mismatch", "stop_host", message)
    return None


def _infra(name: str, action: str, message: str) -> Judgement:
    attempts = 2 if action == "retry" else 1
    return Judgement(results.INFRA, f"{name}: {message}", Classification(name, "infra", action, attempts, message))


def _of_file(unit: RunUnit, evidence: FileEvidence, process: ProcessEvidence, dark: Sequence[DarkTest]) -> Judgement:
    ended, counts, failures = process.ended, evidence.counts(), evidence.failures()
    unfinished = [item.node for item in evidence.items.values() if item.outcome is None]
    complete = bool(evidence.items or failures or evidence.skipped_whole is not None) and not unfinished
    if not complete and ended.reason == "cancelled":
        return Judgement(results.CANCELLED, "the run was cancelled")
    if not complete and ended.reason == "timeout":
        return _timed_out(evidence, unfinished, ended)
    if counts["error"]:
        return Judgement(results.ERROR, _first(failures))
    if counts["failed"]:
        return Judgement(results.FAILED, _first(failures))
    if ended.reason == "exited":
        wrong = _process_error(unit, process)
        if wrong is not None:
            return Judgement(results.ERROR, wrong)
    if unfinished:
        return Judgement(results.ERROR, f"{len(unfinished)} test(s) never reported a result, first {unfinished[0]}")
    if dark:
        more = f" (and {len(dark) - 1} more)" if len(dark) > 1 else ""
        return Judgement(results.ERROR, f"dark test: {dark[0].text()}{more}")
    if not evidence.items and evidence.skipped_whole is None:
        return Judgement(results.NO_TESTS, "pytest collected no test from this file")
    if counts["passed"] + counts["xfailed"] == 0:
        reasons = sorted({item.reason for item in evidence.items.values() if item.reason})
        reason = evidence.skipped_whole or "; ".join(reasons[:3])
        return Judgement(results.ALL_SKIPPED, f"all {counts['skipped']} test(s) skipped: {reason}")
    return Judgement(results.PASSED)


def _timed_out(evidence: FileEvidence, unfinished: Sequence[str], ended: Ended) -> Judgement:
    running = [node for node in unfinished if evidence.items[node].started]
    if not evidence.items:
        return Judgement(results.TIMEOUT, f"no test was collected within {ended.wall_s:.0f} s")
    if running:
        return Judgement(results.TIMEOUT, f"still running after {ended.wall_s:.0f} s: {running[0]}")
    return Judgement(results.TIMEOUT, f"not finished after {ended.wall_s:.0f} s, next was {unfinished[0]}")


def _process_error(unit: RunUnit, process: ProcessEvidence) -> str | None:
    ended = process.ended
    if ended.signal is not None:
        return f"pytest was killed by signal {ended.signal}"
    assert ended.exit_code is not None
    if ended.exit_code not in _REPORTED:
        name = {INTERRUPTED: "interrupted", INTERNAL: "internal error", USAGE: "usage error"}.get(ended.exit_code)
        last = next((line.strip() for line in reversed(process.log_tail.splitlines()) if line.strip()), "")
        return f"pytest ended with exit code {ended.exit_code}{f' ({name})' if name else ''}: {last[:300]}"
    return disagreement_about(unit.path, ended.exit_code, process.junit, process.observed)


AGAIN, ALONE = "again", "alone"


def second_chance(unit: RunUnit, process: ProcessEvidence) -> str | None:
    """What a file deserves whose shared process ran out of time or died: another shared process, one of its own, or
    (None) the judgement as it is.

    Out of time: whoever was running hangs; files that were only waiting have another turn. Died: several may have been
    running and only a process of its own tells which one kills; what was complete has no second witness (JUnit).
    """
    ended = process.ended
    died = ended.reason == "exited" and ended.exit_code not in _REPORTED
    evidence = process.observed.files.get(unit.path, FileEvidence())
    if evidence.failures() or not (died or ended.reason == "timeout"):
        return None
    unfinished = [item for item in evidence.items.values() if item.outcome is None]
    if any(item.started for item in unfinished):
        return ALONE if died else None
    complete = bool(evidence.items or evidence.skipped_whole is not None) and not unfinished
    return AGAIN if died or not complete else None


def odd_exit(process: ProcessEvidence) -> str | None:
    """What to remember about a process whose exit code contradicts its reports, None where they agree."""
    if process.ended.reason != "exited" or process.ended.exit_code not in (OK, TESTS_FAILED):
        return None
    return disagreement(process.ended.exit_code, process.junit, process.observed)


def _first(failures: Sequence[Failure]) -> str:
    first = failures[0]
    line = next(iter(first.message.splitlines()), "")
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return f"{first.node}: {first.kind}: {line[:300]}{more}"


def _cause(
    judgement: Judgement, evidence: FileEvidence, process: ProcessEvidence, rows: Sequence[RetryRow]
) -> Classification:
    """The retry class. How the process ended, and the end of its log, speak for a file only when the process died
    or ran out of time; and the log only when it ran no other file."""
    failures = evidence.failures()
    timed_out = judgement.outcome == results.TIMEOUT
    crashed = not failures and process.ended.reason == "exited" and process.ended.exit_code not in _REPORTED
    if not failures and not crashed and not timed_out:
        return PLAIN_TEST
    return classify(
        Evidence(
            failed=[failure.as_failed_test() for failure in failures],
            log_tail=last_lines(process.log_tail) if len(process.observed.files) <= 1 else "",
            exit_code=process.exit_number if crashed else None,
            signal=process.ended.signal if crashed else None,
            timed_out=timed_out,
        ),
        rows,
    )
