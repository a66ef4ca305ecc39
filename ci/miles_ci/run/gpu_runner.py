"""A GPU shard: one pytest process per file, each on devices of its own lease, as many at once as fit.

Before a file starts: its devices are healthy (checked once, and again after any infra failure) and empty. A sick
device stops the shard: nothing more starts, what runs is finished.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from miles_ci.errors import CiError
from miles_ci.plan.model import Unit
from miles_ci.plan.slots import start_order
from miles_ci.run import results
from miles_ci.run.devices import health
from miles_ci.run.devices.added import DeviceBackend
from miles_ci.run.devices.dispatch import dispatch
from miles_ci.run.devices.inventory import Device, with_visibility
from miles_ci.run.devices.slots import Lease, LeaseManager, Request, check_requests, lease_environment
from miles_ci.run.judge.judge import Judgement, ProcessEvidence
from miles_ci.run.judge.metric_bounds import MetricJudge
from miles_ci.run.judge.retry import Classification
from miles_ci.run.process import pytest_process
from miles_ci.run.shard import RESERVE_S, ShardRun, attempt_record, finish, first_attempt_stands, skipped


def run(shard: ShardRun, keeper: MetricJudge, devices: Sequence[Device]) -> None:
    """Run every unit of the shard on these devices and record each one's result."""
    check_requests([Request(unit.id, unit.devices, unit.ms / 1000) for unit in shard.job.units], len(devices))
    manager = LeaseManager(shard.job.lock_dir, devices)
    form = _GpuForm(shard, keeper, manager)
    try:
        form.run_all([unit for unit in start_order(shard.job.units) if not unit.serial])
        for unit in start_order(shard.job.units):
            if unit.serial:
                form.run_all([unit])
    finally:
        manager.close()


class _GpuForm:
    def __init__(self, shard: ShardRun, keeper: MetricJudge, manager: LeaseManager) -> None:
        self._shard, self._keeper, self._manager = shard, keeper, manager
        self._backend: DeviceBackend = shard.job.backend or shard.job.info.backend
        self._healthy: set[str] = set()

    def run_all(self, units: Sequence[Unit]) -> None:
        """Run the units, as many at once as fit; what was not started when the shard stopped is recorded as such."""
        requests = [Request(unit.id, unit.devices, unit.ms / 1000) for unit in units]
        left = dispatch(
            self._manager, requests, lambda place, lease: self._guarded(units[place], lease), stopped=self._stopped
        )
        for place in left:
            self._shard.add(skipped(units[place], self._shard))

    def _stopped(self) -> bool:
        if self._shard.left_s() <= RESERVE_S:
            self._shard.stop(f"the shard's time limit of {self._shard.job.timeout_s:.0f} s is used up")
        return self._shard.cancel.is_set() or bool(self._shard.stop_reason)

    def _guarded(self, unit: Unit, lease: Lease) -> None:
        """A fault of the harness must not lose the unit: it is recorded, and the shard goes on."""
        try:
            self._one(unit, lease)
        except (CiError, OSError, RuntimeError, ValueError, AssertionError) as error:
            judgement = self._infra("harness", "none", f"{type(error).__name__}: {error}")
            self._shard.add(finish(unit, judgement, [attempt_record(1, judgement, None, unit)], None))

    def _one(self, unit: Unit, lease: Lease) -> None:
        attempts: list[results.Attempt] = []
        while True:
            number = len(attempts) + 1
            judgement, process, files = self._attempt(unit, lease, number)
            names = [device.bus_id for device in lease.devices]
            log = "" if files is None else files.log.name
            attempts.append(attempt_record(number, judgement, process, unit, log=log, devices=names))
            if judgement.outcome == results.INFRA:
                self._healthy.difference_update(names)
            if judgement.bad and number == 1:
                self._shard.count_failure()
            if not judgement.bad or not self._shard.retry_allowed(judgement, number):
                break
        if judgement.outcome == results.CANCELLED and process is None and len(attempts) == 1:
            self._shard.add(skipped(unit, self._shard))
            return
        if judgement.outcome == results.CANCELLED and len(attempts) > 1:
            self._shard.add(first_attempt_stands(unit, attempts))
            return
        metrics = []
        if files is not None:
            metrics = self._keeper.judge(unit, files.metrics, outcome=judgement.outcome, attempts=len(attempts))
        self._shard.add(finish(unit, judgement, attempts, process, metrics))

    def _attempt(
        self, unit: Unit, lease: Lease, number: int
    ) -> tuple[Judgement, ProcessEvidence | None, pytest_process.Files | None]:
        not_ready = self._make_ready(unit, lease)
        if not_ready is not None:
            return not_ready, None, None
        job = self._shard.job
        self._shard.remember_sources([unit])
        files = pytest_process.Files.below(job.folder, unit.id, number)
        extra = {
            **lease_environment(lease, self._backend),
            "MILES_CI_SUITE": job.info.suite,
            "MILES_CI_SHARD": job.info.shard,
            "MILES_CI_UNIT": unit.id,
        }
        base = with_visibility(job.env, lease.devices, self._backend)
        where = ", ".join(str(device.index) for device in lease.devices)
        title = f"{unit.id} on device(s) {where}" + (f" (attempt {number})" if number > 1 else "")
        self._shard.console.line(f"start {title}")
        process = pytest_process.run(
            [unit],
            files,
            root=job.root,
            env=pytest_process.environment(base, files, extra, gpu=True),
            timeout_s=max(1.0, min(unit.timeout_s, self._shard.left_s() - RESERVE_S)),
            workers=None,
            private_fds=lease.fds,
            cancel=self._shard.cancel,
        )
        judgement = self._shard.judge(unit, process)
        self._shard.console.log_of(f"{title}: {judgement.outcome}", files.log, failed=judgement.bad)
        return judgement, process, files

    def _make_ready(self, unit: Unit, lease: Lease) -> Judgement | None:
        """Health and empty memory; what stands in the way, or None."""
        if any(device.bus_id not in self._healthy for device in lease.devices):
            state = health.check(lease.devices, self._backend, environ=self._shard.job.env)
            if not state.ok:
                self._shard.stop(f"gpu-unhealthy: {state.error}")
                return self._infra("gpu-unhealthy", "stop_host", state.error)
            self._healthy.update(device.bus_id for device in lease.devices)
        started = time.monotonic()
        occupied = health.wait_for_memory(
            lease.devices,
            self._backend,
            min_memory_gib=unit.min_memory_gib,
            wait_s=self._shard.job.wait_memory_s,
            cancelled=self._shard.cancel.is_set,
        )
        if self._shard.cancel.is_set():
            return Judgement(results.CANCELLED, "the run was cancelled")
        if occupied:
            waited = time.monotonic() - started
            text = f"{'; '.join(entry.text() for entry in occupied)} (after {waited:.0f} s)"
            return self._infra("gpu-occupied", "none", text)
        return None

    @staticmethod
    def _infra(name: str, action: str, message: str) -> Judgement:
        return Judgement(results.INFRA, f"{name}: {message}", Classification(name, "infra", action, 1, message))
