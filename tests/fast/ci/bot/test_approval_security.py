"""Who may run what: permissions, approvals of exact commits, stale labels, forged marks, forks."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from miles_ci.bot import access
from miles_ci.bot.approve import approve
from miles_ci.bot.github import Client
from miles_ci.bot.rerun.request import Request
from miles_ci.bot.resolve_run import resolve_commits
from miles_ci.errors import UsageError
from tests.fast.ci.bot.conftest import HEAD, Job, comment_event
from tests.fast.ci.bot.helpers.github_server import APP_ID, BOT_ID, REPO, GitHub, iso

NUMBER = 5


def no_directives(directives: Any) -> dict[str, str]:
    return resolve_commits(directives, {})


@pytest.fixture
def fork(hub: GitHub) -> GitHub:
    hub.user("maria", "write")
    hub.user("paul")
    hub.pull(NUMBER, author="paul", sha=HEAD, fork=True, pushed_at=time.time() - 3600)
    return hub


def label_event(
    hub: GitHub, login: str, *, sha: str = HEAD, kind: str = "User", at: float | None = None
) -> dict[str, Any]:
    user = {**hub.user(login), "type": kind}
    hub.labels[NUMBER].append("ok-to-test")
    entry = {
        "id": hub.new_id(), "node_id": "x", "url": "https://x.invalid", "actor": hub.user(login), "event": "labeled", "commit_id": None, "commit_url": None,
        "created_at": iso(at if at is not None else time.time()), "label": {"name": "ok-to-test", "color": "fff"}, "performed_via_github_app": None,
    }  # fmt: skip
    hub.events.setdefault(NUMBER, []).append(entry)
    return {
        "action": "labeled",
        "label": {"name": "ok-to-test"},
        "pull_request": {"number": NUMBER, "head": {"sha": sha}},
        "sender": user,
    }


def decide(event: dict[str, Any], client: Client, app: Client) -> str:
    return approve(event, client=client, app=app, resolve=no_directives, bot_id=BOT_ID, default_branch="main")


def authorise(job: Job, sha: str = HEAD, **env: str) -> int:
    values = {"REF": sha, "CADENCE": "", "PULL_NUMBER": str(NUMBER), "GITHUB_EVENT_NAME": "pull_request_target"}
    return job("authorise", **(values | env))[0]


@pytest.mark.parametrize(
    ("permission", "allowed"),
    [("admin", True), ("write", True), ("maintain", True), ("triage", False), ("read", False), (None, False)],
)
def test_permission_comes_from_the_collaborator_endpoint(
    hub: GitHub, client: Client, permission: str | None, allowed: bool
) -> None:
    hub.user("someone", permission)
    assert access.can_write(client, "someone") is allowed


@pytest.mark.parametrize("answer", ["maintain", "triage", "read", "none", "ADMIN", "", None, ["admin"]])
def test_only_the_two_words_for_write_access_give_it(
    client: Client, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GitHub says `write` for maintain and `read` for triage; a word that it may add later is no permission."""
    monkeypatch.setattr(client, "get", lambda path: {"permission": answer, "role_name": "admin"})
    assert access.can_write(client, "maria") is False
    monkeypatch.setattr(client, "get", lambda path: ["admin"])
    assert access.can_write(client, "maria") is False


def test_a_login_cannot_change_the_path(hub: GitHub, client: Client) -> None:
    hub.user("maria", "admin")
    assert access.can_write(client, "x/../maria") is False
    assert "x%2F..%2Fmaria" in hub.seen[-1].path


def test_a_fork_waits_and_is_told_what_to_do(fork: GitHub, job: Job) -> None:
    assert authorise(job) == 1


def test_the_sha_form_approves_exactly_that_commit_and_starts_the_rocm_run(fork: GitHub, job: Job) -> None:
    job("gateway", event=comment_event(fork, NUMBER, f"/ok-to-test {HEAD[:12]}", "maria"))
    check = next(iter(fork.checks.values()))
    assert (check["name"], check["head_sha"], check["app"]["id"]) == ("ci-approval", HEAD, APP_ID)
    assert fork.dispatched[-1][0] == "pr-test-rocm.yml"
    assert fork.dispatched[-1][1]["head_sha"] == HEAD
    assert authorise(job) == 0
    fork.pulls[NUMBER]["head"]["sha"] = "c3" * 20
    assert authorise(job, "c3" * 20) == 1  # a later push finds no approval
    assert authorise(job, HEAD) == 2  # and the old commit is superseded


@pytest.mark.parametrize("login", ["paul", "stranger"])
def test_neither_the_author_nor_a_stranger_can_approve_by_comment(fork: GitHub, job: Job, login: str) -> None:
    fork.permissions["paul"] = "write"  # even with write access, not one's own
    job("gateway", event=comment_event(fork, NUMBER, f"/ok-to-test {HEAD[:12]}", login))
    assert fork.checks == {}
    assert fork.dispatched == []


