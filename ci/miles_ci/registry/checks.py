"""Rules across the entries of the registry, each reported at its place.

Works on the entries that are well-formed by themselves; names are known as soon as they are written, so
one malformed entry does not make every reference to it an error too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import date
from typing import Any

from miles_ci.errors import suggestion
from miles_ci.registry.cron import cron_problem
from miles_ci.registry.dates import check_until
from miles_ci.registry.list_checks import check_globs, check_repetitions
from miles_ci.registry.model import ARCH_VENDOR, VENDOR_OF_BACKEND
from miles_ci.registry.patterns import slow_pattern
from miles_ci.registry.yaml_source import Document, Keys

FIRST_SUITE = "stage-a-cpu"
_TAKEN_VARIABLES = frozenset({"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "PATH", "HOME"})

Entries = dict[str, dict[str, Any]]


def check_references(document: Document, entries: Entries, today: date) -> None:
    """Append every violation to `document.errors`."""
    checks: tuple[Callable[[Document, Entries], None], ...] = (
        _roots,
        _backends,
        _hardware,
        _pools,
        _ambiguous_labels,
        _suites,
        _needs,
        _labels,
        _cadences,
        _retry,
        _notify,
        check_globs,
        check_repetitions,
    )
    for check in checks:
        check(document, entries)
    for name, pool in entries["pools"].items():
        if pool.disabled is not None:
            check_until(document, ("pools", name, "disabled", "until"), pool.disabled.until, today)


def _names(document: Document, *keys: str) -> list[str]:
    """Every name written in a section, well-formed or not."""
    current: Any = document.data
    for key in keys:
        current = current.get(key) if isinstance(current, dict) else None
    return list(current) if isinstance(current, dict) else []


def _unknown(document: Document, keys: Keys, code: str, value: str, known: Iterable[str]) -> None:
    dotted = ".".join(str(key) for key in keys if isinstance(key, str))
    document.error(keys, code, f"{dotted}: '{value}' is not known{suggestion(value, known)}")


def _roots(document: Document, entries: Entries) -> None:
    roots = document.data.get("roots") if isinstance(document.data, dict) else None
    given = [root for root in roots if isinstance(root, str)] if isinstance(roots, list) else []
    for index, root in enumerate(given):
        outer = next((other for other in given if root.startswith(f"{other}/")), None)
        if outer is not None:
            message = f"roots: '{root}' lies inside '{outer}', so its tests would count twice; name one of them"
            document.error(("roots", index), "overlapping-roots", message)


def _backends(document: Document, entries: Entries) -> None:
    vendors, architectures = set(VENDOR_OF_BACKEND.values()), set(ARCH_VENDOR)
    for name, item in entries["backends"].items():
        keys: Keys = ("backends", name)
        if name in VENDOR_OF_BACKEND:
            message = f"backends.{name}: is always there and cannot be changed; remove it"
            document.error(keys, "shipped-backend", message, of_key=True)
            continue
        if item.vendor in vendors:
            message = f"backends.{name}.vendor: '{item.vendor}' already belongs to another backend"
            document.error((*keys, "vendor"), "duplicate-name", message)
        vendors.add(item.vendor)
        for index, arch in enumerate(item.architectures):
            if arch in architectures:
                message = f"backends.{name}.architectures: '{arch}' already belongs to another backend"
                document.error((*keys, "architectures", index), "duplicate-name", message)
            architectures.add(arch)
        if item.visible in _TAKEN_VARIABLES or item.visible.startswith(("MILES_CI_", "LD_", "PYTHON")):
            message = f"backends.{name}.visible: {item.visible} has another meaning; name the variable of its driver"
            document.error((*keys, "visible"), "wrong-variable", message)


def _arch_vendor(entries: Entries) -> dict[str, str]:
    """Every architecture, those of added backends included -> its vendor."""
    added = {arch: item.vendor for item in entries["backends"].values() for arch in item.architectures}
    return {**added, **ARCH_VENDOR}


def _hardware(document: Document, entries: Entries) -> None:
    vendor_of = _arch_vendor(entries)
    vendors = sorted(set(vendor_of.values()))
    for name, item in entries["hardware"].items():
        keys: Keys = ("hardware", name)
        if item.vendor not in vendors:
            _unknown(document, (*keys, "vendor"), "unknown-vendor", item.vendor, vendors)
        if item.arch not in vendor_of:
            _unknown(document, (*keys, "arch"), "unknown-arch", item.arch, vendor_of)
        if item.vendor not in vendors or item.arch not in vendor_of:
            continue
        if vendor_of[item.arch] != item.vendor:
            message = f"hardware.{name}.arch: '{item.arch}' is no architecture of vendor '{item.vendor}'"
            document.error((*keys, "arch"), "inconsistent-hardware", message)
        for field, vendor in (("sm", "nvidia"), ("gfx", "amd")):
            given = getattr(item, field) is not None
            if given != (item.vendor == vendor):
                word = "required for" if item.vendor == vendor else "not allowed for"
                message = f"hardware.{name}.{field}: {word} vendor '{item.vendor}'"
                document.error((*keys, field), "inconsistent-hardware", message)
        if (item.memory_gib > 0) != (item.vendor != "cpu"):
            message = f"hardware.{name}.memory_gib: required for devices, not allowed for vendor 'cpu'"
            document.error((*keys, "memory_gib"), "inconsistent-hardware", message)
        if name in vendor_of and name != item.arch:
            message = f"hardware.{name}: the name of an architecture; a declaration could not tell them apart"
            document.error(keys, "inconsistent-hardware", message, of_key=True)


def _pools(document: Document, entries: Entries) -> None:
    known = _names(document, "hardware")
    for name, pool in entries["pools"].items():
        if pool.hardware not in known:
            _unknown(document, ("pools", name, "hardware"), "unknown-hardware", pool.hardware, known)
        elif pool.hardware in entries["hardware"] and entries["hardware"][pool.hardware].vendor == "cpu":
            message = f"pools.{name}.hardware: '{pool.hardware}' has no devices; CPU suites use runs_on"
            document.error(("pools", name, "hardware"), "pool-without-devices", message)


def _ambiguous_labels(document: Document, entries: Entries) -> None:
    """A job takes any runner that has all its labels: a subset reaches the other pool's machines."""
    for name, pool in entries["pools"].items():
        for other_name, other in entries["pools"].items():
            if other_name == name or other.hardware == pool.hardware:
                continue
            if {label.lower() for label in pool.labels} <= {label.lower() for label in other.labels}:
                message = (
                    f"pools.{name}.labels: a subset of those of '{other_name}' ({other.hardware}), so its jobs "
                    f"could land there; add a label that only '{pool.hardware}' runners carry"
                )
                document.error(("pools", name, "labels"), "ambiguous-labels", message)


