"""A CPU shard: one pytest with xdist for everything that can share, then serial files alone, then retries alone.

No accelerator is visible to the tests. One lease gives the whole shard its ports and temporary folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from miles_ci.plan.model import Unit
from miles_ci.plan.slots import start_order
from miles_ci.run import results
from miles_ci.run.devices.inventory import with_visibility
from miles_ci.run.devices.slots import Lease, LeaseManager, Request, lease_environment
from miles_ci.run.judge.judge import AGAIN, ALONE, Judgement, ProcessEvidence, odd_exit, second_chance, seen_failing
from miles_ci.run.judge.metric_bounds import MetricJudge
from miles_ci.run.judge.pytest_events import Item
from miles_ci.run.process import pytest_process
from miles_ci.run.progress import Progress
from miles_ci.run.shard import RESERVE_S, ShardRun, attempt_record, finish, first_attempt_stands, skipped

MIN_TIMEOUT_S = 300.0
TIMEOUT_FACTOR = 3.0


def run(shard: ShardRun, keeper: MetricJudge) -> None:
    """Run every unit of the shard and record each one's result."""
    units = start_order(shard.job.units)
    together = [unit for unit in units if not unit.serial]
    alone = [unit for unit in units if unit.serial]
    manager = LeaseManager(shard.job.lock_dir)
    lease = manager.acquire(Request(f"{shard.job.info.suite} {shard.job.info.shard}", 0, 0.0))
    assert lease is not None
    form = _CpuForm(shard, keeper, lease)
    try:
        if together:
            form.first_attempt(together, shared=True)
        for unit in alone:
            form.first_attempt([unit], shared=False)
        form.retry()
    finally:
        lease.release()
        manager.close()