def test_the_wrong_sha_prefix_is_refused(fork: GitHub, job: Job) -> None:
    job("gateway", event=comment_event(fork, NUMBER, "/ok-to-test " + "f" * 12, "maria"))
    assert fork.checks == {}


def test_a_fresh_label_of_a_reviewer_approves_and_is_removed(fork: GitHub, client: Client, app: Client) -> None:
    assert decide(label_event(fork, "maria"), client, app).startswith("approved")
    assert fork.labels[NUMBER] == []
    assert access.live_approval(client, access.read_pull(client, NUMBER), APP_ID) is not None


def test_a_label_soon_after_a_push_is_stale(fork: GitHub, client: Client, app: Client) -> None:
    fork.pulls[NUMBER]["head"]["repo"]["pushed_at"] = iso(time.time() - 60)
    assert "refused" in decide(label_event(fork, "maria"), client, app)
    assert fork.checks == {}
    assert fork.labels[NUMBER] == []
    texts = [comment["body"] for comment in fork.comments_of(NUMBER)]
    assert f"/ok-to-test {HEAD[:12]}" in texts[-1]
    decide(label_event(fork, "maria"), client, app)
    assert len(fork.comments_of(NUMBER)) == 1  # said once for each commit


def test_a_push_between_label_and_run_is_noticed(fork: GitHub, client: Client, app: Client) -> None:
    event = label_event(fork, "maria", sha="e5" * 20)
    assert "head moved" in decide(event, client, app)
    assert fork.checks == {}


@pytest.mark.parametrize(("login", "kind"), [("paul", "User"), ("stranger", "User"), ("maria", "Bot")])
def test_labels_of_the_author_a_stranger_or_a_bot_approve_nothing(
    fork: GitHub, client: Client, app: Client, login: str, kind: str
) -> None:
    fork.permissions["paul"] = "admin"
    assert "refused" in decide(label_event(fork, login, kind=kind), client, app)
    assert fork.checks == {}
    assert fork.labels[NUMBER] == []


@pytest.mark.parametrize(
    ("login", "event", "label"), [("eve", "labeled", "ok-to-test"), ("maria", "unlabeled", "ok-to-test"), ("maria", "labeled", "other")]
)  # fmt: skip
def test_a_stale_label_is_not_made_fresh_by_another_entry_of_the_log(
    fork: GitHub, client: Client, app: Client, login: str, event: str, label: str
) -> None:
    now = time.time()
    fork.pulls[NUMBER]["head"]["repo"]["pushed_at"] = iso(now - 600)
    labelled = label_event(fork, "maria", at=now - 590)
    newer = {
        **fork.events[NUMBER][0],
        "id": fork.new_id(),
        "actor": fork.user(login),
        "created_at": iso(now),
        "event": event,
    }
    fork.events[NUMBER].append(newer | {"label": {"name": label, "color": "fff"}})
    assert "within 120 s of the label" in decide(labelled, client, app)
    assert fork.checks == {}


def test_the_last_time_somebody_added_the_label_counts(fork: GitHub, client: Client, app: Client) -> None:
    now = time.time()
    fork.pulls[NUMBER]["head"]["repo"]["pushed_at"] = iso(now - 600)
    event = label_event(fork, "maria", at=now)
    label_event(fork, "maria", at=now - 7200)
    assert decide(event, client, app).startswith("approved")


def test_a_push_exactly_two_minutes_before_the_label_is_the_last_that_is_accepted(fork: GitHub, client: Client) -> None:
    pull = access.read_pull(client, NUMBER)
    for seconds, fresh in ((access.STALE_S, True), (access.STALE_S - 1, False), (0, False), (-60, False)):
        pushed = replace(pull, pushed_at=1_000_000.0 - seconds)
        assert (access.label_is_fresh(pushed, HEAD, 1_000_000.0) is None) is fresh


def test_a_push_removes_the_label_and_approves_nothing(fork: GitHub, client: Client, app: Client) -> None:
    fork.labels[NUMBER].append("ok-to-test")
    event = {"action": "synchronize", "pull_request": {"number": NUMBER, "head": {"sha": HEAD}}}
    assert "label is removed" in decide(event, client, app)
    assert fork.labels[NUMBER] == []


def store(app: Client, **values: Any) -> None:
    approval = access.Approval(
        HEAD, values.get("actor", 7), values.get("directives", {}), values.get("hash", access.directives_hash(""))
    )
    access.store_approval(app, approval)