def _suites(document: Document, entries: Entries) -> None:
    first = entries["suites"].get(FIRST_SUITE)
    if FIRST_SUITE not in _names(document, "suites") or (first is not None and first.backend != "cpu"):
        message = (
            f"suites.{FIRST_SUITE}: a CPU suite of this name is required; it runs tests/fast and reports faulty files"
        )
        document.error(("suites", FIRST_SUITE), "missing-suite", message, of_key=True)
    hardware_names, pool_names = _names(document, "hardware"), _names(document, "pools")
    backend_names = [*VENDOR_OF_BACKEND, *_names(document, "backends")]
    added = {backend: item.vendor for backend, item in entries["backends"].items()}
    for name, suite in entries["suites"].items():
        keys: Keys = ("suites", name)
        if suite.backend not in backend_names:
            _unknown(document, (*keys, "backend"), "unknown-backend", suite.backend, backend_names)
            continue
        for index, model in enumerate(suite.hardware):
            place: Keys = (*keys, "hardware", index)
            if model not in hardware_names:
                _unknown(document, place, "unknown-hardware", model, hardware_names)
            elif model in entries["hardware"]:
                vendor = entries["hardware"][model].vendor
                wanted = VENDOR_OF_BACKEND.get(suite.backend, added.get(suite.backend))
                if wanted is not None and vendor != wanted:
                    message = f"suites.{name}.hardware: '{model}' is {vendor}, the suite's backend is {suite.backend}"
                    document.error(place, "wrong-backend", message)
        for index, pool in enumerate(suite.pools):
            if pool not in pool_names:
                _unknown(document, (*keys, "pools", index), "unknown-pool", pool, pool_names)
        _suite_machines(document, keys, suite, entries)
        _suite_times(document, keys, suite)


