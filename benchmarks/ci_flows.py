"""Generated workflows and bots: generate and lint, walker, gateway to dispatch, cards. `python benchmarks/ci_flows.py`.

Prints one line for each claim of the specification with its limit; exit 1 when one is exceeded. The walker is
compared with the naive way, which evaluates every state by simulating the whole file instead of the one condition.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_ci.registry import Fleet, load_fleet
from miles_ci.report.analyse import Report
from miles_ci.report.analyst import Analysis
from miles_ci.report.cards import Card, JobRow, lark, pr_comment
from miles_ci.workflows.generate import render
from miles_ci.workflows.lint import lint
from miles_ci.workflows.model import Workflow
from miles_ci.workflows.rules import rules_for
from miles_ci.workflows.simulate import Event, Outcome, simulate
from miles_ci.workflows.walk import job_outputs, states_of, walk

ROOT = Path(__file__).resolve().parents[1]
REPEAT = 3


def best(function: Callable[[], Any]) -> float:
    """The shortest of a few runs, seconds."""
    times = []
    for _ in range(REPEAT):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def generate_and_lint(fleet: Fleet) -> dict[str, Workflow]:
    workflows = {Path(path).name: Workflow.from_text(text, path) for path, text in render(fleet).items()}
    assert lint(workflows) == []
    return workflows


def naive_rate(workflow: Workflow, fleet: Fleet, count: int = 2000) -> float:
    """Seconds for one state when the whole file is simulated for it."""
    job = workflow.jobs["stage-c-8-gpu-h200"]
    rule = rules_for(fleet)["pr-test.yml"][job.id]
    suites = {name: 1 for name in workflow.jobs if name in fleet.suites}
    start = time.perf_counter()
    for at, state in enumerate(states_of(workflow, job, rule)):
        if at == count:
            break
        full = type(state)(
            state.results,
            suites | dict(state.counts),
            state.cadence,
            state.bypass_label,
            state.image_needed,
            state.cancelled,
        )
        outcomes: dict[str, Outcome | str] = {
            name: Outcome(state.results.get(name, "success"), job_outputs(name, full, fleet)) for name in workflow.jobs
        }
        simulate(workflow, Event("x", cancelled=state.cancelled), outcomes, explain=False)
    return (time.perf_counter() - start) / count


def gateway() -> float:
    """From process start to the dispatch at a local server, the shortest of three."""
    from tests.fast.ci.bot.helpers.github_server import APP_ID, APP_TOKEN, BOT_ID, REPO, TOKEN, GitHub

    times = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(ROOT / "registry.yaml", folder)
        shutil.copytree(ROOT / "docker", folder / "docker")
        for number in range(REPEAT):
            hub = GitHub()
            base = hub.start()
            hub.user("maria", "write")
            hub.pull(1, author="paul", sha="a" * 40)
            comment = hub.comment(1, "/rerun-test tests/fast/test_x.py", login="maria")
            payload = {
                "action": "created", "issue": {"number": 1, "pull_request": {}}, "comment": comment, "sender": comment["user"],
                "repository": {"default_branch": "main"},
            }  # fmt: skip
            payload["issue"]["pull_request"] = {"url": "x"}  # type: ignore[index]
            (folder / "event.json").write_text(json.dumps(payload))
            env = {
                **os.environ, "PYTHONPATH": str(ROOT / "ci"), "GITHUB_API_URL": base, "GITHUB_REPOSITORY": REPO, "GITHUB_TOKEN": TOKEN, "APP_TOKEN": APP_TOKEN,
                "APP_ID": str(APP_ID), "BOT_ID": str(BOT_ID), "GITHUB_EVENT_PATH": str(folder / "event.json"),
            }  # fmt: skip
            arrived: list[float] = []
            hub.on_dispatch = lambda workflow, run, inputs, seen=arrived: seen.append(time.perf_counter())
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "miles_ci", "bot", "gateway"],
                cwd=folder,
                env=env,
                check=True,
                capture_output=True,
            )
            hub.stop()
            assert arrived, number
            times.append(arrived[0] - start)
    return min(times)


def cards() -> None:
    rows = tuple(
        JobRow(
            f"j{n}",
            f"https://github.com/x/{n}",
            "failure",
            tuple(Analysis(f"j{n}", f"t{k}", f"reason {n % 40}") for k in range(3)),
        )
        for n in range(500)
    )
    card = Card("Nightly", "nightly", "now", "https://github.com/x", "failure", Report({"failed": 500}, ()), rows)
    lark.request(card, 1, "demo")
    pr_comment.render(card)


def main() -> int:
    fleet = load_fleet(ROOT / "registry.yaml")
    workflows = generate_and_lint(fleet)
    report = walk(workflows, fleet)
    states = sum(report.tried.values())
    rows = [
        ("generate and lint all files", best(lambda: generate_and_lint(fleet)), 2.0),
        (f"walker, {states:,} states, {len(report.violations)} violations", best(lambda: walk(workflows, fleet)), 30.0),
        ("gateway, process start to dispatch", gateway(), 1.0),
        ("cards of 500 jobs (Lark and PR)", best(cards), 0.2),
    ]
    for name, seconds, limit in rows:
        print(f"{name:<52} {seconds:8.3f} s   limit {limit:g} s   {'ok' if seconds <= limit else 'EXCEEDED'}")
    naive = naive_rate(workflows["pr-test.yml"], fleet)
    walker = rows[1][1] / states
    print(
        f"{'one state: walker / simulating the whole file':<52} {walker * 1e6:8.1f} us / {naive * 1e6:.1f} us = 1 / {naive / walker:.1f}"
    )
    return 1 if any(seconds > limit for _, seconds, limit in rows) or report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