def test_an_approval_written_with_another_token_is_ignored(fork: GitHub, client: Client, job: Job) -> None:
    store(client)  # GITHUB_TOKEN: any workflow could do this
    assert authorise(job) == 1


@pytest.mark.parametrize(
    ("status", "conclusion"),
    [
        *(("completed", word) for word in ("failure", "neutral", "cancelled", "skipped", "timed_out", "action_required")),
        ("completed", None), ("in_progress", "success"), ("queued", "success"),
    ],
)  # fmt: skip
def test_only_a_completed_success_is_an_approval(
    fork: GitHub, app: Client, job: Job, status: str, conclusion: str | None
) -> None:
    store(app)
    assert authorise(job) == 0
    next(iter(fork.checks.values())).update(status=status, conclusion=conclusion)
    assert authorise(job) == 1


def test_an_approval_of_another_commit_is_ignored_even_if_it_is_listed(
    fork: GitHub, client: Client, app: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(app)
    (check,) = fork.checks.values()
    pull = access.read_pull(client, NUMBER)
    for sha, found in ((HEAD, True), ("c3" * 20, False), (HEAD[:12], False), (None, False)):
        monkeypatch.setattr(client, "pages", lambda *_, sha=sha, **__: iter([check | {"head_sha": sha}]))
        assert (access.live_approval(client, pull, APP_ID) is not None) is found


def test_an_approval_by_the_author_or_with_a_malformed_text_is_ignored(fork: GitHub, app: Client, job: Job) -> None:
    store(app, actor=fork.users["paul"])
    assert authorise(job) == 1
    store(app)
    list(fork.checks.values())[-1]["output"]["text"] = '{"v":1,"v":1}'
    assert authorise(job) == 1


def test_directives_edited_after_the_approval_void_it_and_other_edits_do_not(
    fork: GitHub, app: Client, job: Job
) -> None:
    fork.pulls[NUMBER]["body"] = "ci-image-tag: v1\n"
    store(app, directives={"ci-image-tag": "v1"}, hash=access.directives_hash("ci-image-tag: v1"))
    assert authorise(job) == 0
    fork.pulls[NUMBER]["body"] = "a better description\n\nci-image-tag: v1\n"
    assert authorise(job) == 0
    fork.pulls[NUMBER]["body"] = "ci-image-tag: v2\n"
    assert authorise(job) == 1


def test_the_run_uses_the_commits_stored_in_the_approval(fork: GitHub, app: Client, job: Job) -> None:
    store(app, directives={"ci-sglang-pr": "d4" * 20}, hash=access.directives_hash(""))
    values = {"REF": HEAD, "CADENCE": "", "PULL_NUMBER": str(NUMBER), "GITHUB_EVENT_NAME": "pull_request_target"}
    assert json.loads(job("authorise", **values)[1]["directives"]) == {"ci-sglang-pr": "d4" * 20}


def test_withdrawal_is_neutral_and_cancels_runs_of_that_commit(fork: GitHub, app: Client, job: Job) -> None:
    store(app)
    direct = fork.run("pr-test.yml", title="x", head_sha=HEAD, event="pull_request")
    dispatched = fork.run("pr-test-rocm.yml", title=f"ROCm {HEAD} [q]")
    other = fork.run("pr-test.yml", title="y", head_sha="9" * 40, event="pull_request")
    job("gateway", event=comment_event(fork, NUMBER, "/not-ok-to-test", "maria"))
    assert authorise(job) == 1
    assert [fork.runs[run["id"]]["conclusion"] for run in (direct, dispatched, other)] == [
        "cancelled",
        "cancelled",
        None,
    ]


def test_a_same_repository_author_with_write_access_needs_no_approval(hub: GitHub, job: Job) -> None:
    hub.user("maria", "write")
    hub.pull(NUMBER, author="maria", sha=HEAD)
    assert authorise(job) == 0
    hub.permissions["maria"] = "read"
    assert authorise(job) == 1


def test_a_cadence_is_believed_only_from_our_own_events(hub: GitHub, job: Job) -> None:
    ours = {"CADENCE": "nightly", "PULL_NUMBER": "", "GITHUB_SHA": HEAD}
    assert authorise(job, **ours, GITHUB_EVENT_NAME="schedule") == 0
    assert authorise(job, **(ours | {"PULL_NUMBER": "5"}), GITHUB_EVENT_NAME="schedule") == 2
    for name in ("pull_request_target", "pull_request", "merge_group", "workflow_run", "issue_comment"):
        assert authorise(job, **ours, GITHUB_EVENT_NAME=name) == 2
    assert authorise(job, "main", **ours, GITHUB_EVENT_NAME="schedule") == 2


@pytest.mark.parametrize(
    ("event", "code"),
    [("schedule", 0), ("push", 0), ("workflow_dispatch", 0), ("merge_group", 0)]
    + [
        (name, 2)
        for name in ("pull_request", "pull_request_target", "workflow_run", "issue_comment", "repository_dispatch")
    ],
)
def test_without_a_pull_request_only_the_own_commit_of_our_own_events_passes(
    hub: GitHub, job: Job, event: str, code: int
) -> None:
    ours = {"PULL_NUMBER": "", "GITHUB_SHA": HEAD, "GITHUB_EVENT_NAME": event}
    assert authorise(job, **ours) == code
    # A dispatch can name any commit, a fork's too: they all share one object store.
    assert authorise(job, "e5" * 20, **ours) == 2
    assert hub.seen == []


def request_env(**values: str) -> dict[str, str]:
    base = {
        "PULL_NUMBER": "5", "COMMAND_COMMENT_ID": "9", "TEST_FILE": "tests/fast/sample/test_good.py", "TEST_NODE": "", "SUITE": "", "HEAD_SHA": HEAD,
        "REQUEST_ID": "0" * 32, "REQUESTER": "maria", "DIRECTIVES": "{}",
    }  # fmt: skip
    return base | values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PULL_NUMBER", "5; id"), ("PULL_NUMBER", "0"), ("COMMAND_COMMENT_ID", "x"), ("HEAD_SHA", "main"), ("HEAD_SHA", "A1" * 20), ("REQUEST_ID", "z" * 32),
        ("REQUESTER", "a b"), ("REQUESTER", "$(id)"), ("SUITE", "../x"), ("TEST_FILE", "tests/fast/../test_x.py"), ("TEST_NODE", "a;b"), ("DIRECTIVES", "[]"),
        ("DIRECTIVES", '{"a":1}'), ("DIRECTIVES", "{"),
    ],
)  # fmt: skip
def test_a_rerun_checks_its_inputs_again(name: str, value: str) -> None:
    assert Request.from_environment(request_env()).target == "tests/fast/sample/test_good.py"
    with pytest.raises(UsageError):
        Request.from_environment(request_env(**{name: value}))