class _CpuForm:
    def __init__(self, shard: ShardRun, keeper: MetricJudge, lease: Lease) -> None:
        self._shard, self._keeper, self._lease = shard, keeper, lease
        self._again: list[tuple[Unit, list[results.Attempt]]] = []
        self._seen_failing: dict[Unit, list[Item]] = {}

    def first_attempt(self, units: Sequence[Unit], *, shared: bool, turn: int = 1) -> None:
        """`turn`: number of the shared process. One that hangs or dies does not take the innocent with it."""
        if self._shard.cancel.is_set() or self._shard.stop_reason:
            for unit in units:
                self._shard.add(skipped(unit, self._shard))
            return
        name = f"{self._shard.job.info.suite}-together" if shared else units[0].id
        process, files = self._process(units, name if turn == 1 else f"{name}-{turn}", 1, shared=shared)
        known = {unit: process.with_failures(unit.path, self._seen_failing.pop(unit, [])) for unit in units}
        again, alone = self._second_chances(known) if shared else ([], [])
        waiting = {*again, *alone}
        judged = [(unit, self._shard.judge(unit, known[unit])) for unit in units if unit not in waiting]
        for _ in filter(lambda pair: pair[1].bad, judged):
            self._shard.count_failure()
        for unit, judgement in judged:
            attempts = [attempt_record(1, judgement, known[unit], unit, log=files.log.name, shared=len(units) > 1)]
            if judgement.bad and self._shard.retry_allowed(judgement, 1):
                self._again.append((unit, attempts))
            else:
                self._finish(unit, judgement, attempts, known[unit], files)
        self._seen_failing.update({unit: seen_failing(unit, known[unit]) for unit in waiting})
        if shared:
            self._note_shared(process, len(again) + len(alone))
        for unit in alone:
            self.first_attempt([unit], shared=False)
        if again:
            self.first_attempt(again, shared=True, turn=turn + 1)

    def _second_chances(self, known: Mapping[Unit, ProcessEvidence]) -> tuple[list[Unit], list[Unit]]:
        """Files for another shared process and for one of their own: when somebody is to blame and time is left."""
        chances = {unit: second_chance(unit, process) for unit, process in known.items()}
        again = [unit for unit in known if chances[unit] == AGAIN]
        alone = [unit for unit in known if chances[unit] == ALONE]
        if len(again) == len(known) or self._shard.left_s() <= 2 * RESERVE_S or self._shard.cancel.is_set():
            return [], []
        return again, alone

    def _note_shared(self, process: ProcessEvidence, repeated: int) -> None:
        odd = odd_exit(process)
        if odd is not None:
            self._shard.note(f"the shared pytest process contradicts itself: {odd}")
        for left in process.ended.leaked:
            self._shard.note(f"leaked by the shared pytest process: pid {left.pid}: {left.command}")
        if process.ended.reason == "lost":
            self._shard.note(f"{process.ended.error}; what had been reported until then stands")
        if process.observed.dead_workers and not repeated:
            names = ", ".join(sorted(process.observed.dead_workers))
            self._shard.note(f"worker(s) {names} of the shared pytest process crashed")
        if repeated:
            self._shard.note(
                f"the shared pytest process {_why_over(process)}; {repeated} file(s) ran again, so that only the guilty fail"
            )

    def retry(self) -> None:
        """Second and last attempts, each file in a process of its own."""
        for unit, attempts in self._again:
            judgement: Judgement | None = None
            while judgement is None or (judgement.bad and self._shard.retry_allowed(judgement, len(attempts))):
                if self._shard.cancel.is_set() or self._shard.stop_reason:
                    break
                number = len(attempts) + 1
                process, files = self._process([unit], unit.id, number, shared=False)
                judgement = self._shard.judge(unit, process)
                attempts.append(attempt_record(number, judgement, process, unit, log=files.log.name))
            if judgement is None:
                self._shard.add(first_attempt_stands(unit, attempts))
            else:
                self._finish(unit, judgement, attempts, process, files)

    def _process(
        self, units: Sequence[Unit], name: str, attempt: int, *, shared: bool
    ) -> tuple[ProcessEvidence, pytest_process.Files]:
        job = self._shard.job
        self._shard.remember_sources(units)
        files = pytest_process.Files.below(job.folder, name, attempt)
        extra = {
            **lease_environment(self._lease, "cpu"),
            "MILES_CI_SUITE": job.info.suite,
            "MILES_CI_SHARD": job.info.shard,
            "MILES_CI_UNIT": units[0].id if len(units) == 1 else job.info.suite,
        }
        base = with_visibility(job.env, (), "cpu")
        # Workers that each start a thread for every core get in each other's way.
        base.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // job.workers)))
        env = pytest_process.environment(base, files, extra, gpu=False)
        title = f"{name}: {len(units)} file(s)" if len(units) > 1 else units[0].id
        follower = self._shard.console.follow(title + (f" (attempt {attempt})" if attempt > 1 else ""), files.log)
        progress = Progress(self._shard, units, files.events) if shared else None

        def on_tick() -> None:
            follower.tick()
            if progress is not None:
                progress.tick()

        try:
            process = pytest_process.run(
                units,
                files,
                root=job.root,
                env=env,
                timeout_s=self._limit(units, shared),
                workers=job.workers if shared else None,
                private_fds=self._lease.fds,
                cancel=self._shard.cancel,
                on_tick=on_tick,
            )
        finally:
            follower.close()
        return process, files

    def _limit(self, units: Sequence[Unit], shared: bool) -> float:
        """One file: its own limit. Many: three times their estimate. Never beyond the shard's."""
        wanted = float(units[0].timeout_s)
        if shared:
            wanted = max(
                MIN_TIMEOUT_S, TIMEOUT_FACTOR * sum(unit.ms / 1000 for unit in units), *(u.timeout_s for u in units)
            )
        return max(1.0, min(wanted, self._shard.left_s() - RESERVE_S))

    def _finish(
        self,
        unit: Unit,
        judgement: Judgement,
        attempts: Sequence[results.Attempt],
        process: ProcessEvidence,
        files: pytest_process.Files,
    ) -> None:
        metrics = self._keeper.judge(unit, files.metrics, outcome=judgement.outcome, attempts=len(attempts))
        self._shard.add(finish(unit, judgement, attempts, process, metrics))


def _why_over(process: ProcessEvidence) -> str:
    if process.ended.reason == "timeout":
        return "ran out of time"
    if process.stopped:
        return "was stopped from inside (-x, --maxfail or pytest.exit)"
    if not process.died:
        return f"lost its worker(s) {', '.join(sorted(process.observed.dead_workers))}"
    return "died"
