"""What this machine has, which suites run here and why the others cannot; and whether GitHub's runners
match the registry.

`examine` looks at devices through `miles_ci.run` (driver API in a child process, so a broken driver cannot hang
the caller). `compare_runners` is pure: pools against GitHub's runner list.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_ci.errors import CiError, Diagnostic, UsageError, nearest
from miles_ci.registry.identify import MEMORY_TOLERANCE, model_of
from miles_ci.registry.load import Reading
from miles_ci.registry.model import Fleet
from miles_ci.run import system


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One visible device. `model` is its name in the registry, None when the registry has no such model."""

    backend: str
    index: int
    name: str
    model: str | None
    total_mib: int
    bus_id: str


@dataclass(frozen=True, slots=True)
class SuiteVerdict:
    """Whether a suite's tests can run on this machine; `reason` says what is missing, empty when nothing."""

    suite: str
    runs: bool
    reason: str


@dataclass(frozen=True)
class Machine:
    """The findings of `examine`. `drivers`: backend -> driver version or why there is none."""

    python: str
    system: str
    cpus: int
    devices: tuple[DeviceReport, ...]
    drivers: dict[str, str]
    health: dict[str, str]
    capabilities: tuple[str, ...]
    suites: tuple[SuiteVerdict, ...]


def examine(fleet: Fleet, root: Path, *, check_health: bool = True) -> Machine:
    """Look at this machine. Never raises for a missing or broken driver: that is a finding."""
    from miles_ci.run.devices.added import device_backend
    from miles_ci.run.devices.health import check
    from miles_ci.run.devices.inventory import host_devices, inherited

    found: list[DeviceReport] = []
    drivers: dict[str, str] = {}
    health: dict[str, str] = {}
    unable = system.why_not()
    for backend in fleet.device_backends():
        if unable is not None:
            drivers[backend] = f"not asked ({unable})"
            continue
        try:
            asked = device_backend(fleet, backend, root)
            devices = inherited(host_devices(asked), asked)
        except CiError as error:
            drivers[backend] = f"none ({error})"
            continue
        for device in devices:
            model = model_of(fleet, backend, device.name)
            found.append(DeviceReport(backend, device.index, device.name, model, device.total_mib, device.bus_id))
        if not devices:
            drivers[backend] = "no device found"
        elif check_health:
            result = check(devices, asked)
            drivers[backend] = str(result.driver_version) if result.driver_version else "present"
            health[backend] = "ok" if result.ok else f"unhealthy: {result.error}"
        else:
            drivers[backend] = "present"
    models = {device.model for device in found if device.model is not None}
    capabilities = sorted({item for model in models for item in fleet.hardware[model].capabilities})
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        cpus=os.cpu_count() or 1,
        devices=tuple(found),
        drivers=drivers,
        health=health,
        capabilities=tuple(capabilities),
        suites=tuple(judge_suite(fleet, suite_id, found, health) for suite_id in fleet.suites),
    )


def judge_suite(
    fleet: Fleet, suite_id: str, devices: Sequence[DeviceReport], health: Mapping[str, str]
) -> SuiteVerdict:
    """Whether the devices of one machine meet a suite's needs."""
    suite = fleet.suites[suite_id]
    unable = system.why_not()
    if unable is not None:
        return SuiteVerdict(suite_id, False, unable)
    if suite.backend == "cpu":
        return SuiteVerdict(suite_id, True, "")
    here = [device for device in devices if device.backend == suite.backend]
    fitting = [device for device in here if device.model in suite.hardware]
    wanted = f"{suite.gpus} x {'/'.join(suite.hardware)}"
    if len(fitting) < suite.gpus:
        names: dict[str, int] = {}
        for device in here:
            names[device.model or device.name] = names.get(device.model or device.name, 0) + 1
        told = ", ".join(f"{count} x {name}" for name, count in sorted(names.items())) or "no device"
        return SuiteVerdict(suite_id, False, f"needs {wanted}, found {told}")
    for device in fitting:
        assert device.model is not None
        least = fleet.hardware[device.model].memory_gib * 1024 * MEMORY_TOLERANCE
        if device.total_mib < least:
            reason = f"device {device.index} has {device.total_mib} MiB, {device.model} means {least:.0f} MiB at least"
            return SuiteVerdict(suite_id, False, reason)
    state = health.get(suite.backend, "ok")
    return SuiteVerdict(suite_id, state == "ok", "" if state == "ok" else state)


def compare_runners(fleet: Fleet, reading: Reading, runners: Sequence[Mapping[str, Any]]) -> list[Diagnostic]:
    """Pools whose labels no runner carries (error), and counts that differ (warning).

    `runners` has the form of GitHub's list: name, status, labels [{name}]. Labels compare without case.
    """
    try:
        parsed = [
            (str(item["name"]), str(item["status"]), {str(label["name"]).lower() for label in item["labels"]})
            for item in runners
        ]
    except (KeyError, TypeError) as error:
        raise UsageError(f"runner list: every entry needs name, status and labels [{{name}}]: {error}") from error
    every = sorted({label for _, _, labels in parsed for label in labels})
    findings: list[Diagnostic] = []
    for name, pool in fleet.pools.items():
        wanted = {label.lower() for label in pool.labels}
        line, column = reading.document.place(("pools", name, "labels"))
        path = reading.document.path
        for label in sorted(wanted - set(every)):
            near = nearest(label, every)
            hint = f"; did you mean '{near}'?" if near else ""
            message = f"pools.{name}.labels: no runner carries '{label}'{hint}"
            findings.append(Diagnostic(path, line, column, "label-without-runner", message))
        carrying = [(runner, status) for runner, status, labels in parsed if wanted <= labels]
        if wanted <= set(every) and not carrying:
            message = f"pools.{name}.labels: no single runner carries all of {', '.join(pool.labels)}"
            findings.append(Diagnostic(path, line, column, "label-without-runner", message))
        elif carrying:
            online = sum(status == "online" for _, status in carrying)
            place = reading.document.place(("pools", name, "count"))
            if len(carrying) != pool.count:
                message = f"pools.{name}.count: {pool.count} in the registry, {len(carrying)} registered on GitHub"
                findings.append(Diagnostic(path, *place, "runner-count", message, "warning"))
            if online < len(carrying) and pool.disabled is None:
                message = f"pools.{name}: {online} of {len(carrying)} runners are online"
                findings.append(Diagnostic(path, *place, "runner-offline", message, "warning"))
    return sorted(findings)
