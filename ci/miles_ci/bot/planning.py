"""The plan job: event -> policy and affected set -> plan.json, job outputs, summary.

`root` is what is planned (a checkout read as data), the registry always comes from the working folder, so a pull
request on a privileged workflow cannot bring its own fleet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_ci.plan.build import PlanOptions, build_plan
from miles_ci.plan.model import Plan
from miles_ci.registry import Fleet
from miles_ci.registry.hosted import is_hosted
from miles_ci.select.affected import affected_since
from miles_ci.select.policy import Policy
from miles_ci.select.selection import Selection, select
from miles_ci.workspace import Workspace


def labels_of(event: Mapping[str, Any]) -> list[str]:
    """Labels of the pull request, or those a manual dispatch names."""
    pull = event.get("pull_request")
    if isinstance(pull, Mapping):
        return [
            str(label["name"]) for label in pull.get("labels") or [] if isinstance(label, Mapping) and "name" in label
        ]
    inputs = event.get("inputs")
    text = inputs.get("labels") if isinstance(inputs, Mapping) else ""
    return str(text or "").split()


def base_of(event: Mapping[str, Any]) -> str | None:
    """The commit to compare with; None when the event changes nothing in particular (everything is selected)."""
    for path in (("pull_request", "base", "sha"), ("merge_group", "base_sha")):
        value: Any = event
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str) and len(value) == 40:
            return value
    return None


def make_plan(
    *,
    event: Mapping[str, Any],
    cadence: str,
    root: Path,
    registry: Path,
    suites: Sequence[str],
    source: str | None = None,
) -> tuple[Plan, Selection, Fleet]:
    """Plan the given suites of a checkout."""
    space = Workspace(root, registry)
    policy = Policy.resolve(space.fleet, cadence, labels_of(event))
    base = base_of(event)
    affected = None
    if policy.use_affected and base is not None:
        tests = {item.path for item in space.catalog.registrations}
        affected = affected_since(space.root, base, space.fleet.selection_rules(), tests)
    selection = select(space.catalog, space.fleet, policy, affected=affected)
    reason = affected.reason if affected is not None else None
    options = PlanOptions(shards={}, suites=tuple(suites), source=source, affected=reason)
    return build_plan(space.catalog, space.fleet, selection, space.durations, options), selection, space.fleet


def outputs(plan: Plan, suites: Sequence[str]) -> dict[str, str]:
    """What the other jobs read: `count-<suite>`, `matrix-<suite>`, `count-gpu`, `count-self-hosted`, `bypass`, `digest`, `cadence`."""
    out = {"bypass": "true" if plan.bypass_fastfail else "false", "cadence": plan.cadence, "digest": plan.digest}
    gpu = own = 0
    for suite in suites:
        shards = plan.shards_of(suite)
        summary = plan.suite(suite)
        out[f"count-{suite}"] = str(sum(len(shard.units) for shard in shards))
        legs = [{"shard": shard.index, "shards": shard.count, "runs_on": list(shard.runs_on)} for shard in shards]
        out[f"matrix-{suite}"] = json.dumps({"include": legs}, separators=(",", ":"))
        gpu += sum(len(shard.units) for shard in shards) if summary.backend != "cpu" else 0
        own += sum(len(shard.units) for shard in shards if not is_hosted(shard.runs_on))
    return out | {"count-gpu": str(gpu), "count-self-hosted": str(own)}


def disabled_pools(fleet: Fleet, suites: Sequence[str]) -> dict[str, str]:
    """Suite -> why its pools are switched off; only suites that have no other pool."""
    found: dict[str, str] = {}
    for suite in suites:
        pools = fleet.fitting_pools(suite) if fleet.suites[suite].backend != "cpu" else {}
        if pools and not fleet.enabled_pools(suite):
            name, pool = next(iter(pools.items()))
            assert pool.disabled is not None
            found[suite] = (
                f"pool {name} is disabled: {pool.disabled.reason} ({pool.disabled.issue}, until {pool.disabled.until})"
            )
    return found


def summary(plan: Plan, fleet: Fleet, suites: Sequence[str]) -> str:
    """Markdown for the job summary: each suite with its shards or the reason why it has none."""
    off = disabled_pools(fleet, suites)
    lines = [
        f"### Plan ({plan.cadence}, digest `{plan.digest[:16]}`)",
        "",
        "| suite | tests | shards | note |",
        "|---|---|---|---|",
    ]
    for suite in suites:
        shards, item = plan.shards_of(suite), plan.suite(suite)
        note = off.get(suite) or item.reason or ""
        lines.append(f"| {suite} | {sum(len(s.units) for s in shards)} | {len(shards)} | {note.replace('|', '/')} |")
    if plan.affected:
        lines += ["", f"Affected: {plan.affected}"]
    lines += [f"- warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines) + "\n"