def _suite_machines(document: Document, keys: Keys, suite: Any, entries: Entries) -> None:
    name = keys[1]
    if suite.backend == "cpu":
        if suite.pools or suite.gpus:
            field = "pools" if suite.pools else "gpus"
            document.error((*keys, field), "cpu-suite", f"suites.{name}.{field}: not allowed on a CPU suite")
        if not suite.runs_on:
            document.error(keys, "missing-field", f"suites.{name}.runs_on: is required on a CPU suite", of_key=True)
        return
    if suite.runs_on:
        message = f"suites.{name}.runs_on: only for CPU suites; a GPU suite names pools"
        document.error((*keys, "runs_on"), "gpu-suite", message)
    if suite.gpus < 1:
        document.error((*keys, "gpus"), "missing-field", f"suites.{name}.gpus: a GPU suite needs at least 1")
    if not suite.pools:
        document.error(keys, "missing-field", f"suites.{name}.pools: is required on a GPU suite", of_key=True)
    pools = [(index, entries["pools"][pool]) for index, pool in enumerate(suite.pools) if pool in entries["pools"]]
    if pools and not any(pool.gpus_per_runner >= suite.gpus for _, pool in pools):
        message = f"suites.{name}.pools: none has runners with {suite.gpus} devices (suites.{name}.gpus)"
        document.error((*keys, "pools"), "no-fitting-pool", message)
    for index, pool in pools:
        if pool.hardware not in suite.hardware:
            message = (
                f"suites.{name}.pools: '{suite.pools[index]}' is {pool.hardware}, not listed in the suite's hardware"
            )
            document.error((*keys, "pools", index), "wrong-hardware", message)
    if len(pools) == len(suite.pools) and pools:
        for index, model in enumerate(suite.hardware):
            if model not in {pool.hardware for _, pool in pools}:
                message = f"suites.{name}.hardware: no pool of the suite has '{model}'"
                document.error((*keys, "hardware", index), "no-fitting-pool", message)


def _suite_times(document: Document, keys: Keys, suite: Any) -> None:
    name = keys[1]
    if suite.max_shards < suite.min_shards:
        message = f"suites.{name}.max_shards: {suite.max_shards} is less than min_shards {suite.min_shards}"
        document.error((*keys, "max_shards"), "shard-range", message)
    if suite.target_wall_s <= suite.setup_seconds:
        message = (
            f"suites.{name}.target_wall_s: {suite.target_wall_s} leaves nothing after setup_s {suite.setup_seconds}"
        )
        document.error((*keys, "target_wall_s"), "target-too-short", message)
    if suite.test_timeout_s > suite.timeout_s:
        message = (
            f"suites.{name}.test_timeout_s: {suite.test_timeout_s} exceeds the shard's timeout_s {suite.timeout_s}"
        )
        document.error((*keys, "test_timeout_s"), "timeout-range", message)
    if suite.timeout_s < suite.target_wall_s:
        message = f"suites.{name}.timeout_s: {suite.timeout_s} is less than target_wall_s {suite.target_wall_s}"
        document.error((*keys, "timeout_s"), "timeout-range", message)


def _needs(document: Document, entries: Entries) -> None:
    known = _names(document, "suites")
    suites = entries["suites"]
    reported: set[str] = set()
    for name, suite in suites.items():
        if suite.needs is not None and suite.needs not in known:
            _unknown(document, ("suites", name, "needs"), "unknown-suite", suite.needs, known)
        chain, current = [name], suite.needs
        while current in suites and current not in chain:
            chain.append(current)
            current = suites[current].needs
        # Each cycle is reported once, at its alphabetically first member.
        if current == name and name == min(chain) and name not in reported:
            reported.update(chain)
            message = f"suites.{name}.needs: circle {' -> '.join([*chain, name])}"
            document.error(("suites", name, "needs"), "needs-cycle", message)