def test_an_unapproved_fork_runs_on_hosted_machines_only(fork: GitHub, job: Job, app: Client) -> None:
    gpu = request_env(TEST_FILE="tests/fast-gpu/test_kernel.py", GITHUB_RUN_ID="1")
    assert job("resolve", "--root", ".", **gpu)[0] == 2
    assert job("resolve", "--root", ".", **request_env(GITHUB_RUN_ID="1"))[1]["count_cpu"] == "1"


def test_an_author_may_rerun_only_an_approved_commit(fork: GitHub, job: Job, app: Client) -> None:
    command = "/rerun-test tests/fast/sample/test_good.py"
    job("gateway", event=comment_event(fork, NUMBER, command, "paul"))
    assert fork.dispatched == []
    store(app)
    job("gateway", event=comment_event(fork, NUMBER, command, "paul"))
    assert len(fork.dispatched) == 1


def test_a_comment_by_a_bot_an_edit_or_on_an_issue_does_nothing(fork: GitHub, job: Job) -> None:
    event = comment_event(fork, NUMBER, "/cancel", "maria")
    for change in (
        {"action": "edited"},
        {"sender": {**event["sender"], "type": "Bot"}},
        {"sender": {**event["sender"], "id": 999}},
        {"issue": {"number": NUMBER}},
    ):
        job("gateway", event={**event, **change})
    assert [seen.method for seen in fork.seen] == []


@pytest.mark.parametrize("missing", ["comment", "issue", "action", "sender"])
def test_a_payload_without_a_field_exits_2(
    fork: GitHub, job: Job, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    event = comment_event(fork, NUMBER, "/help", "maria")
    del event[missing]
    assert job("gateway", event=event)[0] == 2
    assert f"'{missing}" in capsys.readouterr().err


def test_a_fork_that_needs_a_new_image_is_told_instead_of_getting_a_push(
    monkeypatch: pytest.MonkeyPatch, job: Job, hub: GitHub
) -> None:
    monkeypatch.setattr(
        "miles_ci.bot.oci.Registry.digest", lambda self, text: None if ":ci-" in text else "sha256:" + "a" * 64
    )
    event = {"pull_request": {"body": "", "head": {"repo": {"full_name": "paul/miles"}}}}
    assert job("resolve-deps", "--image", "cuda", event=event)[0] == 2
    event["pull_request"]["head"]["repo"]["full_name"] = REPO
    code, outputs = job("resolve-deps", "--image", "cuda", event=event)
    assert (code, outputs["image_build"]) == (0, "true")
    assert outputs["image_reference"].endswith(f":ci-{outputs['image_key'][:16]}")
