"""`miles-ci lint --workflows`: own rules, simulator proof, official tools, in this order.

`check(root, fleet)` prints a report and returns the exit code: 0 clean, 2 findings (or, with `require_tools`,
a tool that could not run), 7 drift.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from miles_ci.errors import ExitCode
from miles_ci.registry import Fleet
from miles_ci.workflows import generate
from miles_ci.workflows.guards import prove_guards
from miles_ci.workflows.lint import lint
from miles_ci.workflows.model import load_all
from miles_ci.workflows.tools import run_tools
from miles_ci.workflows.walk import walk


def check(root: Path, fleet: Fleet, *, require_tools: bool = False, say: Callable[[str], None] = print) -> int:
    """All layers; every finding is printed before the exit code is decided."""
    workflows = load_all(root)
    texts = {name: (root / generate.FOLDER / name).read_text(encoding="utf-8") for name in workflows}
    findings = lint(workflows, texts)
    for finding in findings:
        say(finding.text())
    say(f"own rules          {len(findings)} findings in {len(workflows)} files")
    report = walk(workflows, fleet)
    say(f"simulator          {sum(report.tried.values()):,} states, {len(report.violations)} violations")
    for violation in report.violations:
        say(violation.text())
    legs, unguarded = prove_guards(workflows, fleet)
    say(f"approval guards    {legs} legs on machines of ours, {len(unguarded)} violations")
    for violation in unguarded:
        say(violation.text())
    tools = run_tools(root)
    for tool in tools:
        say(tool.text())
    bad = bool(findings or report.violations or unguarded) or any(tool.status == "findings" for tool in tools)
    if bad or (require_tools and any(tool.status == "not run" for tool in tools)):
        return ExitCode.CONFIG
    if generate.drift(fleet, root):
        say("generated files    differ: run `miles-ci generate`")
        return ExitCode.DRIFT
    return ExitCode.OK
