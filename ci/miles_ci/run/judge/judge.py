"""From evidence to the outcome of one unit: pure functions, no processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from miles_ci.plan.model import Unit
from miles_ci.run import results
from miles_ci.run.judge.never_executed import NeverExecuted, left_out
from miles_ci.run.judge.pytest_events import (
    CRASH,
    Failure,
    FileEvidence,
    Item,
    JUnitCounts,
    Observed,
    disagreement,
    disagreement_about,
)
from miles_ci.run.judge.retry import PLAIN_TEST, Classification, Evidence, RetryRow, classify, last_lines
from miles_ci.run.process.supervisor_client import Ended

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
    def died(self) -> bool:
        """The main process ended by itself, and not as pytest ends when it has run what it was given."""
        return self.ended.reason == "exited" and self.ended.exit_code not in _REPORTED

    @property
    def stopped(self) -> bool:
        """pytest itself ended the session early (`-x`, `--maxfail`), with everything written."""
        return self.died and self.ended.exit_code == INTERRUPTED and self.observed.ended is not None

    def with_failures(self, path: str, earlier: Sequence[Item]) -> ProcessEvidence:
        """The same with tests of the file that failed in an earlier turn: a failure that was seen stands, whatever
        this turn says; but a test that hangs now goes on being one that hangs."""
        if not earlier:
            return self
        known = self.observed.files.get(path, FileEvidence())
        items = dict(known.items)
        for item in earlier:
            now = items.get(item.node)
            hangs = now is not None and now.started and now.outcome is None
            items[item.node] = replace(now, failures=item.failures) if now is not None and hangs else item
        files = {**self.observed.files, path: replace(known, items=items)}
        return replace(self, observed=replace(self.observed, files=files))

    @property
    def exit_number(self) -> int | None:
        """Exit code as a shell shows it: 128 + N for a death by signal N."""
        if self.ended.signal is not None:
            return 128 + self.ended.signal
        return self.ended.exit_code


def judge_unit(
    unit: Unit,
    process: ProcessEvidence,
    never_executed: Sequence[NeverExecuted],
    rows: Sequence[RetryRow],
) -> Judgement:
    """The outcome of one unit in this process, before retries, metric bounds and tolerance are considered."""
    evidence = process.observed.files.get(unit.path, FileEvidence())
    early = _of_process(process, complete=complete(evidence))
    if early is not None:
        return early
    judgement = _of_file(unit, evidence, process, never_executed)
    if not judgement.bad or judgement.outcome in (results.CANCELLED, results.NOT_RUN, results.NO_TESTS):
        return judgement
    if judgement.outcome == results.ALL_SKIPPED:
        return judgement
    cause = _cause(judgement, evidence, process, rows)
    if cause.kind == "infra":
        message = f"{cause.name}: {cause.matched}; {judgement.message}".rstrip("; ")
        return Judgement(results.INFRA, message, cause)
    return Judgement(judgement.outcome, judgement.message, cause)


def complete(evidence: FileEvidence) -> bool:
    """Every test of the file has reported its result (or the file as a whole has)."""
    whole = bool(evidence.items or evidence.collection_failures or evidence.skipped_whole is not None)
    return whole and all(item.outcome is not None for item in evidence.items.values())


def _of_process(process: ProcessEvidence, *, complete: bool) -> Judgement | None:
    """Ends that say nothing about the test. A lost supervisor does not take back what was reported before."""
    ended, devices = process.ended, process.observed.devices
    if ended.survivors:
        names = ", ".join(f"pid {left.pid} {left.command}" for left in ended.survivors)
        return _infra("unkillable", "stop_host", f"still alive after SIGKILL: {names}")
    if ended.reason == "spawn":
        return _infra("spawn", "none", f"the test process could not be started: {ended.error}")
    if ended.reason == "lost" and not complete:
        return _infra("supervisor-lost", "retry", ended.error)
    if devices is not None and devices["seen"] != devices["expected"]:
        message = f"leased {devices['expected']} device(s), the test process saw {devices['seen']}"
        return _infra("lease-mismatch", "stop_host", message)
    return None


def _infra(name: str, action: str, message: str) -> Judgement:
    attempts = 2 if action == "retry" else 1
    return Judgement(results.INFRA, f"{name}: {message}", Classification(name, "infra", action, attempts, message))


def _of_file(
    unit: Unit, evidence: FileEvidence, process: ProcessEvidence, never_executed: Sequence[NeverExecuted]
) -> Judgement:
    ended, counts, failures = process.ended, evidence.counts(), evidence.failures()
    unfinished = [item.node for item in evidence.items.values() if item.outcome is None]
    over = complete(evidence)
    if not over and ended.reason == "cancelled":
        return Judgement(results.CANCELLED, "the run was cancelled")
    to_blame = len(process.observed.files) <= 1 or bool(_last_place(unit, process.observed))
    if not over and ended.reason == "timeout" and (to_blame or not failures):
        return _timed_out(evidence, unfinished, ended)
    if failures:
        broken = _breakdown(unit, process) if to_blame else None
        if broken is not None:
            return Judgement(results.ERROR, f"{broken}; before that {_first(failures)}")
        more = f"; {len(unfinished)} test(s) never had their turn, next was {unfinished[0]}" if unfinished else ""
        return Judgement(results.ERROR if counts["error"] else results.FAILED, f"{_first(failures)}{more}")
    if ended.reason == "exited":
        wrong = _process_error(unit, process)
        if wrong is not None:
            return Judgement(results.ERROR, wrong)
    if unfinished:
        return Judgement(results.ERROR, f"{len(unfinished)} test(s) never reported a result, first {unfinished[0]}")
    missing, _ = left_out(unit, evidence)
    if missing:
        first, more = next(iter(missing.items())), f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        return Judgement(results.ERROR, f"never executed: {first[0]}: {first[1]}{more}")
    if never_executed:
        more = f" (and {len(never_executed) - 1} more)" if len(never_executed) > 1 else ""
        return Judgement(results.ERROR, f"never executed: {never_executed[0].text()}{more}")
    if not evidence.items and evidence.skipped_whole is None:
        return Judgement(results.NO_TESTS, "pytest collected no test from this file")
    if counts["passed"] + counts["xfailed"] == 0:
        reasons = sorted({item.reason for item in evidence.items.values() if item.reason})
        reason = evidence.skipped_whole or "; ".join(reasons[:3])
        return Judgement(results.ALL_SKIPPED, f"all {counts['skipped']} test(s) skipped: {reason}")
    return Judgement(results.PASSED)


def _timed_out(evidence: FileEvidence, unfinished: Sequence[str], ended: Ended) -> Judgement:
    running = [node for node in unfinished if evidence.items[node].started]
    failures = evidence.failures()
    before = f"; before that {_first(failures)}" if failures else ""
    if not evidence.items:
        return Judgement(results.TIMEOUT, f"no test was collected within {ended.wall_s:.0f} s")
    if running:
        return Judgement(results.TIMEOUT, f"still running after {ended.wall_s:.0f} s: {running[0]}{before}")
    return Judgement(results.TIMEOUT, f"not finished after {ended.wall_s:.0f} s, next was {unfinished[0]}{before}")


def _breakdown(unit: Unit, process: ProcessEvidence) -> str | None:
    """How the process ended before pytest had come to its end; None when pytest ended by itself."""
    if process.ended.reason != "exited" or process.observed.ended is not None:
        return None
    return _process_error(unit, process)


def _process_error(unit: Unit, process: ProcessEvidence) -> str | None:
    ended = process.ended
    where = _last_place(unit, process.observed)
    if ended.signal is not None:
        return f"crashed: pytest was killed by signal {ended.signal}{where}"
    assert ended.exit_code is not None
    if process.observed.ended is None and where:
        return f"crashed: the process ended with exit code {ended.exit_code}{where}"
    if ended.exit_code not in _REPORTED:
        name = {INTERRUPTED: "interrupted", INTERNAL: "internal error", USAGE: "usage error"}.get(ended.exit_code)
        last = next((line.strip() for line in reversed(process.log_tail.splitlines()) if line.strip()), "")
        return f"pytest ended with exit code {ended.exit_code}{f' ({name})' if name else ''}{where}: {last[:300]}"
    return disagreement_about(unit.path, ended.exit_code, process.junit, process.observed)


def _last_place(unit: Unit, observed: Observed) -> str:
    """` while ...`: what of this file was going on when the events end; empty when nothing was."""
    if unit.path in observed.importing.values():
        return f" while importing {unit.path}"
    evidence = observed.files.get(unit.path, FileEvidence())
    running = (item.node for item in evidence.items.values() if item.started and item.outcome is None)
    return next((f" while running {node}" for node in running), "")


AGAIN, ALONE = "again", "alone"


def second_chance(unit: Unit, process: ProcessEvidence) -> str | None:
    """What a file deserves whose shared process ran out of time or died: another shared process, one of its own, or
    (None) the judgement as it is.

    Out of time: whoever was running hangs; files that were only waiting have another turn. Died: several may have been
    running and only a process of its own tells which one kills; what was complete has no second witness (JUnit).
    Only an xdist worker died: the test it was running is guilty, what was complete stays, the rest has another turn.
    A failure of its own does not cost the file that turn; the failure stands (`seen_failing`).
    """
    observed, late = process.observed, process.ended.reason == "timeout"
    evidence = observed.files.get(unit.path, FileEvidence())
    if not (process.died or late or observed.dead_workers) or process.ended.reason in ("cancelled", "lost"):
        return None
    failures = evidence.failures()
    if failures and _blamed_unstarted(evidence):
        return ALONE
    if failures and (process.stopped or complete(evidence) or any(failure.kind == CRASH for failure in failures)):
        return None
    if unit.path in observed.importing.values():
        return None if late else ALONE
    if any(item.started and item.outcome is None for item in evidence.items.values()):
        return None if late else ALONE
    return AGAIN if process.died or not complete(evidence) else None


def seen_failing(unit: Unit, process: ProcessEvidence) -> list[Item]:
    """Tests of the file whose failure stands when it has another turn; a guess of xdist does not."""
    evidence = process.observed.files.get(unit.path, FileEvidence())
    if _blamed_unstarted(evidence):
        return []
    return [item for item in evidence.items.values() if item.failures]


def _blamed_unstarted(evidence: FileEvidence) -> bool:
    """xdist blames a dead worker's next test; one that never started is a guess, and a turn of its own tells."""
    return all(failure.kind == CRASH and not evidence.items[failure.node].started for failure in evidence.failures())


def odd_exit(process: ProcessEvidence) -> str | None:
    """What to remember about a process whose exit code contradicts its reports, None where they agree."""
    if process.ended.reason != "exited" or process.ended.exit_code not in (OK, TESTS_FAILED):
        return None
    return disagreement(process.ended.exit_code, process.junit, process.observed)


def _first(failures: Sequence[Failure]) -> str:
    first = failures[0]
    line = next(iter(first.message.splitlines()), "")
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    if first.kind == CRASH:
        return f"crashed: {first.node}: {line[:300]}{more}"
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
