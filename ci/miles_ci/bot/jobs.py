"""The jobs of the generated workflows as functions: environment and event in, outputs and exit code out.

Each reads what the workflow passes through `env`, nothing else; names are those of the generator.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_ci.bot import access, card_comment, planning, required_check, resolve_run, status_card
from miles_ci.bot.actions_io import event, field, variable, write_outputs, write_summary
from miles_ci.bot.dependency_checkouts import load_dependencies
from miles_ci.bot.directives import Directives
from miles_ci.bot.github import Client
from miles_ci.bot.grammar import SHA
from miles_ci.bot.marker import Marker, ours
from miles_ci.bot.oci import Registry, parse_reference
from miles_ci.bot.rerun import announce as announcing
from miles_ci.bot.rerun import report as reporting
from miles_ci.bot.rerun import resolve as resolving
from miles_ci.bot.rerun.request import Request
from miles_ci.bot.runs import read_run
from miles_ci.errors import ExitCode, UsageError
from miles_ci.registry import Fleet, load_fleet
from miles_ci.report.cards import Card
from miles_ci.report.strict_json import StrictJsonError, loads
from miles_ci.run.results import write_json

# github-actions[bot]: the author of what GITHUB_TOKEN writes.
DEFAULT_BOT_ID = 41_898_282
REGISTRY = Path("registry.yaml")


def bot_id() -> int:
    return int(variable("BOT_ID", required=False) or DEFAULT_BOT_ID)


def app_id() -> int | None:
    """Our GitHub App: the repository variable, and for runs that see none (a fork's) the default branch's registry."""
    text, stated = variable("APP_ID", required=False), _fleet().approval_app
    if text and not text.isdigit():
        raise UsageError("APP_ID: expected the number of our GitHub App (vars.MILES_CI_APP_ID)")
    if text and stated is not None and int(text) != stated:
        raise UsageError(f"APP_ID is {text}, but registry.yaml says approval_app: {stated}; approvals of one App count")
    return int(text) if text else stated


def _our_app() -> int:
    found = app_id()
    if found is None:
        raise UsageError("APP_ID is not set: set the repository variable MILES_CI_APP_ID to our GitHub App's number")
    return found


def _fleet() -> Fleet:
    return load_fleet(REGISTRY, shown_as="registry.yaml")


def _run() -> tuple[int, int, str]:
    run_id, attempt = int(variable("GITHUB_RUN_ID")), int(variable("GITHUB_RUN_ATTEMPT"))
    server = variable("GITHUB_SERVER_URL", required=False) or "https://github.com"
    return run_id, attempt, f"{server}/{variable('GITHUB_REPOSITORY')}/actions/runs/{run_id}"


def _resolver() -> Callable[[Directives], dict[str, str]]:
    dependencies = load_dependencies(Path("."))
    return lambda directives: resolve_run.resolve_commits(directives, dependencies)


def plan(args: argparse.Namespace) -> int:
    suites = args.suites.split()
    made, _, fleet = planning.make_plan(
        event=event(),
        cadence=args.cadence,
        root=args.root,
        registry=REGISTRY,
        suites=suites,
        source=variable("GITHUB_SHA", required=False) or None,
    )
    made.save(args.output)
    write_outputs(planning.outputs(made, suites))
    write_summary(planning.summary(made, fleet, suites))
    for suite in suites:
        print(
            f"{suite}: {made.suite(suite).selected} tests in {made.suite(suite).shards} shards {made.suite(suite).reason or ''}".rstrip()
        )
    return ExitCode.OK


def check(args: argparse.Namespace) -> int:
    suites = args.suites.split()
    try:
        needs = required_check.needs_of(loads(variable("NEEDS"), what="NEEDS"))
    except StrictJsonError as error:
        raise UsageError(str(error)) from error
    made, counts = required_check.find_plan(args.plan), None
    never_executed: tuple[str, ...] = ()
    off = planning.disabled_pools(_fleet(), suites)
    if made is not None:
        counts = {suite: sum(len(shard.units) for shard in made.shards_of(suite)) for suite in suites}
        merged = required_check.merged_results(made, args.results, needs, suites, off)
        never_executed = (*merged.never_executed, *merged.faults)
        write_json(args.output / "merged.json", merged.as_json())
    judged = required_check.judge(
        needs=needs,
        counts=counts,
        never_executed=never_executed,
        cancelled=variable("CANCELLED", required=False) == "true",
        disabled=off,
    )
    print(required_check.text(judged))
    write_summary(f"### required-check\n\n```\n{required_check.text(judged)}\n```\n")
    return ExitCode.OK if judged.ok else ExitCode.TEST_FAILURE


def resolve_deps(args: argparse.Namespace) -> int:
    payload = event()
    pull = payload.get("pull_request") if isinstance(payload.get("pull_request"), dict) else {}
    approved = variable("DIRECTIVES", required=False)
    dispatch = {"ci-image-tag": args.image_tag} if args.image_tag else {}
    body = str((pull or {}).get("body") or "")
    if approved:
        # The approved commits, and only those: a later edit of the description changes nothing.
        given = loads(approved, what="DIRECTIVES")
        dispatch, body = {str(k): str(v) for k, v in given.items()} | dispatch, ""
    head = ((pull or {}).get("head") or {}).get("repo") or {}
    fork = bool(pull) and head.get("full_name") != variable("GITHUB_REPOSITORY")
    found = resolve_run.resolve_run(
        body=body, dispatch=dispatch, cadence=variable("CADENCE", required=False) or "regular", fork=fork, root=Path("."),
        fleet=_fleet(), image=args.image, dependencies=load_dependencies(Path(".")), registry=Registry(variable("GITHUB_TOKEN")),
    )  # fmt: skip
    write_outputs(found.outputs())
    write_summary(found.summary())
    return ExitCode.OK


def resolve_image(args: argparse.Namespace) -> int:
    reference = parse_reference(args.reference)
    digest = Registry(variable("GITHUB_TOKEN")).digest(args.reference)
    if digest is None:
        raise UsageError(f"image {args.reference} does not exist: a stale one is never used instead")
    write_outputs({"image": f"{reference.repository}@{digest}"})
    print(f"{args.reference} is {digest}")
    return ExitCode.OK


def authorise(args: argparse.Namespace) -> int:
    sha, cadence, number = variable("REF"), variable("CADENCE", required=False), variable("PULL_NUMBER", required=False)
    if not SHA.fullmatch(sha):
        raise UsageError(f"REF {sha[:60]!r}: expected 40 hex digits")
    if cadence or not number:
        _require_own_commit(sha, cadence, number)
        write_outputs({"sha": sha, "directives": ""})
        return ExitCode.OK
    client = Client.from_environment()
    if not number.isdigit():
        raise UsageError("PULL_NUMBER is not a number")
    pull = access.read_pull(client, int(number))
    if pull.head_sha != sha:
        raise UsageError(f"the head is {pull.head_sha}, this run was started for {sha}: superseded")
    allowed, why, approval = access.may_run_pull(client, pull, app_id())
    print(why)
    if not allowed:
        write_summary(f"### Not authorised\n\n{why}\n")
        return ExitCode.TEST_FAILURE
    directives = dict(approval.directives) if approval else _own_directives(pull)
    import json

    write_outputs({"sha": sha, "directives": json.dumps(directives, sort_keys=True)})
    return ExitCode.OK


# Events that only people with write access can cause, with the event's own commit: a branch, a tag, the merge queue.
OWN_EVENTS = ("schedule", "push", "workflow_dispatch", "merge_group")


def _require_own_commit(sha: str, cadence: str, number: str) -> None:
    """A run without a pull request: nightly, weekly, release, a dispatch, the merge queue. Raises for all else."""
    event_name = variable("GITHUB_EVENT_NAME")
    if cadence and (number or event_name not in OWN_EVENTS[:3]):
        raise UsageError("a cadence is only taken from our own scheduled workflows")
    if event_name not in OWN_EVENTS:
        raise UsageError(f"PULL_NUMBER is not set, and {event_name} is no event of this repository's own branches")
    if sha != variable("GITHUB_SHA"):
        raise UsageError(f"REF {sha} is not the commit of this {event_name}: name the pull request it belongs to")


def _own_directives(pull: access.PullRequest) -> dict[str, str]:
    found = access.resolved_directives(pull, _resolver())
    if not isinstance(found, dict):
        raise UsageError("pull request description: " + "; ".join(found.messages))
    return found


def gateway(args: argparse.Namespace) -> int:
    from miles_ci.bot.gateway import Gateway

    payload = event()
    client, app = Client.from_environment(), Client.from_environment(token_name="APP_TOKEN")
    branch = field(payload, "repository.default_branch", str)
    for line in Gateway(client, app, _fleet(), Path("."), bot_id(), _our_app(), branch, _resolver()).handle(payload):
        print(line)
    return ExitCode.OK


def approve(args: argparse.Namespace) -> int:
    from miles_ci.bot.approve import approve as decide

    payload = event()
    client, app = Client.from_environment(), Client.from_environment(token_name="APP_TOKEN")
    branch = field(payload, "repository.default_branch", str)
    print(decide(payload, client=client, app=app, resolve=_resolver(), bot_id=bot_id(), default_branch=branch))
    return ExitCode.OK


def announce(args: argparse.Namespace) -> int:
    request = Request.from_environment()
    run_id, attempt, url = _run()
    done = announcing.announce(
        Client.from_environment(), request, run_id=run_id, attempt=attempt, run_url=url, bot_id=bot_id()
    )
    write_outputs({"comment_id": str(done.comment_id), "check_id": str(done.check_id)})
    print(f"comment {done.comment_id}, check run {done.check_id} {done.note}".rstrip())
    return ExitCode.OK


def resolve(args: argparse.Namespace) -> int:
    request, client, fleet = Request.from_environment(), Client.from_environment(), _fleet()
    pull = access.read_pull(client, request.pull_number)
    # A rerun is for one exact commit, and so is an approval; it is asked for now, not when the rerun was.
    allowed, why, approval = access.may_run_pull(client, pull, app_id())
    print(why)
    trusted = allowed and (approval is None or approval.sha == request.head_sha)
    legs = resolving.legs(args.root, fleet, request, self_hosted=trusted)
    images: dict[str, str] = {}
    registry = Registry(variable("GITHUB_TOKEN"))
    for backend in {leg.backend for leg in legs} - {"cpu"}:
        images[backend] = _image_of(fleet, backend, request, registry)
    write_outputs(resolving.outputs(request.head_sha, legs, images, request.directives))
    for leg in legs:
        print(f"{leg.suite}: {leg.hardware} on {', '.join(leg.runs_on)}")
    return ExitCode.OK


def _image_of(fleet: Fleet, backend: str, request: Request, registry: Registry) -> str:
    from miles_ci.workflows.files.pr_test import default_image

    name = default_image(fleet, backend)
    dispatch = {"ci-image-tag": request.directives["ci-image-tag"]} if "ci-image-tag" in request.directives else {}
    found = resolve_run.resolve_run(
        body="", dispatch=dispatch, cadence="regular", fork=False, root=Path("."), fleet=fleet, image=name, dependencies={}, registry=registry
    )  # fmt: skip
    digest = registry.digest(found.image_reference)
    if digest is None:
        raise UsageError(f"image {found.image_reference} does not exist yet: run pr-test first, it builds it")
    return f"{parse_reference(found.image_reference).repository}@{digest}"


def report(args: argparse.Namespace) -> int:
    request, client = Request.from_environment(), Client.from_environment()
    run_id, attempt, url = _run()
    needs = required_check.needs_of(loads(variable("NEEDS"), what="NEEDS"))
    planned = loads(variable("PLANNED", required=False) or "{}", what="PLANNED")
    if not isinstance(planned, dict):
        raise UsageError("PLANNED: expected an object")
    finding = reporting.collect(
        client, run_id, attempt, needs.get("resolve", "missing"), {str(k): str(v) for k, v in planned.items()}
    )
    done = reporting.report(
        client, request, finding, run_id=run_id, attempt=attempt, run_url=url, bot_id=bot_id(),
        comment_id=_number("COMMENT_ID"), check_id=_number("CHECK_ID"),
    )  # fmt: skip
    print(f"{finding.verdict.state}: {done}")
    return ExitCode.OK


def _number(name: str) -> int:
    """An id from another job's outputs; empty or malformed counts as lost."""
    text = variable(name, required=False)
    return int(text) if text.isdigit() else 0


def lint_report(args: argparse.Namespace) -> int:
    client, number, sha = Client.from_environment(), int(variable("PULL_NUMBER")), variable("HEAD_SHA")
    request_id, result, size = variable("REQUEST_ID"), variable("RESULT"), variable("SIZE", required=False)
    if not SHA.fullmatch(sha):
        raise UsageError("HEAD_SHA: malformed")
    run_id, _, url = _run()
    if result != "success":
        text = f"The formatter did not finish ({result}), see [the run]({url})."
    elif size == "0":
        text = f"`{sha[:12]}` is formatted as the default branch wants it."
    else:
        commands = f"gh run download {run_id} --name lint-patch\ngit checkout {sha}\ngit apply lint.patch"
        text = f"The formatter changes `{sha[:12]}` ({size} bytes). To apply:\n```\n{commands}\n```"
    body = f"{Marker('lint', req=request_id).line()}\n{text}"

    def proof() -> dict[str, Any] | None:
        found = ours(client.pages(f"{{repo}}/issues/{number}/comments"), bot_id(), "lint", request_id)
        return dict(found[0][0]) if found else None

    if proof() is None:
        client.post(f"{{repo}}/issues/{number}/comments", {"body": body}, proof=proof)
    return ExitCode.OK


def sweep(args: argparse.Namespace) -> int:
    from miles_ci.bot.sweeper import sweep as pass_over

    longest = max(suite.timeout_s for suite in _fleet().suites.values()) + 3600
    done = pass_over(Client.from_environment(), bot_id=bot_id(), limit_s=float(longest))
    _write_list("Sweep", done or ["Nothing was left behind."])
    return ExitCode.OK


def starvation(args: argparse.Namespace) -> int:
    """Fails when a job starves: GitHub tells somebody of a scheduled run that failed, nobody reads a green one."""
    from miles_ci.bot.starvation import starved

    app = Client.from_environment(token_name="APP_TOKEN") if variable("APP_TOKEN", required=False) else None
    found = list(starved(Client.from_environment(), app, _fleet()))
    _write_list("Waiting for machines", found or ["Every job that waits has a machine to wait for."])
    return ExitCode.INFRA if found else ExitCode.OK


def _write_list(title: str, lines: list[str]) -> None:
    print("\n".join(lines))
    write_summary("\n".join([f"### {title}", "", *(f"- {line}" for line in lines)]) + "\n")


def card(args: argparse.Namespace) -> int:
    from miles_ci.report.cards import summary

    payload, client, fleet = event(), Client.from_environment(), _fleet()
    run = read_run(client, field(payload, "workflow_run.id", int))
    made = status_card.make_card(client, run, now=client.clock())
    notes = []
    for entry in fleet.notify.values():
        if made.cadence not in entry.cadences or (entry.when == "failure" and made.result == "success"):
            continue
        if entry.kind == "pr_comment":
            number = status_card.pull_of(client, run)
            if number is not None:
                notes.append(card_comment.write_comment(client, number, run, made, bot_id=bot_id()))
        elif entry.kind == "lark":
            notes.append(_lark(entry.secret, made))
        elif entry.kind == "summary":
            write_summary(summary.render(made))
    print("\n".join(notes) or "nothing to write")
    return ExitCode.OK


def _lark(secret_name: str | None, made: Card) -> str:
    """A missing secret and a refused message are said in the log; the tests' verdict stands."""
    url = os.environ.get(secret_name or "", "")
    if not url:
        return f"::warning::Lark: secret {secret_name} is not set, no message sent"
    done = status_card.send_lark(made, url, os.environ.get("LARK_SIGNING_SECRET") or None)
    return f"Lark: {done.message} after {done.attempts} attempts" if done.ok else f"::warning::Lark: {done.message}"


JOBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "announce": announce, "approve": approve, "authorise": authorise, "card": card, "required-check": check, "gateway": gateway,
    "lint-report": lint_report, "plan": plan, "report": report, "resolve": resolve, "resolve-deps": resolve_deps,
    "resolve-image": resolve_image, "starvation": starvation, "sweep": sweep,
}  # fmt: skip