def _labels(document: Document, entries: Entries) -> None:
    groups = ("domain", "scope", "behaviour")
    owner_of: dict[str, str] = {}
    for group in groups:
        for name in _names(document, "labels", group):
            if name in owner_of:
                message = f"labels.{group}.{name}: already a {owner_of[name]} label"
                document.error(("labels", group, name), "duplicate-name", message, of_key=True)
            owner_of.setdefault(name, group)
    domain = _names(document, "labels", "domain")
    for name, label in entries["labels.scope"].items():
        for index, value in enumerate(label.subtract):
            if value not in domain:
                _unknown(document, ("labels", "scope", name, "subtract", index), "unknown-label", value, domain)


def _cadences(document: Document, entries: Entries) -> None:
    domain = _names(document, "labels", "domain")
    written = _names(document, "cadences")
    seen: dict[str, str] = {}
    for name in ("regular", "nightly", "weekly", "release"):
        if name not in written:
            document.error(("cadences",), "missing-cadence", f"cadences.{name}: is required", of_key=True)
            continue
        cadence = entries["cadences"].get(name)
        if cadence is None:
            continue
        keys: Keys = ("cadences", name)
        scheduled = name in ("nightly", "weekly")
        if scheduled != bool(cadence.crons):
            word = (
                "a scheduled cadence needs at least one cron" if scheduled else "only nightly and weekly are scheduled"
            )
            document.error(
                (*keys, "crons"),
                "missing-cron" if scheduled else "cron-without-cadence",
                f"cadences.{name}.crons: {word}",
            )
        for index, cron in enumerate(cadence.crons):
            problem = cron_problem(cron)
            if problem:
                document.error((*keys, "crons", index), "bad-cron", f"cadences.{name}.crons: '{cron}': {problem}")
            if cron in seen:
                message = f"cadences.{name}.crons: '{cron}' already belongs to '{seen[cron]}'"
                document.error((*keys, "crons", index), "duplicate-cron", message)
            seen.setdefault(cron, name)
        for index, value in enumerate(cadence.subtract):
            if value not in domain:
                _unknown(document, (*keys, "subtract", index), "unknown-label", value, domain)


def _retry(document: Document, entries: Entries) -> None:
    for name, rule in entries["retry"].items():
        keys: Keys = ("retry", name)
        try:
            re.compile(rule.pattern)
        except (re.error, RecursionError, OverflowError) as error:
            document.error((*keys, "pattern"), "bad-pattern", f"retry.{name}.pattern: no regular expression: {error}")
        else:
            slow = slow_pattern(rule.pattern)
            if slow is not None:
                message = (
                    f"retry.{name}.pattern: {slow} can take for ever on a long log; repeat a character class "
                    r"instead, with a bound: `[\w.]{1,200}`"
                )
                document.error((*keys, "pattern"), "slow-pattern", message)
        repeats = rule.action in ("retry", "retry_other_host")
        if repeats != (rule.max_attempts > 1):
            message = f"retry.{name}.max_attempts: {rule.max_attempts} contradicts action '{rule.action}'"
            document.error((*keys, "max_attempts"), "retry-attempts", message)
        if rule.kind == "test" and rule.action != "none":
            message = f"retry.{name}.action: a failure of the test itself is never repeated; use 'none'"
            document.error((*keys, "action"), "retry-attempts", message)


def _notify(document: Document, entries: Entries) -> None:
    for name, item in entries["notify"].items():
        if (item.secret is not None) != (item.kind == "lark"):
            word = (
                "is required for lark (the name of the secret)" if item.kind == "lark" else f"not used by {item.kind}"
            )
            document.error(("notify", name, "secret"), "notify-secret", f"notify.{name}.secret: {word}")
