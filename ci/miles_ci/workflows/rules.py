"""What must hold for every job of every generated file, written independently of the generated conditions.

A `Rule` says on which variables a job depends and when it must run. The table stands here once, as a
table. A job without a rule is itself a finding, so a new job cannot slip in unproven.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_ci.registry import Fleet
from miles_ci.registry.hosted import self_hosted_suites
from miles_ci.workflows.files.pr_test import first_cpu_suite, suites_of

# GPU stage with something selected: (fast-fail bypassed, state of the gating stage) -> runs.
NEEDS_TABLE: dict[tuple[bool, str], bool] = {
    (False, "success"): True,
    (False, "failure"): False,
    (False, "cancelled"): False,
    (False, "skipped, count > 0"): False,
    (False, "skipped, count 0"): True,
    (True, "success"): True,
    (True, "failure"): True,
    (True, "cancelled"): True,
    (True, "skipped, count > 0"): True,
    (True, "skipped, count 0"): True,
}


@dataclass(frozen=True)
class State:
    """One assignment: results of needed jobs, selected counts, and the flags of the run."""

    results: Mapping[str, str]
    counts: Mapping[str, int]
    cadence: str = "regular"
    bypass_label: bool = False
    image_needed: bool = False
    cancelled: bool = False
    event: Mapping[str, Any] = field(default_factory=dict)

    def bypass(self, fleet: Fleet) -> bool:
        return self.bypass_label or fleet.cadences[self.cadence].bypass_fastfail  # type: ignore[index]

    def row(self, fleet: Fleet, stage_before: str | None) -> bool:
        """The table for a stage that waits for `stage_before`."""
        if stage_before is None:
            return True
        result = self.results[stage_before]
        if result == "skipped":
            result = "skipped, count 0" if self.counts[stage_before] == 0 else "skipped, count > 0"
        return NEEDS_TABLE[self.bypass(fleet), result]

    def ok(self, *jobs: str) -> bool:
        return all(self.results[job] == "success" for job in jobs)


@dataclass(frozen=True)
class Rule:
    """When a job must run. `jobs` and `counts` are the variables to enumerate, `why` is for the reader."""

    why: str
    runs: Callable[[State], bool]
    jobs: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    cadences: bool = False
    image: bool = False
    events: tuple[Mapping[str, Any], ...] = ({},)


ALWAYS = Rule("always() runs whatever happened, also after a cancelled run", lambda state: True)
START = Rule("a job without needs runs unless the run was cancelled", lambda state: not state.cancelled)


def _pr_rules(fleet: Fleet, backends: tuple[str, ...], builds: bool) -> dict[str, Rule]:
    suites = suites_of(fleet, *backends)
    gpu = [suite for suite in suites if fleet.suites[suite].backend != "cpu"]
    roots = sorted({first_cpu_suite(fleet, suite) for suite in gpu}, key=str)
    needed_roots = tuple(root for root in roots if root)
    base = ("plan", "authorise")

    def chain(state: State) -> bool:
        wanted = any(state.counts.get(suite, 0) for suite in gpu)
        return not state.cancelled and state.ok(*base) and wanted and any(state.row(fleet, root) for root in roots)

    rules: dict[str, Rule] = {}
    if gpu:
        cadences, counts = bool(needed_roots), (*gpu[:1], *needed_roots)
        rules["resolve-deps"] = Rule(
            "follows the row of the stages it serves", chain, (*base, *needed_roots), counts, cadences
        )
        if builds:
            rules["docker-build"] = Rule(
                "follows the row of the stages it serves; nothing selected builds no image",
                lambda state: chain(state) and state.ok("resolve-deps") and state.image_needed,
                (*base, *needed_roots, "resolve-deps"), counts, cadences, image=True,
            )  # fmt: skip
        build = ("docker-build",) if builds else ()

        def image_ready(state: State) -> bool:
            built = state.results.get("docker-build", "skipped")
            return built == "success" or (built == "skipped" and not (builds and state.image_needed))

        rules["resolve-image"] = Rule(
            "follows the row of the stages it serves; a failed build leaves no image to resolve",
            lambda state: chain(state) and state.ok("resolve-deps") and image_ready(state),
            (*base, *needed_roots, "resolve-deps", *build), counts, cadences, image=builds,
        )  # fmt: skip
    for suite in suites:
        # A hosted CPU stage needs nobody's leave; every machine of ours needs the guard, whatever its backend.
        rules[suite] = _stage_rule(fleet, suite, base if suite in self_hosted_suites(fleet) else ("plan",))
    rules["required-check"] = ALWAYS
    return rules


def _stage_rule(fleet: Fleet, suite: str, base: tuple[str, ...]) -> Rule:
    stage_before = fleet.suites[suite].needs
    needed = (*base, *(("resolve-deps", "resolve-image") if fleet.suites[suite].backend != "cpu" else ()))
    waits_for = (stage_before,) if stage_before else ()

    def runs(state: State) -> bool:
        selected = state.counts[suite] > 0
        return not state.cancelled and state.ok(*needed) and selected and state.row(fleet, stage_before)

    return Rule("table of needed suites", runs, (*needed, *waits_for), (suite, *waits_for), cadences=bool(stage_before))


def _comment_events() -> tuple[dict[str, Any], ...]:
    found = []
    for pull in ({"url": "https://example.invalid"}, None):
        for kind in ("User", "Bot"):
            for body in ("/help", "thanks"):
                found.append(
                    {"issue": {"number": 1, "pull_request": pull}, "comment": {"user": {"type": kind}, "body": body}}
                )
    return tuple(found)


def _is_command(event: Mapping[str, Any]) -> bool:
    human = event["comment"]["user"]["type"] == "User"
    return bool(event["issue"]["pull_request"]) and human and "/" in event["comment"]["body"]


def _leg_rule(backend: str) -> Rule:
    def runs(state: State) -> bool:
        return not state.cancelled and state.ok("resolve") and state.counts[backend] > 0

    return Rule("runs iff resolve succeeded and selected something", runs, ("resolve",), (backend,))


def _bot_rules() -> dict[str, dict[str, Rule]]:
    comment = Rule(
        "people's comments on pull requests that hold a slash, unless cancelled",
        lambda state: not state.cancelled and _is_command(state.event), events=_comment_events(),
    )  # fmt: skip
    labelled = tuple(
        {"action": a, "label": {"name": n}} for a in ("labeled", "synchronize") for n in ("ok-to-test", "bug")
    )
    approve = Rule(
        "a push, or the label ok-to-test",
        lambda state: not state.cancelled and (state.event["action"] == "synchronize" or state.event["label"]["name"] == "ok-to-test"),
        events=labelled,
    )  # fmt: skip
    legs = {f"run-{backend}": _leg_rule(backend) for backend in ("cpu", "cuda", "rocm")}
    resolve = Rule("a failed announcement does not stop the run", lambda state: not state.cancelled, ("announce",))
    return {
        "approve-trusted.yml": {"approve": approve},
        "comment-gateway.yml": {"gateway": comment},
        "lint-patch.yml": {"format": START, "report": ALWAYS},
        "rerun-test.yml": {"announce": START, "resolve": resolve, **legs, "report": ALWAYS},
        "status-card.yml": {"card": START},
        "status-sweeper.yml": {"starvation": START, "sweep": START},
    }


def rules_for(fleet: Fleet) -> dict[str, dict[str, Rule]]:
    """File name -> job id -> rule, for every generated file."""
    single = {
        "_run-ci-rocm.yml": "run",
        "_run-ci.yml": "run",
        "_run-cpu-ci.yml": "run",
        "docker-build.yml": "build",
        "registry-scan.yml": "scan",
    }
    found: dict[str, dict[str, Rule]] = {name: {job: START} for name, job in single.items()}
    found["pr-test.yml"] = {"plan": START, **_pr_rules(fleet, ("cpu", "cuda"), builds=True)}
    own = [suite for suite in self_hosted_suites(fleet) if fleet.suites[suite].backend in ("cpu", "cuda")]
    if own:
        found["pr-test.yml"]["authorise"] = Rule(
            "asked iff something is to run on machines of ours",
            lambda s: not s.cancelled and s.ok("plan") and any(s.counts[suite] for suite in own[:2]),
            ("plan",), tuple(own[:2]),
        )  # fmt: skip
    if suites_of(fleet, "rocm"):
        allowed = Rule(
            "plans only what was authorised", lambda s: not s.cancelled and s.ok("authorise"), ("authorise",)
        )
        rocm = _pr_rules(fleet, ("rocm",), builds=False)
        found["pr-test-rocm.yml"] = {"authorise": START, "plan": allowed, **rocm}
    for name in ("nightly.yml", "weekly.yml", "release.yml"):
        found[name] = {"cuda": START, **({"rocm": START} if "pr-test-rocm.yml" in found else {})}
    return found | _bot_rules()
